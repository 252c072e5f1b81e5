"""Parameters that depend on the tokens before: the same text whatever was drafted, on target and draft workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.drafting.model import ModelDraft
from specdec.sampling.choose import RowToChoose
from specdec.sampling.history import RowContext, TokenHistory
from specdec.types import ProposeItem, ProposeResult, SamplingParams, VerifyItem, VerifyResult
from specdec.worker import jobs
from specdec.worker.calls import Call, Item, Result
from tests.worker.prefix_runner import VOCAB_SIZE, PrefixRunner, make_scheduler, plain_tokens, step

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
PROMPTS = [[(n * n + 3 * n * shift + shift) % VOCAB_SIZE for n in range(8)] for shift in range(8)]
NUM_TOKENS = 20
BAD_WORDS = tuple((first, second) for first in range(VOCAB_SIZE) for second in range(first % 3, VOCAB_SIZE, 3))

PARAMETERS: dict[str, dict[str, object]] = {
    "min_p": {"min_p": 0.3},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "negative frequency_penalty": {"frequency_penalty": -0.8},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "logit_bias": {"logit_bias": ((2, 3.0), (7, -100.0))},
    "min_tokens": {"min_tokens": 11, "end_token_ids": (0, 1, 2, 3)},
    "bad_words": {"bad_words": (*BAD_WORDS, (8,))},
    "everything": {
        "min_p": 0.05,
        "top_k": 8,
        "top_p": 0.95,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logit_bias": ((4, 1.0),),
        "min_tokens": 7,
        "end_token_ids": (0,),
        "bad_words": ((1, 2), (5,)),
    },
}


class Pair:
    """A target and a draft worker without threads, and one sequence on both."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], draft_salt: int = 0) -> None:
        self.params, self.prompt, self.tokens = params, list(prompt), list(prompt)
        self.runners = [PrefixRunner(), PrefixRunner(salt=draft_salt)]
        self.schedulers = [make_scheduler(runner) for runner in self.runners]
        self.bases = [0, 0]
        self.num_accepted = 0
        self.drafted_by_worker = False

    def answer(self, which: int, item: Item) -> Result:
        call = Call([item])
        self.schedulers[which].add(call)
        while step(self.schedulers[which], self.runners[which]):
            pass
        (result,) = call.future.result()
        assert result.error is None
        assert result.need_from is None
        return result

    def propose(self, k: int) -> list[int]:
        base = self.bases[1]
        item = ProposeItem("s", base, self.tokens[base:], k, None if base else self.params, len(self.prompt))
        result = self.answer(1, item)
        assert isinstance(result, ProposeResult)
        return result.draft

    def verify(self, draft: list[int]) -> VerifyResult:
        base = self.bases[0]
        item = VerifyItem("s", base, self.tokens[base:], draft, None if base else self.params, len(self.prompt))
        result = self.answer(0, item)
        assert isinstance(result, VerifyResult)
        self.bases[0] = len(self.tokens) + result.num_accepted
        if self.drafted_by_worker:
            self.bases[1] = len(self.tokens) + min(result.num_accepted, len(draft) - 1)
        self.drafted_by_worker = False
        self.num_accepted += result.num_accepted
        self.tokens += result.output
        return result

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


def decode(pair: Pair, draft: Callable[[Pair, int], list[int]], k: int) -> list[int]:
    while len(pair.generated) < NUM_TOKENS:
        pair.verify(draft(pair, k) if k else [])
    return pair.generated[:NUM_TOKENS]


def by_worker(pair: Pair, k: int) -> list[int]:
    pair.drafted_by_worker = True
    return pair.propose(k)


def garbage(pair: Pair, k: int) -> list[int]:
    """The same token again and again, which penalties ought to be hard on."""
    return [pair.tokens[-1]] * k


def oracle(pair: Pair, k: int) -> list[int]:
    count = len(pair.generated) + k
    return plain_tokens(pair.prompt, pair.params, count)[len(pair.generated) :]


