"""What a worker answers to one call, by the contract in `specdec.types`."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import asdict

import pytest

from specdec.types import ProposeItem, ProposeResult, SamplingParams, VerifyItem, VerifyResult
from specdec.worker.worker import DraftWorker, TargetWorker
from tests.worker.prefix_runner import VOCAB_SIZE, PrefixRunner, plain_tokens, whole

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, top_k=8, top_p=0.95, seed=77)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]

both_params = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
MakeTarget = Callable[[PrefixRunner], TargetWorker]
MakeDraft = Callable[[PrefixRunner], DraftWorker]


def wrong(token: int) -> int:
    return (token + 1) % VOCAB_SIZE


@both_params
@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
async def test_the_longest_right_prefix_is_accepted_and_one_token_added(
    make_target: MakeTarget, params: SamplingParams, num_right: int
) -> None:
    target = plain_tokens(PROMPT, params, 4)
    draft = [*target[:num_right], *map(wrong, target[num_right:3])]
    (result,) = await make_target(PrefixRunner()).verify([whole("a", PROMPT, draft, params)])
    assert result == VerifyResult("a", target[: num_right + 1], num_right)


@both_params
async def test_a_right_token_after_a_wrong_one_does_not_count(make_target: MakeTarget, params: SamplingParams) -> None:
    target = plain_tokens(PROMPT, params, 4)
    draft = [target[0], wrong(target[1]), target[2]]
    (result,) = await make_target(PrefixRunner()).verify([whole("a", PROMPT, draft, params)])
    assert (result.output, result.num_accepted) == (target[:2], 1)


@both_params
async def test_an_empty_draft_decodes_one_token(make_target: MakeTarget, params: SamplingParams) -> None:
    worker, tokens = make_target(PrefixRunner()), list(PROMPT)
    base = 0
    for _ in range(10):
        (result,) = await worker.verify([VerifyItem("a", base, tokens[base:], [], params if base == 0 else None)])
        base = len(tokens)
        tokens += result.output
    assert tokens[len(PROMPT) :] == plain_tokens(PROMPT, params, 10)


async def test_an_unknown_sequence_is_asked_for_whole(make_target: MakeTarget, make_draft: MakeDraft) -> None:
    assert await make_target(PrefixRunner()).verify([VerifyItem("a", 5, [1], [2])]) == [VerifyResult("a", need_from=0)]
    assert await make_draft(PrefixRunner()).propose([ProposeItem("a", 5, [1], 2)]) == [ProposeResult("a", need_from=0)]


async def test_a_shorter_cache_says_how_much_it_holds_and_computes_nothing(
    make_target: MakeTarget, make_draft: MakeDraft
) -> None:
    runner = PrefixRunner()
    worker = make_target(runner)
    await worker.verify([whole("a", PROMPT, [], GREEDY)])
    forwards = len(runner.forwards)
    # Eight tokens are held; the one it chose is not yet.
    assert await worker.verify([VerifyItem("a", 9, [1], [])]) == [VerifyResult("a", need_from=8)]
    assert len(runner.forwards) == forwards
    (result,) = await worker.verify([VerifyItem("a", 8, [1, 2], [])])
    assert result.output == plain_tokens([*PROMPT, 1, 2], GREEDY, 1)

    draft = make_draft(PrefixRunner())
    await draft.propose([ProposeItem("a", 0, PROMPT, 3, GREEDY)])
    # Of three drafted tokens the last was never fed.
    assert await draft.propose([ProposeItem("a", 11, [1], 1)]) == [ProposeResult("a", need_from=10)]


@pytest.mark.parametrize("num_right", [0, 1, 3])
async def test_of_a_draft_only_what_was_verified_is_kept(make_target: MakeTarget, num_right: int) -> None:
    worker, target = make_target(PrefixRunner()), plain_tokens(PROMPT, GREEDY, 3)
    await worker.verify([whole("a", PROMPT, [*target[:num_right], *map(wrong, target[num_right:])], GREEDY)])
    held = len(PROMPT) + num_right
    assert await worker.verify([VerifyItem("a", held + 1, [1], [])]) == [VerifyResult("a", need_from=held)]
    (result,) = await worker.verify([VerifyItem("a", held, [1], [])])
    assert result.output == plain_tokens([*PROMPT, *target[:num_right], 1], GREEDY, 1)


async def test_first_contact_without_parameters_is_asked_for_whole(
    make_target: MakeTarget, make_draft: MakeDraft
) -> None:
    assert await make_target(PrefixRunner()).verify([VerifyItem("a", 0, [1], [])]) == [VerifyResult("a", need_from=0)]
    assert await make_draft(PrefixRunner()).propose([ProposeItem("a", 0, [1], 1)]) == [ProposeResult("a", need_from=0)]


@both_params
@pytest.mark.parametrize("base", [0, 1, 5, 7])
async def test_a_longer_cache_is_cropped(make_target: MakeTarget, params: SamplingParams, base: int) -> None:
    worker = make_target(PrefixRunner())
    await worker.verify([whole("a", [*PROMPT, 1, 2, 3], [4, 5], params)])
    other = [*PROMPT[:base], 7, 7, 8]
    (result,) = await worker.verify([VerifyItem("a", base, other[base:], [], params if base == 0 else None)])
    assert result.output == plain_tokens(other, params, 1)


@both_params
async def test_a_repeated_call_has_the_same_answer(
    make_target: MakeTarget, make_draft: MakeDraft, params: SamplingParams
) -> None:
    target, draft = make_target(PrefixRunner()), make_draft(PrefixRunner())
    right = plain_tokens(PROMPT, params, 3)
    await target.verify([whole("a", PROMPT[:5], [], params)])
    await draft.propose([ProposeItem("a", 0, PROMPT[:5], 2, params)])
    verify = VerifyItem("a", 5, PROMPT[5:], [*right[:2], wrong(right[2])])
    propose = ProposeItem("a", 5, PROMPT[5:], 4)
    answers = [(await target.verify([copy.deepcopy(verify)]), await draft.propose([copy.deepcopy(propose)]))]
    for _ in range(3):
        answers.append((await target.verify([verify]), await draft.propose([propose])))
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][0][0].output == right


async def test_a_call_does_not_change_its_items(make_target: MakeTarget, make_draft: MakeDraft) -> None:
    verify, propose = whole("a", PROMPT, [1, 99], GREEDY), ProposeItem("a", 0, PROMPT, 2, GREEDY)
    before = asdict(verify), asdict(propose)
    await make_target(PrefixRunner()).verify([verify])
    await make_draft(PrefixRunner()).propose([propose])
    assert (asdict(verify), asdict(propose)) == before


@both_params
async def test_a_reused_id_starts_afresh_with_its_own_parameters(
    make_target: MakeTarget, make_draft: MakeDraft, params: SamplingParams
) -> None:
    # The release of the first one was lost.
    target, draft = make_target(PrefixRunner()), make_draft(PrefixRunner())
    other = SamplingParams(seed=1)
    await target.verify([whole("a", [5, 5, 5], [], other)])
    await draft.propose([ProposeItem("a", 0, [5, 5, 5], 2, other)])
    (result,) = await target.verify([whole("a", PROMPT, [], params)])
    (proposal,) = await draft.propose([ProposeItem("a", 0, PROMPT, 3, params)])
    assert result.output == plain_tokens(PROMPT, params, 1)
    assert proposal.draft == plain_tokens(PROMPT, params, 3)


@pytest.mark.parametrize("garbage", [[VOCAB_SIZE], [-1], [10**9], [2**63]])
async def test_an_impossible_draft_token_ends_the_draft(make_target: MakeTarget, garbage: list[int]) -> None:
    target = plain_tokens(PROMPT, GREEDY, 3)
    worker = make_target(PrefixRunner())
    for position in range(3):
        draft = [*target[:position], *garbage, *target[position:]]
        (result,) = await worker.verify([whole("a", PROMPT, draft, GREEDY)])
        assert (result.output, result.num_accepted) == (target[: position + 1], position)


async def test_a_draft_beyond_the_context_is_cut(make_target: MakeTarget, make_draft: MakeDraft) -> None:
    runner = PrefixRunner(max_model_len=10)
    target = plain_tokens(PROMPT, GREEDY, 6)
    (result,) = await make_target(runner).verify([whole("a", PROMPT, target[:5], GREEDY)])
    assert (result.output, result.num_accepted) == (target[:3], 2)
    (result,) = await make_target(runner).verify([whole("b", [*PROMPT, *target[:2]], target[2:5], GREEDY)])
    assert (result.output, result.num_accepted) == (target[2:3], 0)
    (proposal,) = await make_draft(PrefixRunner(max_model_len=10)).propose([ProposeItem("a", 0, PROMPT, 5, GREEDY)])
    assert proposal.error is None
    assert proposal.draft == target[: len(proposal.draft)]


@both_params
@pytest.mark.parametrize("count", [1, 2, 5])
async def test_a_proposal_is_the_draft_models_own_continuation(
    make_draft: MakeDraft, params: SamplingParams, count: int
) -> None:
    worker = make_draft(PrefixRunner(salt=9))
    (result,) = await worker.propose([ProposeItem("a", 0, PROMPT, count, params)])
    assert result == ProposeResult("a", plain_tokens(PROMPT, params, count, salt=9))


@both_params
async def test_a_proposal_goes_on_after_what_was_accepted(make_draft: MakeDraft, params: SamplingParams) -> None:
    worker = make_draft(PrefixRunner())
    (first,) = await worker.propose([ProposeItem("a", 0, PROMPT, 4, params)])
    committed = [*PROMPT, *first.draft[:2], wrong(first.draft[2])]
    (second,) = await worker.propose([ProposeItem("a", len(PROMPT) + 2, committed[-1:], 3)])
    assert second.draft == plain_tokens(committed, params, 3)


async def test_a_proposal_of_nothing_brings_the_cache_up_to_date(make_draft: MakeDraft) -> None:
    runner = PrefixRunner()
    worker = make_draft(runner)
    assert await worker.propose([ProposeItem("a", 0, PROMPT, 0, GREEDY)]) == [ProposeResult("a")]
    (result,) = await worker.propose([ProposeItem("a", len(PROMPT), [7], 1)])
    assert result.draft == plain_tokens([*PROMPT, 7], GREEDY, 1)
    assert len(runner.forwards[-1][0].token_ids) == 1


WRONG_ITEMS = {
    "no tokens": (VerifyItem("bad", 0, [], [], GREEDY), "tokens is empty"),
    "unknown token": (VerifyItem("bad", 0, [1, VOCAB_SIZE], [], GREEDY), f"token id {VOCAB_SIZE} is not in"),
    "negative token": (VerifyItem("bad", 0, [-1], [], GREEDY), "token id -1 is not in"),
    "negative base": (VerifyItem("bad", -1, [1], [], GREEDY), "base_length is -1"),
    "beyond the context": (
        VerifyItem("bad", 10, [1] * 11, [], GREEDY),
        "21 tokens are more than .* max_model_len of 20",
    ),
    "draft larger than a step": (VerifyItem("bad", 0, [1], [1] * 8, GREEDY), "a draft of 8 tokens does not fit"),
}


@pytest.mark.parametrize(("item", "fault"), WRONG_ITEMS.values(), ids=WRONG_ITEMS.keys())
async def test_a_wrong_item_is_refused_and_the_others_served(
    make_target: MakeTarget, item: VerifyItem, fault: str
) -> None:
    worker = make_target(PrefixRunner(max_model_len=20, max_tokens=8))
    first, second, third = await worker.verify([whole("a", PROMPT, [], GREEDY), item, whole("b", [1], [], GREEDY)])
    assert first.output == plain_tokens(PROMPT, GREEDY, 1)
    assert third.output == plain_tokens([1], GREEDY, 1)
    assert second == VerifyResult("bad", error=second.error)
    assert second.error is not None
    assert re.search(fault, second.error)


async def test_no_items_no_answer(make_target: MakeTarget, make_draft: MakeDraft) -> None:
    assert await make_target(PrefixRunner()).verify([]) == []
    assert await make_draft(PrefixRunner()).propose([]) == []


async def test_answers_are_in_the_order_of_the_items(make_target: MakeTarget) -> None:
    items = [whole(f"s{n}", [n % VOCAB_SIZE] * (1 + 37 * n % 50), [1, 2], GREEDY) for n in range(9)]
    results = await make_target(PrefixRunner()).verify(items)
    assert [result.sequence_id for result in results] == [item.sequence_id for item in items]
    for item, result in zip(items, results, strict=True):
        assert result.output == plain_tokens(item.tokens, GREEDY, len(result.output))


async def test_two_items_of_one_sequence_run_one_after_the_other(make_target: MakeTarget) -> None:
    token = plain_tokens(PROMPT, GREEDY, 1)[0]
    follow = VerifyItem("a", len(PROMPT), [token], [])
    first, second = await make_target(PrefixRunner()).verify([whole("a", PROMPT, [], GREEDY), follow])
    assert [*first.output, *second.output] == plain_tokens(PROMPT, GREEDY, 2)
