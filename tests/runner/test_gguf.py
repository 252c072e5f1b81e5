from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.errors import ConfigError
from specdec.runner.gguf import convert_gguf
from tests.runner.tiny_gguf import CHAT_TEMPLATE, EOS_TOKEN_ID, LAST_WEIGHT, TOKENS, write_tiny_gguf


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_converted_model_loads_with_the_weights_of_the_file(gguf_file: Path, tmp_path: Path) -> None:
    convert_gguf(gguf_file, tmp_path, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
    written = {tensor.name: tensor.data for tensor in GGUFReader(gguf_file).tensors}
    down = model.state_dict()["model.layers.1.mlp.down_proj.weight"]
    assert np.array_equal(down.numpy(), written[LAST_WEIGHT])
    assert model.generation_config.eos_token_id == EOS_TOKEN_ID
    assert model.config.vocab_size == len(TOKENS)


def test_converted_tokenizer_loads_with_its_chat_template(gguf_file: Path, tmp_path: Path) -> None:
    convert_gguf(gguf_file, tmp_path, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("cab", add_special_tokens=False)) == ["c", "ab"]
    assert (tmp_path / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_fp16_rounds_every_weight_once(gguf_file: Path, tmp_path: Path) -> None:
    for dtype in ("float16", "float32"):
        (tmp_path / dtype).mkdir()
        convert_gguf(gguf_file, tmp_path / dtype, dtype=dtype)
    half, full = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("float16", "float32"))
    assert half.keys() == full.keys()
    assert all(torch.equal(half[name], full[name].half()) for name in full)
    assert json.loads((tmp_path / "float16" / "config.json").read_text())["dtype"] == "float16"


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\x03\x04")
    with pytest.raises(ConfigError, match=r"model\.gguf is not a GGUF file"):
        convert_gguf(file, tmp_path, dtype="float32")


@pytest.mark.parametrize("num_bytes", [50, 1000, 9000])  # in the header, in the vocabulary, in the weights
def test_a_truncated_file_is_refused(gguf_file: Path, tmp_path: Path, num_bytes: int) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(gguf_file.read_bytes()[:num_bytes])
    with pytest.raises(ConfigError, match=r"cut\.gguf cannot be read"):
        convert_gguf(file, tmp_path, dtype="float32")


def test_a_file_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", without=LAST_WEIGHT)
    with pytest.raises(ConfigError, match=r"lacks weights: model\.layers\.1\.mlp\.down_proj\.weight"):
        convert_gguf(file, tmp_path, dtype="float32")


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", architecture="abacus")
    with pytest.raises(ConfigError, match="abacus is not supported"):
        convert_gguf(file, tmp_path, dtype="float32")


def test_a_missing_extra_is_named(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'specdec\[gguf\]'"):
        convert_gguf(gguf_file, tmp_path, dtype="float32")
