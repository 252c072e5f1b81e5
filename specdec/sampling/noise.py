"""Gumbel noise as a pure function of (seed, position, token id).

There is no generator state: the noise of a token at a position is the same whoever evaluates it, in whatever
order and batch, on CPU and GPU. Draft and target share it, which is what makes a good draft agree with the
target even when sampling (Daliri, Musco, Suresh, arXiv 2408.07978), and what makes the output independent of
everything but model, prompt, parameters and seed.

The bits are those of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): its stream number is derived from seed and
position, its counter is the token id.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit value (torch has no uint64 arithmetic)."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix_int(value: int) -> int:
    """SplitMix64's finalizer on a Python int in [0, 2**64)."""
    value = ((value ^ (value >> 30)) * _MIX1) & _MASK64
    value = ((value ^ (value >> 27)) * _MIX2) & _MASK64
    return value ^ (value >> 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's ``>>`` copies the sign bit of an int64."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def noise_key(seed: int, position: int) -> int:
    """The stream of one position of one request, in [0, 2**64).

    Args:
        seed: the request's seed, in [0, 2**63).
        position: absolute position of the token to choose; the prompt starts at 0.
    """
    return _mix_int((_mix_int((seed + _GOLDEN) & _MASK64) + position * _GOLDEN) & _MASK64)


def uniform_noise(key: int, token_ids: Tensor) -> Tensor:
    """Uniform noise, never 0 nor 1.

    Args:
        key: from `noise_key`.
        token_ids: int64, any shape.

    Returns:
        float64 of the same shape, on the same device: odd multiples of 2**-53.
    """
    bits = (token_ids + 1) * _signed(_GOLDEN) + _signed(key)
    bits = (bits ^ _shift_right(bits, 30)) * _signed(_MIX1)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(_MIX2)
    bits = bits ^ _shift_right(bits, 31)
    # 52 bits and a half: exact in float64, and symmetric in the open interval (0, 1).
    return (_shift_right(bits, 12).to(torch.float64) + 0.5) * 2.0**-52


def gumbel_noise(key: int, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise ``-log(-log(u))``; arguments and shape as in `uniform_noise`, float64."""
    return -torch.log(-torch.log(uniform_noise(key, token_ids)))
