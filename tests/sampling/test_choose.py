from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.sampling.choose import RowToChoose, accept_draft, choose_tokens
from specdec.types import SamplingParams
from tests import oracles

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(temperature=0.7, seed=2),
    SamplingParams(temperature=1.3, top_k=5, seed=3),
    SamplingParams(temperature=1.0, top_p=0.8, seed=4),
    SamplingParams(temperature=0.9, top_k=7, top_p=0.9, seed=2**63 - 1),
]


def mixed_batch(vocab_size: int, copies: int = 4) -> tuple[torch.Tensor, list[RowToChoose]]:
    rows = [RowToChoose(params, position) for position, params in enumerate(PARAMS * copies)]
    generator = torch.Generator().manual_seed(vocab_size)
    return 2.0 * torch.randn(len(rows), vocab_size, generator=generator), rows


@pytest.mark.parametrize("vocab_size", [2, 13, 600])
def test_every_row_of_a_mixed_batch_equals_the_naive(vocab_size: int) -> None:
    logits, rows = mixed_batch(vocab_size)
    expected = [
        oracles.choose(row_logits, row.params, row.position)
        for row_logits, row in zip(logits.tolist(), rows, strict=True)
    ]
    assert choose_tokens(logits, rows) == expected


def test_a_row_gets_the_same_token_alone_and_in_any_batch() -> None:
    logits, rows = mixed_batch(50)
    together = choose_tokens(logits, rows)
    assert [choose_tokens(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)] == together
    order = list(reversed(range(len(rows))))
    assert choose_tokens(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


def test_position_and_seed_matter_when_sampling_and_only_then() -> None:
    logits = torch.zeros(1, 1000)
    logits[0, 123] = 0.001

    def tokens(temperature: float) -> set[int]:
        return {
            choose_tokens(logits, [RowToChoose(SamplingParams(temperature, seed=seed), position)])[0]
            for seed, position in itertools.product(range(3), range(3))
        }

    assert tokens(0.0) == {123}
    assert len(tokens(1.0)) == 9


@pytest.mark.parametrize("vocab_size", [5, 64, 1000, 50_000])
def test_of_equal_logits_the_lowest_id_wins(vocab_size: int) -> None:
    logits = torch.zeros(3, vocab_size)
    logits[1, 2:] = 1.0
    logits[2, [vocab_size - 2, vocab_size - 1]] = 1.0
    rows = [RowToChoose(SamplingParams(temperature=0.0), 0)] * 3
    assert choose_tokens(logits, rows) == [0, 2, vocab_size - 2]


@pytest.mark.parametrize("params", PARAMS)
def test_an_impossible_token_never_comes_out(params: SamplingParams) -> None:
    logits = torch.full((200, 40), float("-inf"))
    logits[:, [3, 17, 39]] = 0.0
    tokens = choose_tokens(logits, [RowToChoose(params, position) for position in range(200)])
    assert set(tokens) <= {3, 17, 39}
    assert params.temperature == 0.0 or len(set(tokens)) == 3


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-30])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    row = RowToChoose(SamplingParams(temperature=temperature), 3)
    assert choose_tokens(torch.tensor([[5.0, 9.0, 8.9, -1.0]]), [row]) == [1]


def test_no_rows() -> None:
    assert choose_tokens(torch.zeros(0, 10), []) == []


def test_the_frequencies_are_those_of_the_distribution() -> None:
    probabilities = [0.4, 0.3, 0.2, 0.1]
    logits = torch.tensor(probabilities).log().expand(4000, 4)
    tokens = choose_tokens(logits, [RowToChoose(SamplingParams(seed=seed), 5) for seed in range(4000)])
    counts = [tokens.count(v) for v in range(4)]
    assert oracles.chi_square(counts, probabilities) < oracles.chi_square_limit(3)
    tempered = [p**2 / 0.3 for p in probabilities]
    assert oracles.chi_square(counts, tempered) > oracles.chi_square_limit(3)


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_acceptance_is_the_longest_common_prefix(draft: list[int], target: list[int]) -> None:
    target = target[: len(draft) + 1]
    accepted = accept_draft(draft, target)
    assert accepted == max(n for n in range(len(draft) + 1) if draft[:n] == target[:n])


def test_nothing_after_the_first_difference_is_accepted() -> None:
    assert accept_draft([1, 9, 3], [1, 2, 3, 4]) == 1
    assert accept_draft([9, 2, 3], [1, 2, 3, 4]) == 0
    assert accept_draft([1, 2, 3], [1, 2, 3, 4]) == 3
    assert accept_draft([], [1]) == 0
