from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Ministral3Config, PreTrainedModel

from specdec.config import ModelSettings, WorkerSettings
from specdec.runner.attention import ATTENTION_NAME
from specdec.runner.batch import SequenceRows
from specdec.runner.fused import FusedDecoderLayer, fuse_layers
from specdec.runner.load import load_model, load_reference
from specdec.runner.model import ModelRunner
from tests.models import save_tiny_model


def load(folder: Path) -> PreTrainedModel:
    model = load_reference(folder, "float32")
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def num_fused(model: PreTrainedModel) -> int:
    count = fuse_layers(model, packed=False)
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


def test_scaling_by_position_far_out_is_noticed(tmp_path: Path) -> None:
    # Ministral 3 scales its queries, but only beyond the length it was first trained for.
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "llama_4_scaling_beta": 0.5,
    }
    config = Ministral3Config(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_parameters=rope,
    )
    folder = save_tiny_model(config, tmp_path)
    assert num_fused(load(folder)) == 0
    runner = ModelRunner(
        load_model(ModelSettings(source=str(folder), device="cpu")), WorkerSettings(kv_cache_bytes=1 << 23)
    )
    tokens = [(7 * n) % 250 for n in range(300)]
    reference = load_reference(folder, "float16")
    reference.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    logits = runner.forward([SequenceRows(tokens, 0, list(range(5)), 300)])
    known = slice(0, runner.vocab_size)
    assert float((logits[:, known] - expected[:, known]).abs().max()) < 2e-4
