from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from specdec.sampling.processors import process_logits
from specdec.types import SamplingParams
from tests.oracles import candidates

NEG_INF = float("-inf")

# Few different values: most draws have ties.
LOGITS = st.lists(st.sampled_from([-3.0, -1.5, -1.0, 0.0, 0.25, 1.0, 2.5, 4.0]), min_size=1, max_size=24)


def survivors(logits: list[float], params: SamplingParams) -> list[int]:
    result = process_logits(torch.tensor(logits), params)
    if result.token_ids is None:
        assert len(result.scores) == len(logits)
        return list(range(len(logits)))
    assert result.token_ids.dtype == torch.int64
    assert len(result.token_ids) == len(result.scores)
    return result.token_ids.tolist()


def far_from_every_sum(logits: list[float], params: SamplingParams) -> bool:
    """No set of most likely tokens has a mass that rounding could move across top_p."""
    kept = candidates(logits, SamplingParams(params.temperature, params.top_k))
    mass = sorted((math.exp(logits[v] / params.temperature) for v in kept), reverse=True)
    total, sums = sum(mass), [sum(mass[: n + 1]) for n in range(len(mass))]
    return all(abs(value / total - params.top_p) > 1e-9 for value in sums[:-1])


@given(LOGITS, st.floats(0.1, 3.0), st.integers(0, 30), st.one_of(st.just(1.0), st.floats(0.01, 0.999)))
def test_survivors_equal_the_naive(logits: list[float], temperature: float, top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature, top_k, top_p)
    assume(far_from_every_sum(logits, params))
    assert survivors(logits, params) == candidates(logits, params)


@given(LOGITS, st.floats(0.1, 3.0), st.integers(0, 30), st.floats(0.01, 1.0))
def test_scores_are_log_probabilities_up_to_one_constant(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    result = process_logits(torch.tensor(logits), SamplingParams(temperature, top_k, top_p))
    ids = range(len(logits)) if result.token_ids is None else result.token_ids.tolist()
    assert result.scores.dtype == torch.float64
    offsets = [score - logits[v] / temperature for v, score in zip(ids, result.scores.tolist(), strict=True)]
    assert offsets == pytest.approx([offsets[0]] * len(offsets), abs=1e-9)


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [(0, [0, 1, 2, 3]), (1, [2]), (2, [0, 1, 2]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (99, [0, 1, 2, 3])],
)
def test_top_k_keeps_ties_with_the_last(top_k: int, expected: list[int]) -> None:
    assert survivors([1.0, 1.0, 2.0, 0.0], SamplingParams(top_k=top_k)) == expected


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(1e-300, [1]), (0.49, [1]), (0.51, [1, 2]), (0.76, [0, 1, 2, 3]), (0.9, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_smallest_nucleus_with_its_ties(top_p: float, expected: list[int]) -> None:
    logits = [math.log(p) for p in (0.125, 0.5, 0.25, 0.125)]
    assert survivors(logits, SamplingParams(top_p=top_p)) == expected


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # Of the two that top-k keeps the first has 4/7 of the mass; of all four it has only 0.4.
    assert survivors(logits, SamplingParams(top_k=2, top_p=0.5)) == [0]
    assert survivors(logits, SamplingParams(top_p=0.5)) == [0, 1]


def test_top_p_counts_the_mass_after_temperature() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert survivors(logits, SamplingParams(temperature=0.1, top_p=0.8)) == [0]


@pytest.mark.parametrize("spread", [0.0, 0.001, 1.0, 20.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999, 1.0 - 2**-53])
def test_a_nucleus_of_any_width_in_a_large_vocabulary(spread: float, top_p: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (spread * torch.randn(3000, generator=generator)).tolist()
    mass = torch.tensor(logits, dtype=torch.float64).softmax(0)
    kept = survivors(logits, SamplingParams(top_p=top_p))
    assert float(mass[kept].sum()) >= top_p - 1e-12
    smallest = min(logits[v] for v in kept)
    assert kept == [v for v, logit in enumerate(logits) if logit >= smallest]
    above = [v for v in kept if logits[v] > smallest]
    assert float(mass[above].sum()) < top_p + 1e-12


@pytest.mark.parametrize("params", [SamplingParams(top_p=0.9), SamplingParams(top_k=2), SamplingParams(1.0, 3, 0.5)])
def test_an_impossible_token_has_no_chance(params: SamplingParams) -> None:
    result = process_logits(torch.tensor([NEG_INF, 1.0, NEG_INF, 0.5, 0.9]), params)
    ids = torch.arange(5) if result.token_ids is None else result.token_ids
    assert not result.scores.isnan().any()
    assert set(ids[result.scores > NEG_INF].tolist()) <= {1, 3, 4}
    assert 1 in ids


def test_top_k_beyond_the_possible_tokens() -> None:
    result = process_logits(torch.tensor([NEG_INF, 1.0, NEG_INF]), SamplingParams(top_k=2, top_p=0.99))
    ids = torch.arange(3) if result.token_ids is None else result.token_ids
    assert ids[result.scores > NEG_INF].tolist() == [1]


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300, 1e-20, 1e300])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_extreme_temperatures_stay_numbers(temperature: float, top_p: float) -> None:
    result = process_logits(torch.tensor([-2.0, 7.0, 9.0]), SamplingParams(temperature=temperature, top_p=top_p))
    assert not result.scores.isnan().any()
    assert (result.scores < float("inf")).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_logits_of_any_precision(dtype: torch.dtype) -> None:
    logits = torch.tensor([0.5, 2.0, 1.0], dtype=dtype)
    result = process_logits(logits, SamplingParams(top_k=2))
    assert result.token_ids is not None
    assert result.token_ids.tolist() == [1, 2]
    assert result.scores.dtype == torch.float64
