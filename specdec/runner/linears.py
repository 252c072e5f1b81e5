"""Linear layers with packed fp16 weights for CPU.

Weights are stored in fp16 in the layout of FBGEMM's kernel, inputs, products and sums are fp32. Decoding reads
every weight once per forward and is bound by memory, so half the bytes is twice the speed, and a few rows more
cost little: that is what makes verification cheap.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from specdec.runner.rows import RowFunction, SafeRows


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` with fp16 weights and fp32 arithmetic.

    Args:
        weight: [out_features, in_features]; rounded to fp16.
        bias: [out_features] or None; kept in fp32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        packed_bias = None if bias is None else bias.detach().float().contiguous()
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.detach().float().contiguous(), packed_bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] fp32 to [..., out_features] fp32."""
        outputs: Tensor = torch.ops.quantized.linear_dynamic_fp16(inputs, self._packed)
        return outputs


def make_linear(linears: Sequence[nn.Linear], *, packed: bool) -> nn.Module:
    """One layer whose output is those of several layers of the same input, side by side.

    Args:
        packed: make it a `PackedLinear`.
    """
    weight = torch.cat([linear.weight for linear in linears])
    bias: Tensor | None = None
    # torch's stubs say that there always is one.
    biases: list[Tensor | None] = [linear.bias for linear in linears]
    if any(own is not None for own in biases):
        zeros = [weight.new_zeros(linear.out_features) for linear in linears]
        bias = torch.cat([zero if own is None else own for own, zero in zip(biases, zeros, strict=True)])
    return linear_of(weight, bias, packed=packed)


def linear_of(weight: Tensor, bias: Tensor | None, *, packed: bool) -> PackedLinear | nn.Linear:
    """A linear layer with these weights.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
        packed: make it a `PackedLinear`.
    """
    if packed:
        return PackedLinear(weight, bias)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def pack_linears(model: nn.Module) -> None:
    """Replace every linear layer of a model by a `PackedLinear`, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, PackedLinear(child.weight, child.bias))
            elif isinstance(child, Conv1D):
                setattr(parent, name, PackedLinear(child.weight.T, child.bias))


class RowSafeLinear(nn.Module):
    """A linear layer that takes any number of rows, computed in products of safe row counts.

    For layers that do not see all rows of a forward, such as the head and the experts of a mixture.
    """

    def __init__(self, linear: nn.Module, safe_rows: SafeRows) -> None:
        super().__init__()
        self.linear = linear
        self._safe_rows = safe_rows

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        parts = []
        for part in torch.split(rows, self._safe_rows.max_rows):
            padding = self._safe_rows.pad(len(part)) - len(part) if len(part) else 0
            padded = nn.functional.pad(part, (0, 0, 0, padding)) if padding else part
            parts.append(self.linear(padded)[: len(part)])
        outputs = parts[0] if len(parts) == 1 else torch.cat(parts)
        return outputs.view(*inputs.shape[:-1], outputs.shape[-1])


def row_functions(model: nn.Module) -> list[tuple[RowFunction, int]]:
    """One product of each shape that all rows of a forward go through, with the width of its input.

    Beside linear layers, some models multiply with a plain parameter (the router of a mixture of experts).
    """
    shapes: dict[tuple[int, int], tuple[RowFunction, int]] = {}
    skipped = {
        id(inner) for module in model.modules() if isinstance(module, RowSafeLinear) for inner in module.modules()
    }
    for module in model.modules():
        if id(module) in skipped or isinstance(module, nn.Embedding):
            continue
        if isinstance(module, (nn.Linear, PackedLinear)):
            shapes.setdefault((module.in_features, module.out_features), (module, module.in_features))
        elif isinstance(module, Conv1D):
            shapes.setdefault((module.nx, module.nf), (module, module.nx))
        else:
            for weight in (p for p in module.parameters(recurse=False) if p.ndim == 2):
                shapes.setdefault((weight.shape[1], weight.shape[0]), (partial(_multiply, weight), weight.shape[1]))
    return list(shapes.values())


def _multiply(weight: Tensor, rows: Tensor) -> Tensor:
    return nn.functional.linear(rows, weight)
