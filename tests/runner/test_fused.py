from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.runner.attention import ATTENTION_NAME
from specdec.runner.exact_attention import ExactAttention
from specdec.runner.fused import FusedDecoderLayer, fuse_layers
from specdec.runner.load import load_reference


def load(folder: Path) -> PreTrainedModel:
    model = load_reference(folder, "float32")
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def num_fused(model: PreTrainedModel) -> int:
    count = fuse_layers(model, ExactAttention(), packed=False)
    assert count == sum(isinstance(module, FusedDecoderLayer) for module in model.modules())
    return count


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_layers_of_the_common_shape_are_fused(name: str, tiny_model_path: Callable[[str], Path]) -> None:
    # That a fused model computes the same is shown with all the others, in test_model_runner.
    model = load(tiny_model_path(name))
    assert num_fused(model) == model.config.num_hidden_layers


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt2", "gpt-neox", "phi3", "olmo2", "granite"])
def test_layers_of_another_shape_are_left_as_they_are(name: str, tiny_model_path: Callable[[str], Path]) -> None:
    assert num_fused(load(tiny_model_path(name))) == 0


class Scaled(nn.Module):
    """An activation that is almost the usual one."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 1.01 * nn.functional.silu(inputs)


def other_activation(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.act_fn = Scaled()


def other_scaling(model: PreTrainedModel) -> None:
    attention = model.model.layers[1].self_attn
    original = attention.forward

    def forward(*args: object, **kwargs: object) -> object:
        output, weights = original(*args, **kwargs)
        return 0.99 * output, weights

    attention.forward = forward


def other_epsilon(model: PreTrainedModel) -> None:
    norm = model.model.layers[1].input_layernorm
    norm.eps, norm.variance_epsilon = 1e-5, 0.5


@pytest.mark.parametrize("change", [other_activation, other_scaling])
def test_a_layer_that_computes_something_else_is_noticed(
    change: Callable[[PreTrainedModel], None], tiny_model_path: Callable[[str], Path]
) -> None:
    model = load(tiny_model_path("llama"))
    change(model)
    assert num_fused(model) == model.config.num_hidden_layers - 1
    assert not isinstance(model.model.layers[1], FusedDecoderLayer)


def test_the_epsilon_of_a_norm_is_taken_over(tiny_model_path: Callable[[str], Path]) -> None:
    model = load(tiny_model_path("llama"))
    other_epsilon(model)
    assert num_fused(model) == model.config.num_hidden_layers
