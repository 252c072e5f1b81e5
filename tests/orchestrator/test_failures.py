from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.config import RetrySettings
from specdec.errors import DeadlineExceededError, WorkerRequestError
from specdec.types import GenerationRequest, TokenOrigin
from tests.orchestrator.fakes import (
    ANSWER_LOST,
    BROKEN,
    HANGS,
    KILLED,
    REFUSED,
    RESTARTED,
    UNAVAILABLE,
    FakeDraft,
    FakePool,
    FakeTarget,
    Fault,
    hashed,
)
from tests.orchestrator.harness import Outcome, collect, expected, loop_settings, request, running, until

TARGET_FAULTS = {
    "unavailable": UNAVAILABLE,
    "killed": KILLED,
    "restarted": RESTARTED,
    "answer lost": ANSWER_LOST,
    "hangs": HANGS,
}
SHORT = {"target_timeout_s": 0.03, "prefill_timeout_s": 0.03, "draft_timeout_s": 0.03}


async def collect_all(
    target: FakeTarget, draft: FakeDraft | None, generations: list[GenerationRequest], **timeouts: float
) -> list[Outcome]:
    async with running(target, draft, settings=loop_settings(**timeouts)) as engine:
        outcomes = await asyncio.gather(*(collect(engine, generation) for generation in generations))
    for generation, outcome in zip(generations, outcomes, strict=True):
        assert outcome.said == expected(generation, hashed)
    return outcomes


def assert_nothing_is_left(*pools: FakePool) -> None:
    for pool in pools:
        assert pool.held_ids == set()
        assert pool.too_early == []
        assert pool.too_late == []


@pytest.mark.parametrize("call", [0, 1, 3, 4])
@pytest.mark.parametrize("fault", TARGET_FAULTS.values(), ids=TARGET_FAULTS.keys())
async def test_a_fault_of_the_target_changes_nothing_in_the_text(fault: Fault, call: int) -> None:
    target, draft = FakeTarget(), FakeDraft(agreement=0.6)
    target.faults = {call: fault}
    generations = [request(max_tokens=20, seed=seed) for seed in range(2)]
    await collect_all(target, draft, generations, **(SHORT if fault.hang else {}))
    assert len(target.calls) > call, "the fault happened"
    assert_nothing_is_left(target, draft)


async def test_a_target_that_fails_again_and_again_is_tried_again_and_again() -> None:
    target = FakeTarget()
    target.faults = dict.fromkeys(range(3, 30), KILLED)
    await collect_all(target, FakeDraft(), [request(max_tokens=20)])
    assert len(target.calls) > 30


async def test_a_killed_target_is_sent_the_tokens_it_lost() -> None:
    target = FakeTarget()
    target.faults = {4: KILLED}
    generation = request(max_tokens=20)
    await collect_all(target, None, [generation])
    whole = [item for call in target.calls[5:] for item in call.items if item.base_length == 0]
    assert len(whole) == 1
    assert whole[0].sampling == generation.sampling
    assert len(whole[0].tokens) == len(generation.prompt_token_ids) + 4


async def test_a_target_that_lost_one_sequence_is_sent_that_one_alone() -> None:
    target = FakeTarget()
    lost, kept = request("lost", max_tokens=40), request("kept", max_tokens=40, seed=2)
    async with running(target, None) as engine:
        tasks = [asyncio.create_task(collect(engine, generation)) for generation in (lost, kept)]
        await until(lambda: any(len(call.items) == 2 for call in target.calls))
        await target.release(["lost"], lane="only")  # preempted
        target.released.clear()
        outcomes = await asyncio.gather(*tasks)
    assert [outcome.said for outcome in outcomes] == [expected(lost, hashed), expected(kept, hashed)]
    first_contacts = [item.sequence_id for call in target.calls for item in call.items if item.base_length == 0]
    assert sorted(first_contacts) == ["kept", "lost", "lost"]
    assert any(call.sequence_ids == ["kept"] for call in target.calls[2:]), "rounds go on without the lost one"


async def test_a_refused_sequence_fails_alone() -> None:
    target, draft = FakeTarget(), FakeDraft()
    target.every_call = Fault(refuse=frozenset({"bad"}))
    good = request(max_tokens=20)
    async with running(target, draft) as engine:
        reading = asyncio.create_task(collect(engine, good))
        with pytest.raises(WorkerRequestError, match="refused by the test"):
            await collect(engine, request("bad"))
        assert (await reading).said == expected(good, hashed)
    assert_nothing_is_left(target, draft)


async def test_a_refused_call_is_not_repeated() -> None:
    target = FakeTarget()
    target.every_call = REFUSED
    async with running(target, None) as engine:
        with pytest.raises(WorkerRequestError):
            await collect(engine, request())
    assert len(target.calls) == 1


