from __future__ import annotations

import math

import pytest
import torch

from specdec.sampling.choose import RowToChoose
from specdec.sampling.logprobs import logprobs_of
from specdec.types import SamplingParams, TokenLogprobs


def row(num_logprobs: int | None, **params: float) -> RowToChoose:
    return RowToChoose(SamplingParams(**params), 0, None, num_logprobs)


def test_they_are_the_models_own_whatever_the_temperature() -> None:
    probabilities = [0.1, 0.2, 0.7]
    logits = torch.tensor([probabilities], dtype=torch.float64).log() + 3.0
    for temperature in (0.0, 0.5, 2.0):
        (result,) = logprobs_of(logits, [row(2, temperature=temperature, top_k=1)], [1])
        assert result is not None
        assert result.logprob == pytest.approx(math.log(0.2))
        assert [token for token, _ in result.top] == [2, 1]
        assert [value for _, value in result.top] == pytest.approx([math.log(0.7), math.log(0.2)])


def test_only_rows_that_ask_are_told() -> None:
    results = logprobs_of(torch.zeros(3, 4), [row(None), row(0), row(1)], [0, 1, 2])
    assert results == [None, TokenLogprobs(-math.log(4)), TokenLogprobs(-math.log(4), ((0, -math.log(4)),))]


def test_ids_decide_between_equals_and_impossible_tokens_are_no_alternatives() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, float("-inf")]])
    (few,), (many,) = (logprobs_of(logits, [row(n)], [1]) for n in (3, 20))
    assert few is not None
    assert many is not None
    assert [token for token, _ in few.top] == [1, 0, 2]
    assert [token for token, _ in many.top] == [1, 0, 2, 3]


def test_a_row_gets_the_same_bits_in_any_batch() -> None:
    logits = torch.randn(9, 3001, generator=torch.Generator().manual_seed(1))
    together = logprobs_of(logits, [row(5)] * 9, list(range(9)))
    assert together == [logprobs_of(logits[n : n + 1], [row(5)], [n])[0] for n in range(9)]
