from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from specdec.runner.huge_pages import advise_tensor, collapse_heap

linux = sys.platform == "linux"


def huge_bytes(tensor: torch.Tensor) -> int:
    """Bytes of huge pages in the memory region that holds a tensor."""
    region = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := region.match(line):
            inside = int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


def test_memory_is_unchanged_by_the_move() -> None:
    tensor = torch.randn(4 << 20)
    before = tensor.clone()
    moved = collapse_heap()
    assert torch.equal(tensor, before)
    assert moved >= 0
    if linux and moved:
        assert huge_bytes(tensor) > 0


@pytest.mark.parametrize("size", [1, 1000, 4 << 20])
def test_advice_on_any_tensor_is_harmless(size: int) -> None:
    tensor = torch.zeros(size)
    advise_tensor(tensor)
    tensor += 1.0
    assert tensor.sum() == size


def test_memory_that_was_never_touched_stays_untouched() -> None:
    tensor = torch.zeros(64 << 20)  # the kernel gives pages on first write
    advise_tensor(tensor)
    assert huge_bytes(tensor) < tensor.nbytes