def half_right(pair: Pair, k: int) -> list[int]:
    right = oracle(pair, k)
    return [*right[: k // 2], *((token + 1) % VOCAB_SIZE for token in right[k // 2 :])]


DRAFTS = {"worker": by_worker, "garbage": garbage, "oracle": oracle, "half right": half_right}


def params_of(name: str, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=5, **PARAMETERS[name])


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_tokens_are_those_of_plain_decoding(name: str, temperature: float) -> None:
    params = params_of(name, temperature)
    expected = plain_tokens(PROMPT, params, NUM_TOKENS)
    for draft in DRAFTS.values():
        for k in (0, 1, 4, 8):
            assert decode(Pair(params, PROMPT, draft_salt=1), draft, k) == expected


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_parameter_matters(name: str) -> None:
    """Or the tests here show nothing."""
    changed = [
        plain_tokens(prompt, params_of(name, 0.9), NUM_TOKENS)
        != plain_tokens(prompt, SamplingParams(0.9, seed=5), NUM_TOKENS)
        for prompt in PROMPTS
    ]
    assert any(changed)


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_by_the_same_model_is_accepted_whole(name: str, temperature: float) -> None:
    """The draft applies the same processors to the same tokens before."""
    pair = Pair(params_of(name, temperature), PROMPT)
    decode(pair, by_worker, 4)
    assert pair.num_accepted == len(pair.generated) // 5 * 4


PARAMETER_SETS = st.sampled_from(list(PARAMETERS))
STEPS = st.lists(st.tuples(st.sampled_from(list(DRAFTS)), st.integers(0, 8)), min_size=NUM_TOKENS, max_size=NUM_TOKENS)


@settings(max_examples=40, deadline=None)
@given(PARAMETER_SETS, st.sampled_from([0.0, 0.7, 1.5]), st.lists(st.integers(0, 10), min_size=1, max_size=30), STEPS)
def test_the_tokens_do_not_depend_on_how_they_were_drafted(
    name: str, temperature: float, prompt: list[int], steps: list[tuple[str, int]]
) -> None:
    params = params_of(name, temperature)
    pair = Pair(params, prompt, draft_salt=1)
    for kind, k in steps:
        pair.verify(DRAFTS[kind](pair, k) if k else [])
    assert pair.generated == plain_tokens(prompt, params, len(pair.generated))


def test_a_sequence_sent_again_counts_the_same_tokens_as_generated() -> None:
    """After a preemption everything comes at once; what is the prompt must not be forgotten."""
    params = params_of("everything", 0.9)
    pair = Pair(params, PROMPT)
    while len(pair.generated) < NUM_TOKENS:
        pair.schedulers[0].release(["s"])
        pair.bases = [0, 0]
        pair.verify(garbage(pair, 2))
    assert pair.generated[:NUM_TOKENS] == plain_tokens(PROMPT, params, NUM_TOKENS)


def test_a_cut_back_sequence_forgets_what_it_counted() -> None:
    params = SamplingParams(0.0, frequency_penalty=2.0)
    for prompt in PROMPTS:
        pair = Pair(params, prompt)
        pair.verify(oracle(pair, 8))
        for base in (len(pair.tokens) - 2, len(prompt) + 1, len(prompt) - 3, 0):
            del pair.tokens[-1:]
            pair.bases[0] = min(base, len(pair.tokens) - 1)
            expected = plain_tokens(prompt, params, len(pair.generated) + 1)[-1:]
            assert pair.verify([]).output == expected
            del pair.tokens[-1:]


def test_parameters_sent_again_later_change_nothing() -> None:
    params = params_of("everything", 0.9)
    pair = Pair(params, PROMPT)
    while len(pair.generated) < NUM_TOKENS:
        base = pair.bases[0]
        result = pair.answer(0, VerifyItem("s", base, pair.tokens[base:], [], params, len(PROMPT)))
        assert isinstance(result, VerifyResult)
        pair.bases[0] = len(pair.tokens)
        pair.tokens += result.output
    assert pair.generated == plain_tokens(PROMPT, params, NUM_TOKENS)


def test_an_id_used_again_by_another_request_starts_anew() -> None:
    pair, other = Pair(params_of("everything", 0.9), PROMPT), Pair(params_of("frequency_penalty", 0.0), PROMPTS[3])
    decode(pair, garbage, 4)
    other.schedulers, other.runners = pair.schedulers, pair.runners
    assert decode(other, garbage, 4) == plain_tokens(PROMPTS[3], other.params, NUM_TOKENS)


def test_nothing_is_counted_where_nothing_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(*_: object) -> None:
        raise AssertionError("something was counted")

    monkeypatch.setattr(TokenHistory, "all_counts", counted)
    monkeypatch.setattr(TokenHistory, "generated_counts", counted)
    monkeypatch.setattr(jobs, "RowContext", counted)
    for params in (SamplingParams(0.0), SamplingParams(0.9, top_k=5, min_p=0.1, seed=2, logprobs=2)):
        pair = Pair(params, PROMPT, draft_salt=1)
        assert decode(pair, by_worker, 4) == plain_tokens(PROMPT, params, NUM_TOKENS)


def test_parameters_with_a_token_that_does_not_exist_are_refused() -> None:
    for params in (
        SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),)),
        SamplingParams(bad_words=((1, -1),)),
        SamplingParams(min_tokens=1, end_token_ids=(10**9,)),
    ):
        runner = PrefixRunner()
        scheduler, call = make_scheduler(runner), Call([VerifyItem("s", 0, [1], [], params)])
        scheduler.add(call)
        (result,) = call.future.result()
        assert result.error is not None
        assert "is not in the vocabulary" in result.error


