from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from specdec.runner import attention_kernels, kernels

WIDTHS = [1, 7, 16, 40, 576]


def rows(count: int, width: int, *, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(count, width, generator=torch.Generator().manual_seed(width))


def normed(inputs: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    outputs = torch.full_like(inputs, float("nan"))
    kernels.rms_norm(inputs.numpy(), weight.numpy(), eps, outputs.numpy())
    return outputs


def activated(gate_up: Tensor) -> Tensor:
    outputs = torch.full((len(gate_up), gate_up.shape[1] // 2), float("nan"))
    kernels.silu_and_multiply(gate_up.numpy(), outputs.numpy())
    return outputs


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_rms_norm_is_that_of_pytorch(width: int, scale: float) -> None:
    inputs, weight = rows(5, width, scale=scale), rows(1, width)[0]
    expected = rms_norm(inputs.double(), (width,), weight.double(), 1e-5)
    torch.testing.assert_close(normed(inputs, weight).double(), expected, rtol=1e-6, atol=1e-6)


def test_the_eps_of_a_norm_counts() -> None:
    inputs, weight = rows(2, 16, scale=1e-3), torch.ones(16)
    assert not torch.allclose(normed(inputs, weight, 1e-5), normed(inputs, weight, 1e-6))


def test_silu_and_multiply_is_that_of_pytorch_everywhere() -> None:
    gate = torch.cat([torch.linspace(-100, 100, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e4, 1e4])])
    up = torch.linspace(-3, 3, len(gate))
    expected = silu(gate.double()) * up.double()
    torch.testing.assert_close(activated(torch.cat([gate, up])[None])[0].double(), expected, rtol=2e-6, atol=1e-30)


def rotate_half(heads: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def test_rotate_is_the_formula_and_leaves_the_other_heads_alone() -> None:
    heads = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    angles = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    cos, sin = angles.cos(), angles.sin()
    expected = heads * cos[:, None] + rotate_half(heads) * sin[:, None]
    turned = heads.clone()
    kernels.rotate(turned.numpy(), 3, cos.numpy(), sin.numpy())
    torch.testing.assert_close(turned[:, :3], expected[:, :3])
    assert torch.equal(turned[:, 3:], heads[:, 3:])


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_has_the_same_bits_in_any_company(width: int) -> None:
    inputs, weight, gate_up = rows(9, width), rows(1, width)[0], rows(9, 2 * width)
    norms, activations = normed(inputs, weight), activated(gate_up)
    for start, end in [(0, 1), (3, 5), (8, 9), (2, 9)]:
        assert torch.equal(normed(inputs[start:end].clone(), weight), norms[start:end])
        assert torch.equal(activated(gate_up[start:end].clone()), activations[start:end])


def test_keys_become_columns_and_values_rows() -> None:
    num_heads, num_kv_heads, head_dim = 4, 2, 3
    heads = torch.randn(3, num_heads + 2 * num_kv_heads, head_dim, generator=torch.Generator().manual_seed(0))
    keys, values = torch.zeros(5, num_kv_heads, head_dim, 64), torch.zeros(5, num_kv_heads, 64, head_dim)
    places = [(4, 0), (1, 63)]  # two tokens; the third is padding
    blocks, offsets = (np.array(column, np.int64) for column in zip(*places, strict=True))
    attention_kernels.store_keys_values(heads.numpy(), num_heads, keys.numpy(), values.numpy(), blocks, offsets)
    for token, (block, offset) in enumerate(places):
        assert torch.equal(keys[block, :, :, offset], heads[token, 4:6])
        assert torch.equal(values[block, :, offset], heads[token, 6:8])
        keys[block, :, :, offset] = 0.0
        values[block, :, offset] = 0.0
    assert not keys.any()
    assert not values.any()


def exponentials(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The kernels' exponential, through the activation: silu(x) = x / (1 + exp(-x))."""
    gate_up = torch.from_numpy(np.concatenate([-values, np.ones_like(values)])[None])
    return (-values / activated(gate_up)[0].numpy() - 1.0).astype(np.float32)


def test_the_exponential_is_accurate() -> None:
    values = np.linspace(0.5, 80.0, 1000).astype(np.float32)
    wanted = np.array([math.exp(value) for value in values])
    np.testing.assert_allclose(exponentials(values), wanted, rtol=2e-6)
