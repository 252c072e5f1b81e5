"""The step thread: shared forwards, failures, cancelling, closing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from specdec.errors import WorkerUnavailableError
from specdec.types import ProposeItem, SamplingParams, VerifyItem
from specdec.worker.worker import DraftWorker, TargetWorker
from tests.worker.prefix_runner import PrefixRunner, plain_tokens, whole

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [3, 1, 4]
MakeTarget = Callable[[PrefixRunner], TargetWorker]
MakeDraft = Callable[[PrefixRunner], DraftWorker]


class Gate:
    """Holds the step thread at its next forward until it is opened."""

    def __init__(self, runner: PrefixRunner) -> None:
        self._reached, self._open = threading.Event(), threading.Event()
        runner.before_forward = self._wait

    def _wait(self) -> None:
        self._reached.set()
        assert self._open.wait(60)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, 60)

    def open(self) -> None:
        self._open.set()


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 7 + n * n) % 11 for n in range(length)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_calls_made_during_a_forward_share_the_next_one(make_target: MakeTarget) -> None:
    runner = PrefixRunner(max_tokens=128)
    worker, gate = make_target(runner), Gate(runner)
    first = asyncio.create_task(worker.verify([whole("first", PROMPT, [], GREEDY)]))
    await gate.reached()
    rest = [asyncio.create_task(worker.verify([whole(f"s{n}", [n], [1, 2], GREEDY)])) for n in range(10)]
    await asyncio.sleep(0)  # each of them runs up to its wait
    gate.open()
    for n, results in enumerate(await asyncio.gather(*rest)):
        assert results[0].output == plain_tokens([n], GREEDY, len(results[0].output))
    assert (await first)[0].output == plain_tokens(PROMPT, GREEDY, 1)
    assert [len(rows) for rows in runner.forwards] == [1, 10]


async def test_drafting_takes_one_forward_per_token_for_all_together(make_draft: MakeDraft) -> None:
    runner = PrefixRunner(max_tokens=128)
    items = [ProposeItem(f"s{n}", 0, [n], 4, GREEDY) for n in range(6)]
    results = await make_draft(runner).propose(items)
    assert [result.draft for result in results] == [plain_tokens([n], GREEDY, 4) for n in range(6)]
    assert [len(rows) for rows in runner.forwards] == [6] * 4


async def test_a_failed_forward_fails_its_calls_and_the_worker_goes_on(make_target: MakeTarget) -> None:
    runner = PrefixRunner()
    worker = make_target(runner)
    await worker.verify([whole("a", PROMPT, [], GREEDY)])

    def fail() -> None:
        raise RuntimeError("a kernel has died")

    runner.before_forward = fail
    with pytest.raises(WorkerUnavailableError, match="a kernel has died"):
        await worker.verify([whole("b", PROMPT, [], GREEDY), VerifyItem("a", 3, [1], [])])
    runner.before_forward = lambda: None
    worker.check_health(60.0)
    # Nothing of before is trusted.
    (result,) = await worker.verify([VerifyItem("a", 3, [1], [])])
    assert result.need_from == 0
    (result,) = await worker.verify([whole("a", [*PROMPT, 1], [], GREEDY)])
    assert result.output == plain_tokens([*PROMPT, 1], GREEDY, 1)


async def test_nothing_leaks_over_many_failures(make_target: MakeTarget) -> None:
    runner = PrefixRunner(num_blocks=4, max_model_len=256)
    worker = make_target(runner)
    failures = iter([True, False] * 10)

    def fail_often() -> None:
        if next(failures, False):
            raise RuntimeError("again")

    runner.before_forward = fail_often
    for n in range(20):
        try:
            (result,) = await worker.verify([whole(f"s{n}", prompt(n, 25), [], GREEDY)])
            assert result.output == plain_tokens(prompt(n, 25), GREEDY, 1)
        except WorkerUnavailableError:
            assert n % 2 == 0
        await worker.release([f"s{n}"])
    await until(lambda: worker.info().num_free_blocks == 4)
    assert worker.info().num_sequences == 0


async def test_closing_fails_the_calls_in_flight(make_target: MakeTarget) -> None:
    runner = PrefixRunner()
    worker, gate = make_target(runner), Gate(runner)
    running = asyncio.create_task(worker.verify([whole("a", prompt(1, 100), [], GREEDY)]))
    await gate.reached()
    waiting = asyncio.create_task(worker.verify([VerifyItem("a", 100, [1], [])]))
    await asyncio.sleep(0)
    closing = asyncio.create_task(asyncio.to_thread(worker.close))
    await until(worker._closed.is_set)
    gate.open()
    await closing
    for task in (running, waiting):
        with pytest.raises(WorkerUnavailableError, match="closed"):
            await task
    with pytest.raises(WorkerUnavailableError, match="closed"):
        await worker.verify([whole("b", PROMPT, [], GREEDY)])
    with pytest.raises(WorkerUnavailableError, match="ended"):
        worker.check_health(60.0)
    worker.close()  # once more does no harm


async def test_a_call_that_comes_in_the_moment_of_closing_is_answered(
    make_target: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_target(PrefixRunner())
    inbox = worker._inbox

    class ClosedInBetween:
        def put(self, message: object) -> None:
            monkeypatch.setattr(worker, "_inbox", inbox)
            worker.close()
            inbox.put(message)  # type: ignore[arg-type]

    monkeypatch.setattr(worker, "_inbox", ClosedInBetween())
    monkeypatch.setattr(ClosedInBetween, "get", inbox.get, raising=False)
    monkeypatch.setattr(ClosedInBetween, "get_nowait", inbox.get_nowait, raising=False)
    with pytest.raises(WorkerUnavailableError, match="closed"):
        async with asyncio.timeout(60):
            await worker.verify([whole("a", PROMPT, [], GREEDY)])


async def test_a_cancelled_wait_cancels_the_call(make_target: MakeTarget) -> None:
    runner = PrefixRunner(max_tokens=8)
    worker, gate = make_target(runner), Gate(runner)
    cancelled = asyncio.create_task(worker.verify([whole("a", prompt(1, 400), [], GREEDY)]))
    await gate.reached()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    gate.open()
    (result,) = await worker.verify([whole("b", PROMPT, [], GREEDY)])
    assert result.output == plain_tokens(PROMPT, GREEDY, 1)
    assert len(runner.forwards) <= 3  # of the fifty its prompt would have taken


async def test_info_and_release(make_target: MakeTarget, make_draft: MakeDraft) -> None:
    runner = PrefixRunner(num_blocks=5, max_model_len=300)
    worker = make_target(runner)
    info = worker.info()
    assert (info.role, info.model_fingerprint, info.max_model_len) == ("target", runner.fingerprint, 300)
    assert (info.num_sequences, info.num_blocks, info.num_free_blocks) == (0, 5, 5)
    assert make_draft(PrefixRunner()).info().role == "draft"
    await worker.verify([whole("a", prompt(1, 100), [], GREEDY), whole("b", [1], [], GREEDY)])
    info = worker.info()
    assert (info.num_sequences, info.num_free_blocks) == (2, 2)
    assert 0.0 <= info.busy_share <= 1.0
    assert info.num_tokens_per_step > 0
    assert (info.num_cached_blocks, info.num_prefix_hits, info.num_prefix_misses) == (0, 0, 101)
    await worker.release(["a", "unknown"])
    await until(lambda: worker.info().num_sequences == 1)
    assert (worker.info().num_free_blocks, worker.info().num_cached_blocks) == (4, 1)
    await worker.verify([whole("c", prompt(1, 70), [], GREEDY)])
    assert (worker.info().num_prefix_hits, worker.info().num_prefix_misses) == (64, 107)


async def test_warm_up_leaves_nothing_behind(make_target: MakeTarget, make_draft: MakeDraft) -> None:
    for worker in (make_target(PrefixRunner()), make_draft(PrefixRunner())):
        worker.warm_up()
        await until(lambda worker=worker: worker.info().num_sequences == 0)  # type: ignore[misc]
        assert worker.info().num_free_blocks == worker.info().num_blocks


async def test_health_tells_of_a_step_that_does_not_end(make_target: MakeTarget) -> None:
    runner = PrefixRunner()
    worker, gate = make_target(runner), Gate(runner)
    worker.check_health(0.0)  # no step, no fault
    stuck = asyncio.create_task(worker.verify([whole("a", PROMPT, [], GREEDY)]))
    await gate.reached()
    with pytest.raises(WorkerUnavailableError, match="has not ended in 0"):
        worker.check_health(0.0)
    worker.check_health(3600.0)
    gate.open()
    await stuck
