"""Huge pages for model weights and KV.

Decoding reads every weight once per step. With pages of 4 KiB, a third of that time goes into finding them; with pages
of 2 MiB it does not. Linux does not use them unasked, and neither PyTorch nor FBGEMM asks.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # Linux 6.1; older kernels refuse it, and their background thread collapses what is advised
# Private, anonymous, writable: what malloc hands out. Files, stacks and shared memory are left alone.
_MALLOC_REGION = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0\s*(\[heap\])?")


def collapse_heap() -> int:
    """Move this process's large allocations into huge pages; bytes moved. Does nothing but on Linux.

    For memory that is written and stays, such as weights just loaded: memory that was never touched would be
    allocated by this.
    """
    if sys.platform != "linux":
        return 0
    moved = 0
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        region = _MALLOC_REGION.fullmatch(line.rstrip())
        if region is not None:
            moved += _advise(int(region[1], 16), int(region[2], 16), _MADV_HUGEPAGE, _MADV_COLLAPSE)
    logger.info("%d MiB of memory moved into huge pages", moved >> 20)
    return moved


def advise_tensor(tensor: torch.Tensor) -> None:
    """Let a CPU tensor's memory come in huge pages when it is first written. Does nothing but on Linux."""
    if sys.platform == "linux" and tensor.device.type == "cpu":
        _advise(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, _MADV_HUGEPAGE)


def _advise(start: int, end: int, *advices: int) -> int:
    """Give the kernel advice on the huge pages that lie within a range; bytes for which it took all of it."""
    start = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    length = end // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES - start
    if length <= 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for advice in advices:
        if libc.madvise(start, length, advice) != 0:
            # Advice only: the memory works as it is.
            logger.debug("madvise(%d) on %d bytes: %s", advice, length, os.strerror(ctypes.get_errno()))
            return 0
    return length
