from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.config import ModelSettings, WorkerSettings
from specdec.errors import ConfigError
from specdec.runner.load import load_model, load_reference
from specdec.runner.model import ModelRunner
from tests.models import make_tiny_llama
from tests.runner.feeding import logits_in_pieces

TOKENS = [(7 * n) % 250 for n in range(40)]


@pytest.fixture(scope="module")
def five_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("five"), num_layers=5)


def runner_of_layers(folder: Path, layers: list[int]) -> ModelRunner:
    return ModelRunner(
        load_model(ModelSettings(source=str(folder), dtype="float32", device="cpu"), layers),
        WorkerSettings(kv_cache_bytes=1 << 22),
    )


def model_of_layers(folder: Path, layers: list[int]) -> LlamaForCausalLM:
    """A model that was built with only these layers, from the saved weights."""
    whole = LlamaForCausalLM.from_pretrained(folder).state_dict()
    config = LlamaConfig.from_pretrained(folder)
    config.num_hidden_layers = len(layers)
    model = LlamaForCausalLM(config)
    weights = {name: tensor for name, tensor in whole.items() if ".layers." not in name}
    for place, layer in enumerate(layers):
        prefix = f"model.layers.{layer}."
        for name in [name for name in whole if name.startswith(prefix)]:
            weights[name.replace(prefix, f"model.layers.{place}.")] = whole[name]
    model.load_state_dict(weights)
    return model.eval()


@pytest.mark.parametrize("layers", [[0], [4], [0, 4], [1, 2, 3], [0, 1, 2, 3, 4]])
def test_the_cut_model_is_the_model_of_those_layers(five_layers: Path, layers: list[int]) -> None:
    logits = logits_in_pieces(runner_of_layers(five_layers, layers), TOKENS, itertools.repeat(9))
    with torch.inference_mode():
        expected = model_of_layers(five_layers, layers)(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits[:, :258], expected[:, :258], rtol=1e-4, atol=1e-4)


def test_other_layers_give_other_logits(five_layers: Path) -> None:
    first, second = (
        logits_in_pieces(runner_of_layers(five_layers, layers), TOKENS, itertools.repeat(9))
        for layers in ([0, 1], [0, 2])
    )
    assert not torch.allclose(first[:, :258], second[:, :258], rtol=1e-2, atol=1e-2)


def test_the_order_given_does_not_matter(five_layers: Path) -> None:
    first, second = (
        logits_in_pieces(runner_of_layers(five_layers, layers), TOKENS, itertools.repeat(9))
        for layers in ([0, 3, 1], [0, 1, 3])
    )
    assert torch.equal(first, second)


def test_a_cut_keeps_each_layers_kind_of_attention(tiny_model_path: Callable[[str], Path]) -> None:
    model = load_reference(tiny_model_path("gemma3"), "float32", [1, 2])
    assert model.config.num_hidden_layers == 2
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    tokens = torch.tensor([TOKENS])
    with torch.inference_mode():
        expected = model(tokens).logits[0]
    runner = runner_of_layers(tiny_model_path("gemma3"), [1, 2])
    logits = logits_in_pieces(runner, TOKENS, itertools.repeat(9))
    torch.testing.assert_close(logits[:, :258], expected[:, :258], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("layers", "fault"),
    [
        ([0, 5], r"\[5\] not in the target, whose layers are 0 to 4"),
        ([-1], r"\[-1\] not in the target"),
        ([0, 1, 1], r"\[0, 1, 1\] names a layer twice"),
    ],
)
def test_wrong_layers_are_told(five_layers: Path, layers: list[int], fault: str) -> None:
    with pytest.raises(ConfigError, match=f"draft.cut_layers: {fault}"):
        load_reference(five_layers, "float32", layers)
