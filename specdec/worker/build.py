"""Workers from settings: load the model, make the runner, start the thread, warm up."""

from __future__ import annotations

import torch

from specdec.config import EngineConfig
from specdec.errors import ConfigError
from specdec.runner.load import load_model
from specdec.runner.model import ModelRunner
from specdec.worker.worker import DraftWorker, TargetWorker


def build_target_worker(config: EngineConfig) -> TargetWorker:
    """The target worker of a config, warmed up.

    Raises:
        ConfigError: see `load_model` and `ModelRunner`.
    """
    _limit_threads()
    settings = config.target_worker
    worker = TargetWorker(
        ModelRunner(load_model(config.target), settings),
        settings.idle_sequence_timeout_s,
        prefix_cache=settings.prefix_cache,
    )
    worker.warm_up()
    return worker


def build_draft_worker(config: EngineConfig) -> DraftWorker:
    """The draft worker of a config, warmed up.

    Raises:
        ConfigError: there is no draft in the config, or as for the target.
    """
    if config.draft is None or config.draft_model is None:
        raise ConfigError("draft is null in the config: there is no draft worker to build")
    _limit_threads()
    settings = config.draft_worker
    loaded = load_model(config.draft_model, config.draft.cut_layers)
    worker = DraftWorker(
        ModelRunner(loaded, settings), settings.idle_sequence_timeout_s, prefix_cache=settings.prefix_cache
    )
    worker.warm_up()
    return worker


def _limit_threads() -> None:
    """One thread per worker: two workers on two cores with multi-threaded kernels wait for each other's threads."""
    torch.set_num_threads(1)
