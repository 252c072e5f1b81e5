"""Bias, masks and penalties, against the naive ones and against published definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.sampling.choose import RowToChoose, choose_tokens
from specdec.sampling.edits import edit_logits
from specdec.sampling.history import RowContext, TokenHistory
from specdec.sampling.processors import process_logits
from specdec.types import SamplingParams
from tests import oracles

VOCAB_SIZE = 7
NEG_INF = float("-inf")
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=9)
PENALTIES = st.sampled_from([0.0, 0.0, 0.5, -0.7, 2.0, -2.0])
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    top_k=st.integers(0, 4),
    min_p=st.sampled_from([0.0, 0.05, 0.37]),
    seed=st.integers(0, 50),
    presence_penalty=PENALTIES,
    frequency_penalty=PENALTIES,
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.6, 1e-6, 1e6]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-100.0, -1.5, 0.0, 2.5, 100.0])).map(
        lambda biases: tuple(biases.items())
    ),
    min_tokens=st.integers(0, 6),
    end_token_ids=st.sets(st.integers(0, VOCAB_SIZE - 1)).map(tuple),
    bad_words=st.lists(TOKENS.filter(bool).map(lambda word: tuple(word[:3])), max_size=4).map(tuple),
)
LOGITS = st.lists(st.sampled_from([-4.0, -1.3, -0.2, 0.0, 0.9, 2.1, 5.0]), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE)


def context_of(prompt: list[int], generated: list[int], ahead: list[int]) -> RowContext:
    history = TokenHistory(len(prompt))
    history.extend(prompt + generated)
    return RowContext(history, ahead)


@given(LOGITS, PARAMS, TOKENS, TOKENS, TOKENS)
def test_edits_equal_the_naive(
    logits: list[float], params: SamplingParams, prompt: list[int], generated: list[int], ahead: list[int]
) -> None:
    row = torch.tensor(logits)
    result = edit_logits(row, params, context_of(prompt, generated, ahead))
    naive = oracles.edited(row.tolist(), params, prompt + generated + ahead, len(prompt))
    assert result.dtype == torch.float64
    assert result.tolist() == pytest.approx(naive, rel=1e-12, abs=1e-12)
    assert row.tolist() == torch.tensor(logits).tolist()


@given(LOGITS, PARAMS, TOKENS, TOKENS, TOKENS)
def test_the_choice_equals_the_naive(
    logits: list[float], params: SamplingParams, prompt: list[int], generated: list[int], ahead: list[int]
) -> None:
    before = prompt + generated + ahead
    row = RowToChoose(params, len(before), context_of(prompt, generated, ahead))
    expected = oracles.choose(logits, params, len(before), before, len(prompt))
    assert choose_tokens(torch.tensor([logits], dtype=torch.float64), [row]) == [expected]


def test_openais_penalties_count_what_was_generated_and_never_the_prompt() -> None:
    context = context_of([0, 0, 1], [2, 2, 3], [3, 3])
    edited = edit_logits(torch.zeros(5), SamplingParams(frequency_penalty=0.5, presence_penalty=1.0), context)
    assert edited.tolist() == [0.0, 0.0, -2.0, -2.5, 0.0]


def test_the_repetition_penalty_takes_prompt_and_generated_tokens_once_whatever_their_number() -> None:
    context = context_of([0, 0, 0], [1], [2, 2])
    edited = edit_logits(torch.tensor([3.0, -3.0, 3.0, 3.0]), SamplingParams(repetition_penalty=1.5), context)
    assert edited.tolist() == [2.0, -4.5, 2.0, 3.0]


def test_penalties_come_before_temperature_and_bias_before_penalties() -> None:
    params = SamplingParams(
        temperature=0.5, repetition_penalty=2.0, frequency_penalty=1.0, logit_bias=((0, 4.0), (1, -1.0))
    )
    scores = process_logits(torch.tensor([2.0, 0.0, 0.0]), params, context_of([1], [0], [])).scores
    # (2 + 4) / 2 - 1 = 2; (0 - 1) * 2 = -2; 0; then twice that for temperature 0.5.
    assert (scores - scores[2]).tolist() == [4.0, -4.0, 0.0]


def test_min_p_is_measured_after_temperature() -> None:
    logits = torch.tensor([math.log(p) for p in (0.6, 0.3, 0.1)], dtype=torch.float64)
    kept = {t: process_logits(logits, SamplingParams(temperature=t, min_p=0.3)).token_ids for t in (1.0, 0.5, 3.0)}
    assert {t: None if ids is None else ids.tolist() for t, ids in kept.items()} == {
        1.0: [0, 1],
        0.5: [0],
        3.0: [0, 1, 2],
    }


def test_top_p_counts_the_mass_that_min_p_left() -> None:
    logits = torch.tensor([math.log(p) for p in (0.4, 0.3, 0.2, 0.1)], dtype=torch.float64)
    ids = process_logits(logits, SamplingParams(min_p=0.7, top_p=0.5)).token_ids
    assert ids is not None
    assert ids.tolist() == [0]  # 4/7 of what is left; without min-p two are needed


@pytest.mark.parametrize("num_generated", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_end_tokens_are_masked_until_enough_was_generated(num_generated: int, num_ahead: int) -> None:
    context = context_of([1] * 5, [1] * num_generated, [1] * num_ahead)
    edited = edit_logits(torch.zeros(4), SamplingParams(min_tokens=3, end_token_ids=(0, 3)), context)
    masked = num_generated + num_ahead < 3
    assert edited.tolist() == ([NEG_INF, 0.0, 0.0, NEG_INF] if masked else [0.0] * 4)


@pytest.mark.parametrize(
    ("generated", "ahead", "masked"),
    [
        ([], [], [5]),
        ([1], [], [5, 2]),
        ([1, 2], [], [5, 3]),
        ([1], [2], [5, 3]),
        ([], [1, 2], [5, 3]),
        ([2], [1, 4], [5]),
    ],
)
def test_a_bad_word_is_broken_at_its_last_token(generated: list[int], ahead: list[int], masked: list[int]) -> None:
    params = SamplingParams(bad_words=((1, 2, 3), (1, 2), (5,)))
    edited = edit_logits(torch.zeros(6), params, context_of([1, 2], generated, ahead))
    assert [v for v in range(6) if edited[v] == NEG_INF] == sorted(masked)


def test_a_mask_that_would_leave_nothing_is_left_out() -> None:
    params = SamplingParams(min_tokens=2, end_token_ids=(0, 1, 2), bad_words=((1,),))
    assert edit_logits(torch.tensor([1.0, 2.0, 0.0]), params, context_of([], [], [])).tolist() == [1.0, NEG_INF, 0.0]


@given(PARAMS, TOKENS, TOKENS)
def test_an_impossible_token_stays_impossible(params: SamplingParams, prompt: list[int], generated: list[int]) -> None:
    logits = torch.tensor([NEG_INF, 3.0, NEG_INF, -1.0, 0.0, 1e38, -1e38], dtype=torch.float32)
    context = context_of(prompt, generated, [])
    edited = edit_logits(logits, params, context)
    assert not edited.isnan().any()
    assert edited[0] == edited[2] == NEG_INF
    assert edited.max() < float("inf")
    row = RowToChoose(params, len(prompt) + len(generated), context)
    assert choose_tokens(logits[None], [row])[0] not in (0, 2)


@given(st.lists(st.one_of(TOKENS, st.integers(0, 12)), max_size=12), st.integers(0, 6))
def test_counts_follow_a_history_that_grows_and_is_cropped(steps: list[list[int] | int], num_prompt: int) -> None:
    history, tokens = TokenHistory(num_prompt), []
    for step in steps:
        if isinstance(step, int):
            history.crop(step)
            del tokens[step:]
        else:
            history.extend(step)
            tokens += step
        if len(tokens) % 2:  # not after every step: counts are made late, too
            generated = tokens[num_prompt:]
            assert history.all_counts() == {token: tokens.count(token) for token in tokens}
            assert history.generated_counts() == {token: generated.count(token) for token in generated}
    assert history.tokens == tokens


@pytest.mark.parametrize("params", [SamplingParams(presence_penalty=1.0), SamplingParams(0.0, bad_words=((1,),))])
def test_a_row_without_the_context_its_parameters_need_is_a_fault(params: SamplingParams) -> None:
    with pytest.raises(ValueError, match="none are given"):
        choose_tokens(torch.zeros(1, 4), [RowToChoose(params, 3)])
