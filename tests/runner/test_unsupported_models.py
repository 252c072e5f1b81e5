from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BloomConfig,
    DogeConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
    RecurrentGemmaConfig,
    T5Config,
)

from specdec.config import ModelSettings, WorkerSettings
from specdec.errors import ConfigError, UnsupportedModelError
from specdec.runner.batch import SequenceRows
from specdec.runner.load import load_model, read_model_config
from specdec.runner.model import ModelRunner
from tests.models import make_tiny_llama, save_tiny_model

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}

UNSUPPORTED: dict[str, tuple[PreTrainedConfig, str]] = {
    "t5": (T5Config(), "t5 is an encoder-decoder model"),
    "mamba": (MambaConfig(), "mamba keeps a state other than keys and values"),
    "recurrent gemma": (RecurrentGemmaConfig(), "recurrent_gemma keeps a state other than keys and values"),
    "lfm2": (Lfm2Config(full_attn_idxs=[2]), "lfm2 keeps a state other than keys and values"),
    "bloom": (BloomConfig(), "bloom does not use transformers' attention interface"),
    "longrope": (
        LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=LONGROPE),
        "llama with longrope rotary embeddings",
    ),
}


@pytest.mark.parametrize(("config", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_a_model_that_cannot_be_decoded_exactly_is_refused_before_its_weights_are_read(
    config: PreTrainedConfig, reason: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        read_model_config(tmp_path)


def test_an_architecture_without_the_attention_interface_is_refused(tiny_model_path: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="stablelm does not use transformers' attention interface"):
        load_model(ModelSettings(source=str(tiny_model_path("stablelm")), device="cpu"))


SMALL = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_attention_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    save_tiny_model(BertConfig(**SMALL, is_decoder=True), tmp_path)
    # As most of its folders are: an encoder, with a language model head all the same.
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "is_decoder": False}))
    with pytest.raises(UnsupportedModelError, match="bert has attention that looks ahead"):
        load_model(ModelSettings(source=str(tmp_path), device="cpu"))


def test_attention_with_a_mask_of_its_own_is_refused_at_the_first_forward(tmp_path: Path) -> None:
    save_tiny_model(DogeConfig(**SMALL, max_position_embeddings=512), tmp_path)
    runner = ModelRunner(load_model(ModelSettings(source=str(tmp_path), device="cpu")), WorkerSettings())
    with pytest.raises(UnsupportedModelError, match="an attention mask of its own"):
        runner.forward([SequenceRows([1, 2, 3], 0, [0], 1)])


def test_an_unreadable_config_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus-9000"}))
    with pytest.raises(ConfigError, match="cannot read the model config"):
        read_model_config(tmp_path)


def test_a_layer_that_does_not_call_the_attention_interface_is_noticed(tmp_path: Path) -> None:
    loaded = load_model(ModelSettings(source=str(make_tiny_llama(tmp_path)), device="cpu"))
    runner = ModelRunner(loaded, WorkerSettings())

    class Other(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
            return hidden_states

    loaded.model.model.layers[1] = Other()
    with pytest.raises(UnsupportedModelError, match="1 of 2 layers called the attention interface"):
        runner.forward([SequenceRows([1], 0, [0], 1)])
