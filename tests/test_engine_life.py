"""How an engine in this process starts, frees what it held, and ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specdec import Engine
from specdec.config import DraftSettings, EngineConfig, ModelSettings, SpeculationSettings, WorkerSettings
from specdec.errors import ConfigError, WorkerUnavailableError
from tests.models import make_tiny_llama

WORKER = WorkerSettings(kv_cache_bytes=4 << 20)
PROMPT = "1 2 3 4 5 6 7 8 9"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig(
        target=ModelSettings(source=str(make_tiny_llama(tmp_path_factory.mktemp("llama"))), device="cpu"),
        draft=DraftSettings(cut_layers=[0], device="cpu"),
        target_worker=WORKER,
        draft_worker=WORKER,
    )


@pytest.fixture(scope="module")
def engine(config: EngineConfig) -> Iterator[Engine]:
    with Engine(config) as engine:
        yield engine


def num_sequences(engine: Engine) -> int:
    return sum(worker.info().num_sequences for worker in engine._workers)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def test_finished_generations_leave_no_kv(engine: Engine) -> None:
    engine.generate("abc", max_tokens=20)
    until(lambda: num_sequences(engine) == 0)


def test_an_iterator_closed_early_frees_its_kv(engine: Engine) -> None:
    stream = engine.stream("abc", max_tokens=400, ignore_eos=True)
    for _ in range(3):
        next(stream)
    until(lambda: num_sequences(engine) == 2)
    stream.close()
    until(lambda: num_sequences(engine) == 0)


def test_leaving_a_stream_by_an_error_frees_its_kv(engine: Engine) -> None:
    def read() -> None:
        for _ in engine.stream("abc", max_tokens=400, ignore_eos=True):
            raise LookupError("the reader's own")

    with pytest.raises(LookupError):
        read()
    until(lambda: num_sequences(engine) == 0)


def test_an_engine_without_a_draft_says_the_same(engine: Engine, config: EngineConfig) -> None:
    options = {"temperature": 0.8, "seed": 21, "max_tokens": 25}
    wanted = engine.generate(PROMPT, **options)
    off = SpeculationSettings(enabled=False)
    for changes in ({"draft": None}, {"speculation": off}):
        with Engine(config.model_copy(update=changes)) as plain:
            completion = plain.generate(PROMPT, **options)
            assert len(plain._workers) == 1
        assert completion.token_ids == wanted.token_ids
        assert completion.stats.num_draft_tokens == 0


def test_a_closed_engine_ends_what_runs_and_refuses_what_comes(config: EngineConfig) -> None:
    engine = Engine(config)
    num_threads = threading.active_count()
    stream = engine.stream("abc", max_tokens=400, ignore_eos=True)
    next(stream)
    engine.close()
    engine.close()  # twice is no harm
    with pytest.raises(WorkerUnavailableError):
        list(stream)
    with pytest.raises(WorkerUnavailableError):
        engine.generate("abc", max_tokens=3)
    assert threading.active_count() == num_threads - 3, "the loop's thread and the workers' two have ended"


def test_leaving_the_context_closes_the_engine_even_by_an_error(config: EngineConfig) -> None:
    with pytest.raises(LookupError), Engine(config) as engine:
        raise LookupError
    with pytest.raises(WorkerUnavailableError):
        engine.generate("abc", max_tokens=3)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"target": ModelSettings(source="./no/such/folder")}, "no/such/folder"),
        ({"draft": DraftSettings(source="./no/such/draft")}, "no/such/draft"),
        ({"draft": DraftSettings(cut_layers=[5])}, "cut_layers"),
        ({"target_worker": WorkerSettings(kv_cache_bytes=1 << 16)}, "kv_cache_bytes"),
        ({"target_worker": WorkerSettings(max_model_len=100_000)}, "max_model_len"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_cannot_work_is_refused_at_start(
    config: EngineConfig, changes: dict[str, object], names: str
) -> None:
    num_threads = threading.active_count()
    with pytest.raises(ConfigError, match=names):
        Engine(config.model_copy(update=changes))
    assert threading.active_count() == num_threads


def test_a_draft_of_another_tokenizer_is_refused_at_start(config: EngineConfig, tmp_path: Path) -> None:
    other = make_tiny_llama(tmp_path, extra_tokens=["hello"])
    with pytest.raises(ConfigError, match=r"draft\.source.*tokenizer"):
        Engine(config.model_copy(update={"draft": DraftSettings(source=str(other))}))


def test_a_draft_model_of_its_own(engine: Engine, config: EngineConfig, tmp_path: Path) -> None:
    other = make_tiny_llama(tmp_path, seed=1, num_layers=1)
    options = {"temperature": 0.8, "seed": 21, "max_tokens": 25}
    with Engine(config.model_copy(update={"draft": DraftSettings(source=str(other))})) as own:
        completion = own.generate(PROMPT, **options)
    assert completion.token_ids == engine.generate(PROMPT, **options).token_ids
    assert completion.stats.num_draft_tokens > 0
