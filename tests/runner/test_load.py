from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.config import ModelSettings, WorkerSettings
from specdec.errors import ConfigError
from specdec.runner.load import load_model, load_reference, load_tokenizer, max_model_len, resolve_device
from tests.models import EOS_TOKEN_ID, TOKENIZER_VOCAB_SIZE, make_tiny_llama


def settings(folder: Path, **changes: str) -> ModelSettings:
    return ModelSettings(**{"source": str(folder), "device": "cpu", **changes})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_weight_of_the_reference_is_rounded_once_and_held_in_fp32(
    tiny_model_path: Callable[[str], Path], dtype: str
) -> None:
    rounded = load_reference(tiny_model_path("llama"), dtype).state_dict()
    saved = load_file(tiny_model_path("llama") / "model.safetensors")
    assert saved.keys() == rounded.keys()
    assert all(tensor.dtype == torch.float32 for tensor in rounded.values())
    assert all(torch.equal(rounded[name], saved[name].to(getattr(torch, dtype)).float()) for name in saved)
    assert any(not torch.equal(rounded[name], saved[name]) for name in saved)


def test_float32_is_left_as_it_is(tiny_model_path: Callable[[str], Path]) -> None:
    weights = load_reference(tiny_model_path("llama"), "float32").state_dict()
    saved = load_file(tiny_model_path("llama") / "model.safetensors")
    assert all(torch.equal(weights[name], saved[name]) for name in saved)


def test_sizes_are_told_apart(tmp_path: Path) -> None:
    loaded = load_model(settings(make_tiny_llama(tmp_path, vocab_size=300, max_position_embeddings=333)))
    assert (loaded.vocab_size, loaded.tokenizer_vocab_size) == (300, TOKENIZER_VOCAB_SIZE)
    assert loaded.max_model_len == 333
    assert loaded.device == torch.device("cpu")
    assert not loaded.model.training


def test_ids_the_embedding_lacks_are_not_tokens(tmp_path: Path) -> None:
    assert load_model(settings(make_tiny_llama(tmp_path, vocab_size=100))).tokenizer_vocab_size == 100


def test_the_fingerprint_is_that_of_what_decides_the_logits(tmp_path: Path) -> None:
    first, second = make_tiny_llama(tmp_path / "a"), make_tiny_llama(tmp_path / "b")
    fingerprint = load_model(settings(first)).fingerprint
    assert load_model(settings(second)).fingerprint == fingerprint
    assert load_model(settings(second, dtype="float32")).fingerprint != fingerprint
    assert load_model(settings(second), [0]).fingerprint != fingerprint
    other = make_tiny_llama(tmp_path / "c", seed=1)
    assert load_model(settings(other)).fingerprint != fingerprint
    config = json.loads((second / "config.json").read_text())
    (second / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert load_model(settings(second)).fingerprint != fingerprint


def test_the_end_tokens_are_the_tokenizers_and_the_generation_configs(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    assert load_tokenizer(settings(folder)).eos_token_ids == {EOS_TOKEN_ID}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_tokenizer(settings(folder)).eos_token_ids == {EOS_TOKEN_ID, 7, 9}
    (folder / "generation_config.json").write_text(json.dumps({}))
    assert load_tokenizer(settings(folder)).eos_token_ids == {EOS_TOKEN_ID}
    (folder / "generation_config.json").unlink()
    assert load_tokenizer(settings(folder)).eos_token_ids == {EOS_TOKEN_ID}


def test_the_longest_sequence_is_the_workers_setting_or_the_models(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, max_position_embeddings=333)
    assert max_model_len(settings(folder), WorkerSettings()) == 333
    assert max_model_len(settings(folder), WorkerSettings(max_model_len=50)) == 50


def test_a_missing_accelerator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"cuda:1 was asked for, but PyTorch sees no CUDA device; use device: cpu"):
        resolve_device("cuda:1")
    assert resolve_device("auto") == torch.device("cpu")


def test_a_folder_without_a_tokenizer_or_with_damaged_weights_is_told(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "a")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match="cannot load a tokenizer"):
        load_model(settings(folder))
    damaged = make_tiny_llama(tmp_path / "b")
    (damaged / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ConfigError, match="cannot load the model"):
        load_model(settings(damaged))


def test_a_missing_weight_is_not_replaced_by_a_random_one(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        load_model(settings(folder))
