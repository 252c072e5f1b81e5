"""Whether a draft and a target go together, told before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig

from specdec.config import EngineConfig, ModelSettings, WorkerSettings
from specdec.errors import ConfigError
from specdec.runner.load import load_hf_tokenizer, read_model_config, resolve_device
from specdec.runner.sources import resolve_source
from specdec.runner.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong, or worth knowing, about a config.

    Attributes:
        setting: path of the setting it is about.
        fatal: nothing can be served with it.
    """

    setting: str
    message: str
    fatal: bool

    def __str__(self) -> str:
        return f"{self.setting}: {self.message}"


@dataclass(frozen=True, slots=True)
class _Model:
    """What can be told of a model from its folder."""

    role: str
    folder: Path
    config: PreTrainedConfig
    tokenizer: Tokenizer
    max_model_len: int
    num_bytes: int


def require_sound_pair(config: EngineConfig) -> None:
    """
    Raises:
        ConfigError: the config has a fatal fault; the message lists all of them.
    """
    fatal = [str(finding) for finding in check_pair(config) if finding.fatal]
    if fatal:
        raise ConfigError("\n".join(fatal))


def check_pair(config: EngineConfig) -> list[Finding]:
    """Everything wrong with a config that can be told from the models' folders, which are fetched if need be."""
    findings: list[Finding] = []
    target = _inspect("target", config.target, config.target_worker, findings)
    draft = None
    if config.draft is not None and config.draft_model is not None:
        if config.draft.cut_layers is None:
            draft = _inspect("draft", config.draft_model, config.draft_worker, findings)
        elif target is not None:
            _check_cut(config.draft.cut_layers, target, findings)
            draft = _inspect("draft", config.draft_model, config.draft_worker, findings)
    if target is not None and draft is not None:
        _check_tokenizers(target, draft, findings)
        _check_contexts(target, draft, findings)
    _check_memory(config, [model for model in (target, draft) if model is not None], findings)
    return findings


def _inspect(role: str, settings: ModelSettings, worker: WorkerSettings, findings: list[Finding]) -> _Model | None:
    """Read a model's folder; None, with a finding, where that fails."""
    try:
        folder = resolve_source(settings.source, settings.revision, setting=f"{role}.source")
        config = read_model_config(folder).get_text_config()
        tokenizer = Tokenizer(load_hf_tokenizer(folder), frozenset())
    except ConfigError as error:
        findings.append(Finding(f"{role}.source", str(error).removeprefix(f"{role}.source "), fatal=True))
        return None
    try:
        resolve_device(settings.device)
    except ConfigError as error:
        findings.append(Finding(f"{role}.device", str(error), fatal=True))
    positions = int(config.max_position_embeddings)
    wanted = worker.max_model_len or positions
    if wanted > positions:
        findings.append(
            Finding(
                f"{role}_worker.max_model_len",
                f"is {wanted}, but the model was made for {positions} positions; lower it",
                fatal=True,
            )
        )
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return _Model(role, folder, config, tokenizer, wanted, num_bytes)


def _check_cut(layers: list[int], target: _Model, findings: list[Finding]) -> None:
    total = int(target.config.num_hidden_layers)
    wrong = [layer for layer in layers if not 0 <= layer < total]
    if wrong:
        findings.append(
            Finding("draft.cut_layers", f"{wrong} not in the target, whose layers are 0 to {total - 1}", fatal=True)
        )
    if len(set(layers)) != len(layers):
        findings.append(Finding("draft.cut_layers", f"{layers} names a layer twice; remove it", fatal=True))


def _check_tokenizers(target: _Model, draft: _Model, findings: list[Finding]) -> None:
    # Sizes are not compared: embeddings are padded, and two vocabularies of one size may differ in every token.
    if target.tokenizer.fingerprint() != draft.tokenizer.fingerprint():
        findings.append(
            Finding(
                "draft.source",
                f"its tokenizer ({draft.tokenizer.vocab_size} tokens) is not the target's "
                f"({target.tokenizer.vocab_size} tokens), so its token ids mean other words; choose a draft of the "
                "target's family, or cut one from the target with draft.cut_layers",
                fatal=True,
            )
        )
    for model in (target, draft):
        embedded = int(model.config.vocab_size)
        if embedded < model.tokenizer.vocab_size:
            findings.append(
                Finding(
                    f"{model.role}.source",
                    f"the tokenizer has {model.tokenizer.vocab_size} tokens, the model only {embedded}; prompts with "
                    "the others will be refused",
                    fatal=False,
                )
            )


def _check_contexts(target: _Model, draft: _Model, findings: list[Finding]) -> None:
    if draft.max_model_len < target.max_model_len:
        findings.append(
            Finding(
                "draft_worker.max_model_len",
                f"is {draft.max_model_len}, less than the target's {target.max_model_len}; longer sequences are "
                "decoded without a draft",
                fatal=False,
            )
        )


def _check_memory(config: EngineConfig, models: list[_Model], findings: list[Finding]) -> None:
    """Compare what both workers will take with what this machine has, where they run on its CPU."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    workers = {"target": config.target_worker, "draft": config.draft_worker}
    needed = sum(model.num_bytes + workers[model.role].kv_cache_bytes for model in models)
    if config.target.device != "cuda" and models and needed > available:
        findings.append(
            Finding(
                "target_worker.kv_cache_bytes",
                f"weights and KV caches take about {needed >> 20} MiB, this machine has {available >> 20} MiB; lower "
                "kv_cache_bytes, or take a smaller model",
                fatal=False,
            )
        )