@pytest.mark.parametrize("call", [0, 3], ids=["for the prompt", "in a round"])
async def test_a_fault_of_ours_ends_the_request_with_that_error(call: int, caplog: pytest.LogCaptureFixture) -> None:
    target, draft = FakeTarget(), FakeDraft()
    target.faults = {call: BROKEN}
    good = request(max_tokens=20)
    async with running(target, draft) as engine:
        with pytest.raises(RuntimeError, match="a bug in the client"):
            await collect(engine, request(max_tokens=40))
        assert (await collect(engine, good)).said == expected(good, hashed), "and only that request"
    assert "a bug in the client" in caplog.text
    assert_nothing_is_left(target, draft)


async def test_no_target_until_the_deadline() -> None:
    target = FakeTarget()
    target.every_call = UNAVAILABLE
    async with running(target, FakeDraft()) as engine:
        with pytest.raises(DeadlineExceededError):
            await collect(engine, request(timeout_s=0.05))
    assert len(target.calls) > 1


# --- the draft ------------------------------------------------------------------------------------------------


async def test_without_a_draft_pool_decoding_is_plain() -> None:
    (outcome,) = await collect_all(FakeTarget(), None, [request(max_tokens=20)])
    assert set(outcome.origins) == {TokenOrigin.PLAIN}
    assert (outcome.stats.num_steps, outcome.stats.num_draft_tokens) == (20, 0)


@pytest.mark.parametrize("fault", [UNAVAILABLE, REFUSED, HANGS], ids=["unavailable", "refuses", "hangs"])
async def test_with_the_draft_down_decoding_is_plain(fault: Fault) -> None:
    target, draft = FakeTarget(), FakeDraft()
    draft.every_call = fault
    (outcome,) = await collect_all(target, draft, [request(max_tokens=20)], **(SHORT if fault.hang else {}))
    assert set(outcome.origins) == {TokenOrigin.PLAIN}
    assert (outcome.stats.num_steps, outcome.stats.num_draft_tokens) == (20, 0)
    assert draft.calls != []


@pytest.mark.parametrize("from_call", [0, 1])
async def test_a_drafter_with_a_fault_of_its_own_costs_no_request(from_call: int) -> None:
    target, draft = FakeTarget(), FakeDraft()
    draft.faults = {call: Fault(error=ZeroDivisionError("a bug")) for call in range(from_call, 100)}
    (outcome,) = await collect_all(target, draft, [request(max_tokens=20)])
    assert set(outcome.origins) == {TokenOrigin.PLAIN}
    assert_nothing_is_left(target, draft)


@pytest.mark.parametrize("fault", TARGET_FAULTS.values(), ids=TARGET_FAULTS.keys())
@pytest.mark.parametrize("call", [0, 1, 2, 3])
async def test_drafting_resumes_after_a_fault(call: int, fault: Fault) -> None:
    target, draft = FakeTarget(), FakeDraft()
    draft.faults = {call: fault}
    # Every verify takes a moment, so that a backoff of milliseconds ends within the generation.
    target.every_call = Fault(late_s=0.002)
    timeouts = {"draft_timeout_s": 0.1, "prefill_timeout_s": 0.1} if fault.hang else {}
    (outcome,) = await collect_all(target, draft, [request(max_tokens=120)], **timeouts)
    assert len(draft.calls) > call + 2
    assert TokenOrigin.ACCEPTED in outcome.origins[-30:]
    assert_nothing_is_left(target, draft)


async def test_a_hung_draft_costs_its_timeout_and_then_nothing_during_the_backoff() -> None:
    target, draft = FakeTarget(), FakeDraft()
    draft.faults = {1: HANGS}
    long_backoff = RetrySettings(initial_backoff_s=1e6, max_backoff_s=1e6)
    settings_ = loop_settings(draft_timeout_s=0.03).model_copy(update={"draft_retry": long_backoff})
    generations = [request(max_tokens=30, seed=seed) for seed in range(3)]
    async with running(target, draft, settings=settings_) as engine:
        first = await collect(engine, generations[0])
        num_calls = len(draft.calls)
        assert num_calls == 2, "the draft's prompt, and the call that hung"
        # The pool is known to be down: nobody asks it, not even for a new prompt.
        others = [await collect(engine, generation) for generation in generations[1:]]
        assert len(draft.calls) == num_calls
    for generation, outcome in zip(generations, [first, *others], strict=True):
        assert outcome.said == expected(generation, hashed)
        assert set(outcome.origins) == {TokenOrigin.PLAIN}


