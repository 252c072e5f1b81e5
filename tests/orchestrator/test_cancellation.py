from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import pytest

from specdec.errors import WorkerUnavailableError
from specdec.orchestrator.engine import SpeculationEngine
from specdec.types import GenerationChunk, GenerationRequest, ProposeItem, VerifyItem
from tests.orchestrator.fakes import HANGS, FakeDraft, FakePool, FakeTarget, Fault, hashed
from tests.orchestrator.harness import EOS, PROMPT, collect, expected, loop_settings, request, running, settle, until

LONG = 400


def about(sequence_id: str, *, prompt: bool) -> Callable[[VerifyItem | ProposeItem], bool]:
    """Items of a sequence: of its prompt, or of the rounds after it."""
    return lambda item: item.sequence_id == sequence_id and (item.base_length == 0) == prompt


async def read_some(stream: AsyncIterator[GenerationChunk], num_chunks: int) -> None:
    for _ in range(num_chunks):
        await anext(stream)


async def assert_freed(sequence_id: str, *pools: FakePool) -> None:
    for pool in pools:
        await until(lambda pool=pool: sequence_id in pool.released and pool.num_under_way == 0)
        await settle()
        assert sequence_id not in pool.held_ids
        assert sequence_id not in pool.too_early, "freed under a call"
        assert sequence_id not in pool.too_late, "a call after it was freed"


async def test_a_finished_sequence_is_freed_on_both_workers() -> None:
    target, draft = FakeTarget(), FakeDraft()
    async with running(target, draft) as engine:
        await collect(engine, request("done"))
        await assert_freed("done", target, draft)
        assert target.released == ["done"], "once"


async def test_closing_the_iterator_frees_the_sequence() -> None:
    target, draft = FakeTarget(), FakeDraft()
    async with running(target, draft) as engine:
        stream = engine.generate(request("left", max_tokens=LONG))
        await read_some(stream, 3)
        assert target.held_ids == draft.held_ids == {"left"}
        await stream.aclose()
        await assert_freed("left", target, draft)
        num_calls = len(target.calls)
        await settle()
        assert len(target.calls) == num_calls


async def test_leaving_the_loop_frees_the_sequence() -> None:
    target, draft = FakeTarget(), FakeDraft()
    async with running(target, draft) as engine:
        async with aclosing(engine.generate(request("left", max_tokens=LONG))) as chunks:
            async for _ in chunks:
                break
        await assert_freed("left", target, draft)


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("when", ["in its prompt", "in a verify", "in a propose", "in the draft's prompt"])
async def test_cancelling_the_task_frees_the_sequence_and_no_other(when: str, others: int) -> None:
    target, draft = FakeTarget(), FakeDraft()
    pool: FakePool = draft if "propose" in when or "draft" in when else target
    pool.is_gated = about("gone", prompt="prompt" in when)
    generations = [request(max_tokens=60, seed=seed) for seed in range(others)]
    async with running(target, draft) as engine:
        # The first request starts the lane; the others live on in it.
        gone = asyncio.create_task(collect(engine, request("gone", max_tokens=LONG)))
        tasks = [asyncio.create_task(collect(engine, generation)) for generation in generations]
        await until(lambda: any(pool.is_gated(item) for call in pool.calls for item in call.items))
        await settle()
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        await settle()
        pool.gate.set()
        outcomes = await asyncio.gather(*tasks)
        await assert_freed("gone", target, draft)
    for generation, outcome in zip(generations, outcomes, strict=True):
        assert outcome.said == expected(generation, hashed)


async def test_a_sequence_is_freed_after_the_round_it_is_in() -> None:
    target = FakeTarget()
    target.is_gated = about("gone", prompt=False)
    async with running(target, None) as engine:
        stream = engine.generate(request("gone", max_tokens=LONG))
        await anext(stream)
        await until(lambda: len(target.calls) == 2)
        await stream.aclose()
        await settle()
        assert target.released == []
        target.gate.set()
        await assert_freed("gone", target)


