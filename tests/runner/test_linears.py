from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from specdec.runner.linears import PackedLinear, RowSafeLinear, pack_linears, row_functions
from specdec.runner.rows import SafeRows, find_safe_rows

SHAPES = [(16, 16), (64, 96), (96, 64), (64, 259), (7, 5), (64, 1)]


def error_in_ulps(outputs: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((outputs.double() - exact).abs() / exact.abs().amax()).max() / torch.finfo(torch.float32).eps)


@pytest.mark.parametrize(("width", "height"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_equals_the_product_with_rounded_weights(width: int, height: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(width)
    weight = torch.randn(height, width, generator=generator)
    bias = torch.randn(height, generator=generator) if has_bias else None
    inputs = torch.randn(2, 5, width, generator=generator)
    packed = PackedLinear(weight, bias)
    outputs = packed(inputs)
    exact = inputs.double() @ weight.half().double().T + (0.0 if bias is None else bias.double())
    unrounded = inputs.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    assert (packed.in_features, packed.out_features) == (width, height)
    assert outputs.dtype == torch.float32
    assert error_in_ulps(outputs, exact) < 32
    assert error_in_ulps(outputs, unrounded) > 32  # or the check above could not see unrounded weights


def test_inputs_and_bias_are_not_rounded() -> None:
    packed = PackedLinear(torch.eye(3), torch.tensor([1e-6, 0.0, 0.0]))
    expected = torch.tensor([[1.0 + 1e-6, 1.0 + 2**-20, 70_000.0]])  # none of them is an fp16 number
    torch.testing.assert_close(packed(torch.tensor([[1.0, 1.0 + 2**-20, 70_000.0]])), expected, rtol=1e-7, atol=0.0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = Conv1D(8, 12)  # transformers' argument order: outputs, inputs
        self.norm = nn.LayerNorm(8)
        nn.init.normal_(self.down.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(inputs)))


def test_every_linear_of_a_model_is_packed_whatever_its_class() -> None:
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 4, bias=False))
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    inputs = torch.randn(3, 8)
    expected = model(inputs)
    pack_linears(model)
    assert not [m for m in model.modules() if isinstance(m, (nn.Linear, Conv1D))]
    assert sum(isinstance(m, PackedLinear) for m in model.modules()) == 5
    torch.testing.assert_close(model(inputs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_one_linear_of_every_shape_is_found(packed: bool) -> None:
    router = nn.Module()
    router.weight = nn.Parameter(torch.randn(3, 8))
    head = RowSafeLinear(nn.Linear(8, 99), SafeRows([1]))  # pads its own rows
    model = nn.Sequential(nn.Embedding(50, 8), Block(), Block(), nn.Linear(8, 4), router, head)
    if packed:
        pack_linears(model)
    shapes = {(width, function(torch.zeros(3, width)).shape[1]) for function, width in row_functions(model)}
    assert shapes == {(8, 12), (12, 8), (8, 4), (8, 3)}


@pytest.mark.parametrize("kind", ["packed", "plain"])
def test_rows_at_safe_counts_do_not_depend_on_each_other(kind: str) -> None:
    linear = nn.Linear(64, 96).requires_grad_(False)
    function = linear if kind == "plain" else PackedLinear(linear.weight, linear.bias)
    rows = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    safe = find_safe_rows([(function, 64)], range(1, 33))
    alone = torch.cat([function(rows[i : i + 1].expand(safe.pad(1), -1))[:1] for i in range(64)])
    for count in safe.counts:
        for first in range(0, 64 - count + 1, 5):
            assert torch.equal(function(rows[first : first + count]), alone[first : first + count])


def test_a_head_takes_any_number_of_rows_in_products_of_safe_counts() -> None:
    linear, seen = nn.Linear(8, 20), []
    linear.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    head = RowSafeLinear(linear, SafeRows([3, 6]))
    hidden = torch.randn(1, 17, 8)
    for count in (0, 1, 3, 4, 6, 7, 17):
        seen.clear()
        outputs = head(hidden[:, :count])
        assert outputs.shape == (1, count, 20)
        torch.testing.assert_close(outputs, hidden[:, :count] @ linear.weight.T + linear.bias)
        assert count == 0 or set(seen) <= {3, 6}
    assert head(hidden[0, :5]).shape == (5, 20)
