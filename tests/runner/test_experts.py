from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, PreTrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

from specdec.errors import UnsupportedModelError
from specdec.runner.experts import arrange_experts
from specdec.runner.load import load_reference
from tests.models import save_tiny_model

COMMON = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": lambda: MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen2-moe": lambda: Qwen2MoeConfig(
        **COMMON, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=48, shared_expert_intermediate_size=48
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **COMMON, head_dim=16, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=48
    ),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_forward_is_that_of_transformers(
    config: Callable[[], PreTrainedConfig], packed: bool, tmp_path: Path
) -> None:
    folder = save_tiny_model(config(), tmp_path)
    ids = torch.randint(0, 250, (1, 40), generator=torch.Generator().manual_seed(0))
    expected = load_reference(folder, "float16")(ids).logits
    model = load_reference(folder, "float16")
    arrange_experts(model, packed=packed)
    assert not any(parameter.ndim > 2 for parameter in model.parameters())
    assert float((model(ids).logits - expected).abs().max()) < 2e-4


def test_a_token_has_the_same_bits_in_any_company(tmp_path: Path) -> None:
    model = load_reference(save_tiny_model(CONFIGS["mixtral"](), tmp_path), "float16")
    arrange_experts(model, packed=False)
    experts = next(module for module in model.modules() if hasattr(module, "specdec_experts"))
    generator = torch.Generator().manual_seed(1)
    hidden, weights = torch.randn(70, 64, generator=generator), torch.rand(70, 2, generator=generator)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(70)])
    whole = experts(hidden, ids, weights)
    for start, end in [(0, 1), (5, 7), (10, 40), (69, 70), (3, 70)]:
        assert torch.equal(experts(hidden[start:end], ids[start:end], weights[start:end]), whole[start:end])


def test_stacked_weights_of_another_kind_are_refused(tmp_path: Path) -> None:
    model = load_reference(save_tiny_model(CONFIGS["mixtral"](), tmp_path), "float16")
    model.model.layers[0].odd = nn.Parameter(torch.zeros(2, 3, 4))
    with pytest.raises(UnsupportedModelError, match=r"mixtral has stacked weights.*device: cuda"):
        arrange_experts(model, packed=False)