async def test_a_sequence_cancelled_in_a_round_that_fails_is_not_brought_up_again() -> None:
    target, draft = FakeTarget(), FakeDraft()
    draft.faults = {0: Fault(error=WorkerUnavailableError("no prompt"))}
    target.is_gated = about("gone", prompt=False)
    target.faults = {1: Fault(error=WorkerUnavailableError("dead"))}
    async with running(target, draft) as engine:
        stream = engine.generate(request("gone", max_tokens=LONG))
        await anext(stream)
        await until(lambda: len(target.calls) == 2)
        await stream.aclose()
        num_draft_calls = len(draft.calls)
        target.gate.set()
        await assert_freed("gone", target)
        assert len(target.calls) == 2
        assert len(draft.calls) == num_draft_calls


@pytest.mark.parametrize("num_tokens", [1, 5])
async def test_a_sequence_that_ends_before_its_draft_prompt_is_done_leaves_nothing(num_tokens: int) -> None:
    def says(before: list[int], seed: int) -> int:
        return EOS if len(before) == len(PROMPT) + num_tokens else ord("x")

    target, draft = FakeTarget(says), FakeDraft(says)
    draft.is_gated = about("quick", prompt=True)
    async with running(target, draft) as engine:
        await collect(engine, request("quick", max_tokens=LONG))
        await settle()
        draft.gate.set()
        await assert_freed("quick", target, draft)


@pytest.mark.parametrize("pool_kind", ["target", "draft"])
async def test_a_deadline_frees_the_sequence_in_a_hung_call(pool_kind: str) -> None:
    target, draft = FakeTarget(), FakeDraft()
    (target if pool_kind == "target" else draft).faults = {1: HANGS}
    settings = loop_settings(target_timeout_s=0.1, draft_timeout_s=0.1)
    async with running(target, draft, settings=settings) as engine:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.03):
                await collect(engine, request("late", max_tokens=LONG))
        await assert_freed("late", target, draft)


async def test_cancelling_a_request_that_waits_for_a_place_gives_it_up() -> None:
    target = FakeTarget()
    settings = loop_settings(max_num_sequences=1, max_queued_requests=1)
    async with running(target, None, settings=settings) as engine:
        first = engine.generate(request(max_tokens=LONG))
        await anext(first)
        waiting = asyncio.create_task(collect(engine, request("waiting")))
        await settle()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        patient = asyncio.create_task(collect(engine, request()))
        await settle()
        await first.aclose()
        await patient
        assert all("waiting" not in call.sequence_ids for call in target.calls)


marker: contextvars.ContextVar[str] = contextvars.ContextVar("marker", default="none")


class MarkingTarget(FakeTarget):
    def __init__(self) -> None:
        super().__init__()
        self.markers: set[str] = set()

    async def verify(self, items, *, lane):  # type: ignore[no-untyped-def]
        self.markers.add(marker.get())
        return await super().verify(items, lane=lane)


async def test_worker_calls_do_not_run_in_the_context_of_a_request() -> None:
    target = MarkingTarget()
    async with running(target, None) as engine:
        marker.set("a request")
        await collect(engine, request())
    assert target.markers == {"none"}


async def fails_with(engine: SpeculationEngine, generation: GenerationRequest) -> Exception:
    with pytest.raises(WorkerUnavailableError) as caught:
        await collect(engine, generation)
    return caught.value


@pytest.mark.parametrize("when", ["in their prompts", "in a round", "between rounds"])
async def test_closing_the_engine_ends_and_frees_everything(when: str) -> None:
    target, draft = FakeTarget(), FakeDraft()
    if when == "in their prompts":
        target.is_gated = lambda item: True
    elif when == "in a round":
        target.is_gated = lambda item: item.base_length > 0
    ids = ["a", "b"]
    async with running(target, draft) as engine:
        tasks = [asyncio.create_task(fails_with(engine, request(each, max_tokens=900))) for each in ids]
        await until(lambda: len(target.calls) >= 3 or (when == "in their prompts" and len(target.calls) == 2))
        await settle()
        await engine.close()
        await asyncio.gather(*tasks)
        for each in ids:
            await assert_freed(each, target, draft)
        assert target.num_under_way == draft.num_under_way == 0


async def test_closing_the_engine_ends_what_waits_and_what_comes_later() -> None:
    target = FakeTarget()
    target.is_gated = lambda item: True
    async with running(target, None, settings=loop_settings(max_num_sequences=1)) as engine:
        tasks = [asyncio.create_task(fails_with(engine, request())) for _ in range(3)]
        await until(lambda: len(target.calls) == 1)
        await settle()
        await engine.close()
        await asyncio.gather(*tasks)
        await fails_with(engine, request())
        assert len(target.calls) == 1
