"""Mixture-of-experts layers on CPU, with the same bits for a token in any company.

transformers multiplies the tokens of a forward by expert, so the number of rows in a product depends on what else is in
the forward. Here every expert's products get a safe number of rows (`specdec.runner.rows`), and the experts of a token
are added up in the token's own order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from specdec.errors import UnsupportedModelError
from specdec.runner.linears import PackedLinear, RowSafeLinear, linear_of
from specdec.runner.rows import candidate_row_counts, find_safe_rows

EXPERTS_NAME = "specdec_row_safe"

# More rows for one expert are computed in several products.
_MAX_ROWS = 64


class RowSafeExperts(nn.Module):
    """The experts of one layer, in products of safe row counts.

    Args:
        experts: transformers' module; its stacked weights are taken out of it.
        packed: pack the weights as fp16.
    """

    def __init__(self, experts: Any, *, packed: bool) -> None:
        super().__init__()
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        ups = [_expert_linear(experts, first, index, packed=packed) for index in range(experts.num_experts)]
        downs = [_expert_linear(experts, "down_proj", index, packed=packed) for index in range(experts.num_experts)]
        safe_rows = find_safe_rows(
            [(ups[0], ups[0].in_features), (downs[0], downs[0].in_features)], candidate_row_counts(_MAX_ROWS)
        )
        self.ups = nn.ModuleList(RowSafeLinear(up, safe_rows) for up in ups)
        self.downs = nn.ModuleList(RowSafeLinear(down, safe_rows) for down in downs)
        for name in (first, "down_proj"):
            setattr(experts, name, None)

    def forward(self, experts: Any, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Map hidden states [tokens, hidden] to the same shape; ``expert_ids``, ``weights``: [tokens, top k]."""
        outputs = hidden.new_zeros(*expert_ids.shape, hidden.shape[-1])
        for expert in expert_ids.unique().tolist():
            tokens, places = torch.where(expert_ids == expert)
            projected = self.ups[expert](hidden[tokens])
            activated = experts._apply_gate(projected) if experts.has_gate else experts.act_fn(projected)
            result = self.downs[expert](activated)
            if experts.has_post_expert_norm:
                result = experts.post_expert_norm(result)
            outputs[tokens, places] = result * weights[tokens, places, None]
        total = outputs[:, 0]
        for place in range(1, outputs.shape[1]):
            total = total + outputs[:, place]
        return total


def _expert_linear(experts: Any, name: str, index: int, *, packed: bool) -> PackedLinear | nn.Linear:
    """One expert's part of a stacked weight, as a layer of its own."""
    weight = getattr(experts, name)[index].detach()
    weight = weight.T if experts.is_transposed else weight
    bias = getattr(experts, f"{name}_bias")[index].detach() if experts.has_bias else None
    return linear_of(weight, bias, packed=packed)


def experts_forward(experts: Any, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """The function transformers calls in place of a mixture-of-experts module's own."""
    output: Tensor = experts.specdec_experts(experts, hidden, expert_ids, weights)
    return output


ExpertsInterface.register(EXPERTS_NAME, experts_forward)


@torch.inference_mode()
def arrange_experts(model: PreTrainedModel, *, packed: bool) -> None:
    """Replace the computation of a model's experts, in place.

    Raises:
        UnsupportedModelError: the model has stacked weights that do not go through transformers' experts interface.
    """
    found = [module for module in model.modules() if hasattr(module, "has_gate") and hasattr(module, "is_transposed")]
    for module in found:
        module.specdec_experts = RowSafeExperts(module, packed=packed)
    if any(parameter.ndim > 2 for parameter in model.parameters()):
        raise UnsupportedModelError(
            f"{model.config.model_type} has stacked weights outside transformers' experts interface, whose products on "
            "CPU depend in their last bits on the other tokens of a forward; use device: cuda, or choose a dense model"
        )
    if found:
        model.set_experts_implementation(EXPERTS_NAME)
