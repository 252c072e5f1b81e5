from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from specdec.types import GenerationRequest, SpeculativeStats, TokenOrigin, VerifyItem, VerifyResult
from tests.orchestrator.fakes import FakeDraft, FakeTarget, Recorded, hashed, scripted
from tests.orchestrator.harness import EOS, PROMPT, Outcome, collect, expected, request, running, settle, until


def rounds(calls: Sequence[Recorded]) -> list[Recorded]:
    """The calls of rounds: those that go on from what the worker holds and, of a draft worker, ask for a draft."""

    def of_a_round(call: Recorded) -> bool:
        goes_on = any(item.base_length for item in call.items) or len(call.items) > 1
        return goes_on and any(getattr(item, "num_draft_tokens", 1) for item in call.items)

    return [call for call in calls if of_a_round(call)]


def replay(target: FakeTarget, generation: GenerationRequest) -> tuple[list[TokenOrigin], SpeculativeStats]:
    """Origins and counters, told again from what crossed the wire."""
    origins: list[TokenOrigin] = []
    stats = SpeculativeStats()
    for call in target.calls:
        for item, result in zip(call.items, call.results or [], strict=True):
            assert isinstance(item, VerifyItem)
            assert isinstance(result, VerifyResult)
            if item.sequence_id != generation.request_id:
                continue
            right = [guess == token for guess, token in zip(item.draft, result.output, strict=False)]
            stats.num_steps += 1
            stats.num_draft_tokens += len(item.draft)
            stats.num_accepted_tokens += sum(right)
            origins += [TokenOrigin.ACCEPTED for guessed in right if guessed]
            if not item.draft:
                origins.append(TokenOrigin.PLAIN)
            else:
                origins.append(TokenOrigin.BONUS if all(right) else TokenOrigin.RECOVERED)
    return origins, stats


async def generate(generation: GenerationRequest, *, k: int, agreement: float) -> tuple[Outcome, FakeTarget]:
    target = FakeTarget()
    async with running(target, FakeDraft(agreement=agreement), k=k) as engine:
        return await collect(engine, generation), target