async def test_a_draft_pool_that_is_down_is_probed_beside_the_rounds() -> None:
    # Its every call hangs, the sign of life too, and the backoff is over at once: no round may wait for it again.
    target, draft = FakeTarget(), FakeDraft()
    draft.every_call = HANGS
    generation = request(max_tokens=200)
    quick = RetrySettings(initial_backoff_s=1e-6, max_backoff_s=1e-6)
    settings_ = loop_settings(draft_timeout_s=0.05, prefill_timeout_s=0.05).model_copy(update={"draft_retry": quick})
    async with running(target, draft, settings=settings_) as engine:
        assert (await collect(engine, generation)).said == expected(generation, hashed)
    assert len(draft.calls) == 1, "the draft's prompt; nothing was asked for after it"


@pytest.mark.parametrize("call", [0, 1, 3])
async def test_a_call_cancelled_on_the_workers_side_is_repeated(call: int) -> None:
    target, draft = FakeTarget(), FakeDraft()
    target.faults = {call: Fault(error=asyncio.CancelledError())}
    draft.faults = {call: Fault(error=asyncio.CancelledError())}
    first, second = request(max_tokens=30, seed=1), request(max_tokens=30, seed=2)
    async with running(target, draft) as engine:
        assert (await collect(engine, first)).said == expected(first, hashed)
        assert (await collect(engine, second)).said == expected(second, hashed)
    assert_nothing_is_left(target, draft)


async def test_an_answer_ends_the_row_of_failures_that_is_waited_for() -> None:
    target, draft = FakeTarget(), FakeDraft()
    draft.faults = dict.fromkeys(range(3, 63, 3), UNAVAILABLE)
    steep = RetrySettings(initial_backoff_s=1e-4, max_backoff_s=1e6)
    generation = request(max_tokens=900)
    async with running(target, draft, settings=loop_settings().model_copy(update={"draft_retry": steep})) as engine:
        assert (await collect(engine, generation)).said == expected(generation, hashed)
    assert len(draft.calls) > 63


async def test_a_sequence_the_draft_refuses_goes_on_plainly_and_is_not_asked_about_again() -> None:
    target, draft = FakeTarget(), FakeDraft()
    draft.every_call = Fault(refuse=frozenset({"refused"}))
    refused, other = await collect_all(
        target, draft, [request("refused", max_tokens=30), request(max_tokens=30, seed=2)]
    )
    assert set(refused.origins) == {TokenOrigin.PLAIN}
    assert TokenOrigin.ACCEPTED in other.origins
    assert sum("refused" in call.sequence_ids for call in draft.calls) == 1


async def test_a_sequence_that_outgrows_the_draft_goes_on_plainly() -> None:
    target, draft = FakeTarget(), FakeDraft()
    draft.max_model_len = 30
    (outcome,) = await collect_all(target, draft, [request(max_tokens=60)])
    assert TokenOrigin.ACCEPTED in outcome.origins[:15]
    assert set(outcome.origins[30:]) == {TokenOrigin.PLAIN}
    refusals = [result for call in draft.calls for result in call.results or [] if result.error is not None]
    assert len(refusals) == 1, "it is not asked about again"


async def test_a_draft_that_forgot_a_sequence_is_brought_up_beside_the_rounds() -> None:
    target, draft = FakeTarget(), FakeDraft()
    generation = request(max_tokens=60)
    draft.faults = {3: RESTARTED}
    (outcome,) = await collect_all(target, draft, [generation])
    first_contacts = [i for c in draft.calls for i in c.items if i.base_length == 0]
    assert [item.num_draft_tokens for item in first_contacts] == [0, 0], "whole prompts, and no draft waits for them"
    assert all(item.sampling == generation.sampling for item in first_contacts)
    assert outcome.stats.num_steps < 25


fault_schedules = st.dictionaries(
    st.integers(0, 25), st.sampled_from([UNAVAILABLE, KILLED, RESTARTED, ANSWER_LOST, Fault(late_s=0.002)]), max_size=12
)


@settings(max_examples=30, deadline=None)
@given(
    target_faults=fault_schedules,
    draft_faults=fault_schedules,
    agreement=st.sampled_from([0.0, 0.4, 0.8, 1.0]),
    k=st.integers(0, 6),
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=4),
)
def test_no_schedule_of_faults_changes_the_text(
    target_faults: dict[int, Fault], draft_faults: dict[int, Fault], agreement: float, k: int, lengths: list[int]
) -> None:
    async def play() -> None:
        target, draft = FakeTarget(lanes=["one", "two"]), FakeDraft(agreement=agreement)
        target.faults, draft.faults = target_faults, draft_faults
        generations = [request(max_tokens=length, seed=seed, stop=("ab",)) for seed, length in enumerate(lengths)]
        async with running(target, draft, k=k) as engine:
            outcomes = await asyncio.gather(*(collect(engine, generation) for generation in generations))
        for generation, outcome in zip(generations, outcomes, strict=True):
            assert outcome.said == expected(generation, hashed)
        assert_nothing_is_left(target, draft)

    asyncio.run(play())
