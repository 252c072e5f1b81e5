from __future__ import annotations

import asyncio

import pytest

from specdec.errors import ContextLengthError, DeadlineExceededError, OverloadedError, WorkerUnavailableError
from specdec.orchestrator.base import Readiness
from tests.orchestrator.fakes import UNAVAILABLE, FakeDraft, FakeTarget, Fault, hashed
from tests.orchestrator.harness import PROMPT, collect, expected, loop_settings, request, running, settle, until

LONG = 400


async def test_requests_beyond_the_limit_wait_and_beyond_the_queue_are_refused() -> None:
    target = FakeTarget()
    target.is_gated = lambda item: True
    settings = loop_settings(max_num_sequences=2, max_queued_requests=3)
    generations = [request(seed=seed) for seed in range(5)]
    async with running(target, None, settings=settings) as engine:
        tasks = [asyncio.create_task(collect(engine, generation)) for generation in generations]
        await until(lambda: len(target.calls) == 2)
        await settle()
        assert len(target.calls) == 2, "the others wait"
        with pytest.raises(OverloadedError) as caught:
            await collect(engine, request())
        assert caught.value.retry_after_s > 0
        assert not any(task.done() for task in tasks)
        target.gate.set()
        outcomes = await asyncio.gather(*tasks)
        assert (await collect(engine, generations[0])).said == expected(generations[0], hashed), "room again"
    for generation, outcome in zip(generations, outcomes, strict=True):
        assert outcome.said == expected(generation, hashed)


async def test_with_no_queue_a_free_place_is_still_a_place() -> None:
    settings = loop_settings(max_num_sequences=1, max_queued_requests=0)
    async with running(FakeTarget(), None, settings=settings) as engine:
        await collect(engine, request())
        stream = engine.generate(request(max_tokens=LONG))
        await anext(stream)
        with pytest.raises(OverloadedError):
            await collect(engine, request())
        await stream.aclose()
        await collect(engine, request())


async def test_a_failed_request_gives_its_place_back() -> None:
    target = FakeTarget()
    target.every_call = Fault(refuse=frozenset({"bad"}))
    settings = loop_settings(max_num_sequences=1, max_queued_requests=0)
    async with running(target, None, settings=settings, max_model_len=100) as engine:
        for generation in (request("bad"), request(max_tokens=1000), request("bad", timeout_s=1e-9)):
            with pytest.raises(Exception, match=r"."):
                await collect(engine, generation)
        await collect(engine, request())


@pytest.mark.parametrize("timeout_source", ["request", "server"])
async def test_a_request_that_takes_too_long_fails(timeout_source: str) -> None:
    target, draft = FakeTarget(), FakeDraft()
    target.every_call = Fault(late_s=0.005)
    settings = loop_settings(**({"request_timeout_s": 0.05} if timeout_source == "server" else {}))
    async with running(target, draft, settings=settings) as engine:
        with pytest.raises(DeadlineExceededError, match=r"within 0\.05 s"):
            await collect(engine, request(max_tokens=900, k=0, timeout_s=0.05 if timeout_source == "request" else None))
        await until(lambda: not target.held_ids and not draft.held_ids)


async def test_a_request_may_ask_for_more_time_than_the_server_gives() -> None:
    target = FakeTarget()
    target.every_call = Fault(late_s=0.005)
    async with running(target, None, settings=loop_settings(request_timeout_s=0.02)) as engine:
        await collect(engine, request(max_tokens=12, timeout_s=60.0))


async def test_time_spent_waiting_for_a_place_counts() -> None:
    settings = loop_settings(max_num_sequences=1)
    async with running(FakeTarget(), None, settings=settings) as engine:
        stream = engine.generate(request(max_tokens=LONG))
        await anext(stream)
        with pytest.raises(DeadlineExceededError):
            await collect(engine, request(timeout_s=0.03))
        await stream.aclose()
        await collect(engine, request())


async def test_what_fits_the_context_to_the_last_token_is_served() -> None:
    async with running(FakeTarget(), FakeDraft(), max_model_len=len(PROMPT) + 12) as engine:
        assert len((await collect(engine, request(max_tokens=12))).token_ids) == 12


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "param"), [(90, 11, "max_tokens"), (100, 1, "prompt"), (150, 1, "prompt")]
)
async def test_what_does_not_fit_is_refused_with_limit_and_length(
    num_prompt_tokens: int, max_tokens: int, param: str
) -> None:
    target = FakeTarget()
    async with running(target, None, max_model_len=100) as engine:
        with pytest.raises(ContextLengthError) as caught:
            await collect(engine, request(prompt=b"x" * num_prompt_tokens, max_tokens=max_tokens))
    assert caught.value.param == param
    assert f"{num_prompt_tokens} tokens" in str(caught.value)
    assert "100 tokens" in str(caught.value)
    assert target.calls == []


# --- lanes ----------------------------------------------------------------------------------------------------