# --- negative controls: what must not pass for right -------------------------------------------------------------


COUNTING = ["presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "bad_words"]


def differs(name: str, temperature: float) -> bool:
    params = params_of(name, temperature)
    return any(
        decode(Pair(params, prompt), draft, 4) != plain_tokens(prompt, params, NUM_TOKENS)
        for prompt in PROMPTS
        for draft in (oracle, garbage, half_right)
    )


@pytest.mark.parametrize("name", COUNTING)
def test_a_worker_that_does_not_count_draft_tokens_is_found_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert not differs(name, 0.0)
    monkeypatch.setattr(jobs, "RowContext", lambda history, ahead: RowContext(history))
    assert differs(name, 0.0)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_a_worker_that_counts_the_prompt_as_generated_is_found_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(TokenHistory, "generated_counts", TokenHistory.all_counts)
    assert differs(name, 0.0)


def test_a_worker_that_does_not_crop_its_counts_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenHistory, "crop", lambda self, length: None)
    with pytest.raises(AssertionError):
        test_a_cut_back_sequence_forgets_what_it_counted()


def test_a_temperature_applied_twice_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = jobs.VerifyJob.tail_choices

    def tempered_twice(self: jobs.VerifyJob) -> list[RowToChoose]:
        return [replace(row, params=replace(row.params, temperature=0.9 * 0.9)) for row in original(self)]

    assert not differs("frequency_penalty", 0.9)
    monkeypatch.setattr(jobs.VerifyJob, "tail_choices", tempered_twice)
    assert differs("frequency_penalty", 0.9)


def test_a_draft_without_the_processors_changes_no_token_but_is_accepted_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ModelDraft, "next_choice", lambda self: RowToChoose(SamplingParams(0.0), self.start + len(self.tokens))
    )
    params = params_of("frequency_penalty", 0.0)
    pairs = [Pair(params, prompt) for prompt in PROMPTS]
    for pair in pairs:
        assert decode(pair, by_worker, 4) == plain_tokens(pair.prompt, params, NUM_TOKENS)
    assert any(pair.num_accepted < len(pair.generated) // 5 * 4 for pair in pairs)