@pytest.mark.parametrize("agreement", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("k", [0, 1, 2, 4, 8])
async def test_the_output_depends_on_neither_drafter_nor_draft_length(k: int, agreement: float) -> None:
    generation = request(max_tokens=30)
    outcome, target = await generate(generation, k=k, agreement=agreement)
    assert outcome.said == expected(generation, hashed)
    origins, stats = replay(target, generation)
    assert outcome.origins == origins[: len(outcome.token_ids)]
    assert outcome.stats == stats


async def test_the_oracle_tells_seeds_and_prompts_apart() -> None:
    texts = {
        expected(generation, hashed)[0] for generation in (request(), request(seed=2), request(prompt=b"Once upon a"))
    }
    assert len(texts) == 3


@pytest.mark.parametrize("max_tokens", range(1, 12))
@pytest.mark.parametrize("k", [0, 1, 4, 8])
async def test_max_tokens_is_exact(k: int, max_tokens: int) -> None:
    generation = request(max_tokens=max_tokens)
    outcome, target = await generate(generation, k=k, agreement=1.0)
    assert len(outcome.token_ids) == max_tokens
    assert outcome.said == expected(generation, hashed)
    # No token is drafted that could not be used.
    assert replay(target, generation)[1] == outcome.stats
    assert outcome.stats.num_draft_tokens + outcome.stats.num_steps == max_tokens


async def test_a_perfect_draft_takes_as_few_steps_as_it_can() -> None:
    outcome, _ = await generate(request(max_tokens=21), k=4, agreement=1.0)
    # The prompt's own step says one token; every round after it five.
    assert outcome.stats == SpeculativeStats(num_steps=5, num_draft_tokens=16, num_accepted_tokens=16)
    assert outcome.stats.acceptance_length == pytest.approx(21 / 5)


async def test_a_useless_draft_costs_no_token() -> None:
    outcome, _ = await generate(request(max_tokens=10), k=4, agreement=0.0)
    assert outcome.stats.num_steps == 10
    assert outcome.stats.num_accepted_tokens == 0
    assert outcome.stats.acceptance_length == 1.0


@pytest.mark.parametrize("k", [0, 1, 3, 8])
@pytest.mark.parametrize(
    ("script", "options"),
    [
        pytest.param([*b"The end", EOS, *b"no more"], {}, id="end token"),
        pytest.param([*b"The end", EOS, *b"no more"], {"ignore_eos": True}, id="end token ignored"),
        pytest.param([EOS], {}, id="end token at once"),
        pytest.param(b"one two three four", {"stop_token_ids": (ord("h"),)}, id="stop token"),
        pytest.param(b"one two three four", {"stop": ("thr",)}, id="stop string"),
        pytest.param(b"one two three four", {"stop": ("ee f", "e t")}, id="stop strings"),
        pytest.param(b"one two three four", {"stop": ("one",)}, id="stop string at once"),
        pytest.param(b"one two three four", {"stop": ("ree five",)}, id="stop string that only began"),
        pytest.param([*b"one tw", EOS], {"stop": ("two",)}, id="end token within a stop string"),
    ],
)
async def test_nothing_comes_after_a_stop(script: list[int], options: dict[str, tuple[str, ...]], k: int) -> None:
    says = scripted(script, len(PROMPT))
    target = FakeTarget(says)
    generation = request(max_tokens=16, **options)
    async with running(target, FakeDraft(says), k=k) as engine:
        outcome = await collect(engine, generation)
    assert outcome.said == expected(generation, says)
    origins, stats = replay(target, generation)
    assert outcome.origins == origins[: len(outcome.token_ids)]
    assert outcome.stats == stats


async def test_one_propose_and_one_verify_a_round_for_all_sequences() -> None:
    target, draft = FakeTarget(), FakeDraft(agreement=0.5)
    target.is_gated = lambda item: item.base_length == 0  # all start together
    generations = [request(max_tokens=12, seed=seed) for seed in range(6)]
    async with running(target, draft, k=2) as engine:
        tasks = [asyncio.create_task(collect(engine, generation)) for generation in generations]
        await until(lambda: len(target.calls) == 6)
        target.gate.set()
        outcomes = await asyncio.gather(*tasks)
    assert [outcome.said for outcome in outcomes] == [expected(generation, hashed) for generation in generations]
    assert all(len(call.items) == 1 for call in target.calls[:6]), "every prompt is computed by a call of its own"
    verifies, proposes = rounds(target.calls), rounds(draft.calls)
    assert len(target.calls) == 6 + len(verifies), "and nothing else is"
    # As many rounds as the slowest sequence needs, however many sequences there are.
    assert len(verifies) == max(outcome.stats.num_steps for outcome in outcomes) - 1
    assert len(proposes) <= len(verifies)
    assert len(verifies[0].items) == len(proposes[0].items) == 6
    for call in [*verifies, *proposes]:
        assert len(set(call.sequence_ids)) == len(call.sequence_ids)


async def test_a_slow_prompt_does_not_hold_up_the_others() -> None:
    target, draft = FakeTarget(), FakeDraft()
    slow, quick = request("slow", prompt=b"long " * 20), request("quick", max_tokens=40)
    target.is_gated = lambda item: item.sequence_id == "slow" and item.base_length == 0
    async with running(target, draft) as engine:
        waiting = asyncio.create_task(collect(engine, slow))
        await until(lambda: target.num_under_way == 1)
        assert (await collect(engine, quick)).said == expected(quick, hashed)
        assert not waiting.done()
        target.gate.set()
        assert (await waiting).said == expected(slow, hashed)


async def test_a_slow_prompt_on_the_draft_worker_is_decoded_plainly_meanwhile() -> None:
    target, draft = FakeTarget(), FakeDraft()
    draft.is_gated = lambda item: item.sequence_id == "slow" and item.num_draft_tokens == 0
    slow, quick = request("slow", max_tokens=60), request("quick", max_tokens=60, seed=3)
    async with running(target, draft) as engine:
        reading = asyncio.create_task(collect(engine, slow))
        quick_outcome = await collect(engine, quick)
        draft.gate.set()
        slow_outcome = await reading
    assert quick_outcome.said == expected(quick, hashed)
    assert slow_outcome.said == expected(slow, hashed)
    assert quick_outcome.stats.num_steps < 20
    assert slow_outcome.origins[:5] == [TokenOrigin.PLAIN] * 5
    assert TokenOrigin.ACCEPTED in slow_outcome.origins, "and joins in once it is up"


async def test_requests_in_one_lane_each_draft_as_they_ask() -> None:
    target, draft = FakeTarget(), FakeDraft()
    generations = {
        "none": request(max_tokens=20, k=0),
        "off": request(max_tokens=20, enabled=False),
        "two": request(max_tokens=20, k=2),
        "default": request(max_tokens=20),
        "above the limit": request(max_tokens=40, k=1000),
    }
    async with running(target, draft, k=4) as engine:
        outcomes = await asyncio.gather(*(collect(engine, generation) for generation in generations.values()))
    longest = dict.fromkeys(generations, 0)
    for name, generation in generations.items():
        drafts = [len(i.draft) for c in target.calls for i in c.items if i.sequence_id == generation.request_id]
        longest[name] = max(drafts)
    assert longest == {"none": 0, "off": 0, "two": 2, "default": 4, "above the limit": 16}
    for generation, outcome in zip(generations.values(), outcomes, strict=True):
        assert outcome.said == expected(generation, hashed)


async def test_without_speculation_the_draft_pool_hears_nothing() -> None:
    draft = FakeDraft()
    async with running(FakeTarget(), draft, speculation=False) as engine:
        plain = await collect(engine, request(k=4))
    async with running(FakeTarget(), draft, k=0) as engine:
        none = await collect(engine, request())
    async with running(FakeTarget(), draft, k=4) as engine:
        off = await collect(engine, request(enabled=False))
        assert draft.calls == []
        await collect(engine, request())
        assert draft.calls != [], "the draft pool can be heard to be asked"
    for outcome in (plain, none, off):
        assert set(outcome.origins) == {TokenOrigin.PLAIN}
        assert outcome.stats == SpeculativeStats(num_steps=12)


async def test_chunks_come_while_the_generation_runs() -> None:
    target = FakeTarget()
    async with running(target, None) as engine:
        stream = engine.generate(request(max_tokens=500))
        first = await anext(stream)
        assert len(first.token_ids) == 1
        assert len(target.calls) < 400
        await stream.aclose()


async def test_a_reader_that_pauses_loses_nothing() -> None:
    generation, parts = request(max_tokens=20), []
    async with running(FakeTarget(), FakeDraft(agreement=0.5)) as engine:
        async for chunk in engine.generate(generation):
            parts.append(chunk.text)
            await settle()
    assert "".join(parts) == expected(generation, hashed)[0]
