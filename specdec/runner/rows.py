"""Row counts at which a product's rows are bitwise independent of each other.

The row of a matrix product is computed by a kernel chosen by how many rows there are, and another kernel may
add in another order. So that the logits of a sequence do not depend on what else is in the forward, every
product gets a number of rows from a set in which each row comes out the same, bit for bit, at every place. The
set depends on processor and library; it is found by trying.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.errors import ConfigError

RowFunction = Callable[[Tensor], Tensor]
"""Maps [rows, width] to [rows, anything], each row by itself."""

_REFERENCE_ROWS = 12


def candidate_row_counts(max_rows: int) -> list[int]:
    """Row counts worth trying, ascending: all small ones, then coarser, ``max_rows`` included."""
    counts = {*range(1, 17), *range(20, 65, 4), *range(96, max_rows + 1, 32), max_rows}
    return sorted(count for count in counts if count <= max_rows)


class SafeRows:
    """A set of safe row counts.

    Attributes:
        counts: ascending.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        if not counts:
            raise ConfigError("no row count gives bitwise reproducible products on this processor; use device: cuda")
        self.counts = sorted(counts)

    @property
    def max_rows(self) -> int:
        """The largest safe count; more rows are computed in several products."""
        return self.counts[-1]

    def pad(self, num_rows: int) -> int:
        """The smallest safe count of at least ``num_rows`` (which is at most `max_rows`)."""
        return self.counts[bisect_left(self.counts, num_rows)]


def find_safe_rows(functions: Sequence[tuple[RowFunction, int]], candidates: Sequence[int]) -> SafeRows:
    """Try the candidates on every function, against small products of a fixed row count.

    Args:
        functions: each with the width of its input.
        candidates: row counts, ascending.
    """
    generator = torch.Generator().manual_seed(0)
    safe = list(candidates)
    for function, width in functions:
        rows = torch.randn(safe[-1] + _REFERENCE_ROWS, width, generator=generator)
        reference = torch.cat([function(rows[i : i + _REFERENCE_ROWS]) for i in range(0, safe[-1], _REFERENCE_ROWS)])
        safe = [count for count in safe if torch.equal(function(rows[:count]), reference[:count])]
        if not safe:
            break
    return SafeRows(safe)