def lane_of(target: FakeTarget, sequence_id: str) -> str:
    (lane,) = {call.lane for call in target.calls if sequence_id in call.sequence_ids}
    return lane


async def test_a_new_sequence_goes_to_the_emptiest_lane() -> None:
    target, draft = FakeTarget(lanes=["a", "b", "c"]), FakeDraft()
    streams = {}
    async with running(target, draft) as engine:

        async def start(name: str) -> str:
            streams[name] = engine.generate(request(name, max_tokens=LONG))
            await anext(streams[name])
            return lane_of(target, name)

        assert sorted([await start("1"), await start("2"), await start("3")]) == ["a", "b", "c"]
        await streams["2"].aclose()
        assert await start("4") == lane_of(target, "2")
        second_round = [await start("5"), await start("6"), await start("7")]
        assert sorted(second_round) == ["a", "b", "c"]
        for stream in streams.values():
            await stream.aclose()
        await until(lambda: not target.held_ids and not draft.held_ids)
    for call in draft.calls:
        assert {call.lane} == {lane_of(target, each) for each in call.sequence_ids}, "one name for both pools"


async def test_a_lane_no_longer_offered_gets_no_new_sequences_and_keeps_the_old() -> None:
    target = FakeTarget(lanes=["a", "b"])
    target.is_gated = lambda item: item.sequence_id in {"old 1", "old 2"} and item.base_length > 0
    old = [request("old 1", max_tokens=20), request("old 2", max_tokens=20)]
    async with running(target, FakeDraft()) as engine:
        tasks = [asyncio.create_task(collect(engine, generation)) for generation in old]
        await until(lambda: len(target.calls) == 4)
        gone = lane_of(target, "old 1")
        target.offered.remove(gone)
        new = [request(f"new {number}") for number in range(3)]
        new_tasks = [asyncio.create_task(collect(engine, generation)) for generation in new]
        await settle()
        target.gate.set()
        outcomes = await asyncio.gather(*tasks, *new_tasks)
        after = request("after")
        await collect(engine, after)
    assert [outcome.said for outcome in outcomes] == [expected(generation, hashed) for generation in [*old, *new]]
    assert {lane_of(target, each.request_id) for each in [*new, after]} == set(target.offered)


async def test_a_lane_that_comes_back_is_used_again() -> None:
    target = FakeTarget(lanes=["a"])
    async with running(target, None) as engine:
        await collect(engine, request("1"))
        target.offered = ["b"]
        await collect(engine, request("2"))
        target.offered = ["a"]
        await collect(engine, request("3"))
    assert [lane_of(target, name) for name in "123"] == ["a", "b", "a"]


async def test_a_sequence_cancelled_in_the_last_round_of_a_lane_that_is_gone_is_freed() -> None:
    target = FakeTarget(lanes=["a"])
    target.is_gated = lambda item: item.sequence_id == "old" and item.base_length > 0
    async with running(target, None) as engine:
        stream = engine.generate(request("old", max_tokens=LONG))
        await anext(stream)
        await until(lambda: len(target.calls) == 2)
        await stream.aclose()
        target.offered = ["b"]
        await collect(engine, request())
        target.gate.set()
        await until(lambda: not target.held_ids)
    assert target.too_early == []


# --- readiness ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target_fault", "draft_fault", "readiness", "ready"),
    [
        pytest.param(Fault(), Fault(), Readiness(True, True), True, id="both answer"),
        pytest.param(Fault(), None, Readiness(True, None), True, id="no draft configured"),
        pytest.param(
            Fault(), UNAVAILABLE, Readiness(True, False, "draft: the replica is dead"), False, id="no draft answers"
        ),
        pytest.param(
            UNAVAILABLE, Fault(), Readiness(False, True, "target: the replica is dead"), False, id="no target answers"
        ),
    ],
)
async def test_readiness(target_fault: Fault, draft_fault: Fault | None, readiness: Readiness, ready: bool) -> None:
    target, draft = FakeTarget(), None if draft_fault is None else FakeDraft()
    target.every_call = target_fault
    if draft is not None and draft_fault is not None:
        draft.every_call = draft_fault
    async with running(target, draft) as engine:
        assert await engine.readiness() == readiness
        assert readiness.ready == ready


async def test_a_worker_that_does_not_answer_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.orchestrator.engine._READINESS_TIMEOUT_S", 0.02)
    target = FakeTarget()
    target.every_call = Fault(hang=True)
    async with running(target, None) as engine:
        readiness = await engine.readiness()
    assert not readiness.target
    assert "no answer" in readiness.detail


async def test_a_draft_that_speculation_does_not_use_need_not_be_ready() -> None:
    draft = FakeDraft()
    draft.every_call = Fault(error=WorkerUnavailableError("down"))
    async with running(FakeTarget(), draft, speculation=False) as engine:
        assert await engine.readiness() == Readiness(True, None)
