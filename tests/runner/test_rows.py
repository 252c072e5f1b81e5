from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.runner.rows import SafeRows, candidate_row_counts, find_safe_rows


def other_bits(rows: Tensor) -> Tensor:
    """The next float up: the smallest difference there is."""
    return torch.nextafter(rows, torch.full_like(rows, float("inf")))


def deviating(is_deviating: Callable[[int, int], bool]) -> Callable[[Tensor], Tensor]:
    """A function of rows whose row ``r`` of ``n`` comes out one bit off where told."""

    def function(rows: Tensor) -> Tensor:
        outputs = rows * 2.0
        for row in range(len(rows)):
            if is_deviating(row, len(rows)):
                outputs[row] = other_bits(outputs[row])
        return outputs

    return function


def test_exactly_the_counts_whose_rows_agree_are_found() -> None:
    function = deviating(lambda row, count: count in (1, 2, 7, 14))
    assert find_safe_rows([(function, 5)], range(1, 17)).counts == [3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 15, 16]


def test_one_deviating_row_makes_a_count_unsafe() -> None:
    # As a kernel of six rows does, whose tail of one or two rows takes another one.
    function = deviating(lambda row, count: count % 6 in (1, 2) and row >= count - count % 6)
    assert find_safe_rows([(function, 5)], range(1, 26)).counts == [n for n in range(1, 26) if n % 6 not in (1, 2)]


def test_a_count_must_be_safe_for_every_function() -> None:
    functions = [(deviating(lambda row, count, bad=bad: count == bad), width) for bad, width in ((3, 4), (5, 8))]
    assert find_safe_rows(functions, range(1, 7)).counts == [1, 2, 4, 6]


def test_no_safe_count_is_an_error_that_says_what_to_do() -> None:
    function = deviating(lambda row, count: count < 8)
    with pytest.raises(ConfigError, match="device: cuda"):
        find_safe_rows([(function, 5)], range(1, 8))


def test_padding_is_the_next_safe_count() -> None:
    rows = SafeRows([6, 3, 12])
    assert [rows.pad(n) for n in (1, 3, 4, 6, 7, 12)] == [3, 3, 6, 6, 12, 12]
    assert rows.max_rows == 12


@pytest.mark.parametrize("max_rows", [8, 64, 100, 128, 2000])
def test_candidates_ascend_to_the_most_rows(max_rows: int) -> None:
    counts = candidate_row_counts(max_rows)
    assert counts == sorted(set(counts))
    assert counts[0] == 1
    assert counts[-1] == max_rows
    assert set(range(1, min(max_rows, 16) + 1)) <= set(counts)
