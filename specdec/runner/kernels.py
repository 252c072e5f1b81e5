"""Compiled kernels for the CPU: everything in a decoder layer that is not a large matrix product.

A step of a small model is a few thousand tiny operations, and dispatching one costs more than computing it. Numba
compiles these loops once per machine (the result is kept on disk).

They are written so that a row's result does not depend, to the last bit, on the other rows: every sum has an order of
its own, given by positions alone. ``fastmath`` allows only the contraction of a product and a sum into one rounding,
which the compiler does alike in every row; reordering is not allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Scalar = Any
"""A float32: numpy's outside, a machine register inside."""
Kernel = TypeVar("Kernel", bound=Callable[..., object])

LANES = 16
F = np.float32


def compiled(function: Kernel) -> Kernel:
    """Compile on first use, keep the result on disk, run without the interpreter's lock."""
    dispatcher: Any = numba.njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")(function)
    typed: Kernel = dispatcher
    return typed


@compiled
def rms_norm(inputs: Floats, weight: Floats, eps: float, outputs: Floats) -> None:
    """Root-mean-square norm of every row.

    Args:
        inputs, outputs: [rows, width].
        weight: [width].
    """
    width = inputs.shape[1]
    lanes = np.empty(LANES, np.float32)
    for row in range(inputs.shape[0]):
        lanes[:] = 0.0
        for start in range(0, width - width % LANES, LANES):
            for lane in range(LANES):
                lanes[lane] += inputs[row, start + lane] * inputs[row, start + lane]
        for index in range(width - width % LANES, width):
            lanes[0] += inputs[row, index] * inputs[row, index]
        scale = F(1.0) / np.sqrt(sum_lanes(lanes) / F(width) + F(eps))
        for index in range(width):
            outputs[row, index] = inputs[row, index] * scale * weight[index]


@compiled
def rotate(heads: Floats, num_rotated: int, cos: Floats, sin: Floats) -> None:
    """Rotary position embedding in place, ``x * cos + rotate_half(x) * sin`` (Su et al., arXiv 2104.09864).

    Args:
        heads: [tokens, heads, head_dim]; the first ``num_rotated`` heads of each token are turned.
        cos, sin: [tokens, head_dim].
    """
    half = heads.shape[2] // 2
    for token in range(heads.shape[0]):
        for head in range(num_rotated):
            for index in range(half):
                first, second = heads[token, head, index], heads[token, head, half + index]
                heads[token, head, index] = first * cos[token, index] - second * sin[token, index]
                heads[token, head, half + index] = second * cos[token, half + index] + first * sin[token, half + index]


@compiled
def silu_and_multiply(gate_up: Floats, outputs: Floats) -> None:
    """``silu(gate) * up``.

    Args:
        gate_up: [rows, 2 * width], the gate's columns first.
        outputs: [rows, width].
    """
    width = outputs.shape[1]
    for row in range(outputs.shape[0]):
        for index in range(width):
            gate = gate_up[row, index]
            outputs[row, index] = gate / (F(1.0) + exp(-gate)) * gate_up[row, width + index]


@compiled
def sum_lanes(lanes: Floats) -> Scalar:
    """Sum of LANES numbers, in a fixed order; they are overwritten."""
    for lane in range(8):
        lanes[lane] += lanes[lane + 8]
    for lane in range(4):
        lanes[lane] += lanes[lane + 4]
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])


@compiled
def exp(x: Scalar) -> Scalar:
    """Exponential of a float32, to 2 units in the last place, in a form the compiler can vectorise.

    Range reduction and polynomial of Cephes' expf (Moshier). Below -87 it stays near the smallest normal number,
    above 88 near the largest.
    """
    x = min(max(x, F(-87.0)), F(88.0))
    exponent = np.floor(x * F(1.44269504088896341) + F(0.5))
    x = x - exponent * F(0.693359375) - exponent * F(-2.12194440e-4)
    y = F(1.9875691500e-4)
    y = y * x + F(1.3981999507e-3)
    y = y * x + F(8.3334519073e-3)
    y = y * x + F(4.1665795894e-2)
    y = y * x + F(1.6666665459e-1)
    y = y * x + F(5.0000001201e-1)
    y = y * (x * x) + x + F(1.0)
    return y * np.int32((np.int32(exponent) + np.int32(127)) << np.int32(23)).view(np.float32)
