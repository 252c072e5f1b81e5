from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec.cache.blocks import BLOCK_SIZE
from specdec.config import DType, ModelSettings, WorkerSettings
from specdec.errors import ConfigError
from specdec.runner.batch import SequenceRows
from specdec.runner.load import load_model, load_reference
from specdec.runner.model import ModelRunner
from tests.models import SLIDING_WINDOW, TINY_CONFIGS, TOKENIZER_VOCAB_SIZE, make_tiny_llama
from tests.runner.feeding import logits_in_company, logits_in_pieces

ModelPath = Callable[[str], Path]
REFUSED = {"stablelm"}
MODELS = [name for name in TINY_CONFIGS if name not in REFUSED]
LENGTH = 150

with_models = pytest.mark.parametrize("name", MODELS)
with_dtypes = pytest.mark.parametrize("dtype", ["float16", "float32"])


def make_runner(folder: Path, dtype: DType = "float16", **worker: int) -> ModelRunner:
    loaded = load_model(ModelSettings(source=str(folder), dtype=dtype, device="cpu"))
    return ModelRunner(loaded, WorkerSettings(**{"kv_cache_bytes": 1 << 23, **worker}))


@pytest.fixture(scope="module")
def runner_of(tiny_model_path: ModelPath) -> Callable[[str, DType], ModelRunner]:
    return functools.cache(lambda name, dtype: make_runner(tiny_model_path(name), dtype))


def some_tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(TOKENIZER_VOCAB_SIZE), k=length)


@functools.cache
def reference_logits(folder: Path, dtype: DType, length: int, seed: int = 0) -> Tensor:
    """transformers' own eager forward of the rounded model, in fp32."""
    model = load_reference(folder, dtype)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([some_tokens(length, seed)])).logits[0]
    return logits


@with_dtypes
@with_models
def test_logits_equal_those_of_transformers(
    name: str, dtype: DType, runner_of: Callable[[str, DType], ModelRunner], tiny_model_path: ModelPath
) -> None:
    runner = runner_of(name, dtype)
    logits = logits_in_pieces(runner, some_tokens(LENGTH), itertools.repeat(runner.max_tokens))
    expected = reference_logits(tiny_model_path(name), dtype, LENGTH)
    assert runner.vocab_size < expected.shape[1]
    known = slice(0, runner.vocab_size)
    assert float((logits[:, known] - expected[:, known]).abs().max()) < 2e-4
    assert (logits[:, runner.vocab_size :] == float("-inf")).all()


@with_dtypes
@with_models
def test_the_bits_of_a_row_do_not_depend_on_pieces_or_company(
    name: str, dtype: DType, runner_of: Callable[[str, DType], ModelRunner]
) -> None:
    runner = runner_of(name, dtype)
    sequences = [some_tokens(length, seed) for seed, length in enumerate([LENGTH, 30, 71, 5])]
    expected = [logits_in_pieces(runner, token_ids, itertools.repeat(1)) for token_ids in sequences]
    for sizes in ([runner.max_tokens], [3, 2, 7, 1, 14], [31, 38, 64, 2]):
        assert torch.equal(logits_in_pieces(runner, sequences[0], itertools.cycle(sizes)), expected[0])
    for seed in range(3):
        assert all(map(torch.equal, logits_in_company(runner, sequences, seed), expected))


def test_the_window_matters_at_this_length(tiny_model_path: ModelPath) -> None:
    # Or the models with a window would show nothing above.
    assert LENGTH > BLOCK_SIZE > SLIDING_WINDOW
    for name in ("mistral", "gemma2", "gemma3", "qwen2-sliding"):
        model = load_reference(tiny_model_path(name), "float32")
        model.set_attn_implementation("eager")
        tokens = torch.tensor([some_tokens(LENGTH)])
        with torch.inference_mode():
            windowed = model(tokens).logits
            for module in model.modules():
                if getattr(module, "sliding_window", None):
                    module.sliding_window = 10_000
            model.config.sliding_window = 10_000
            everything = model(tokens).logits
        assert float((windowed - everything)[:, :SLIDING_WINDOW].abs().max()) < 1e-4, name
        assert float((windowed - everything)[:, -1].abs().max()) > 1e-2, name


def test_greedy_tokens_equal_generate(
    tiny_model_path: ModelPath, runner_of: Callable[[str, DType], ModelRunner]
) -> None:
    prompt = some_tokens(20)
    model = load_reference(tiny_model_path("llama"), "float16")
    generated = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=40,
        do_sample=False,
        suppress_tokens=list(range(TOKENIZER_VOCAB_SIZE, 288)),
        eos_token_id=None,
        pad_token_id=0,
    )[0].tolist()
    logits = logits_in_pieces(runner_of("llama", "float16"), generated[:-1], itertools.repeat(50))
    assert logits.argmax(-1)[len(prompt) - 1 :].tolist() == generated[len(prompt) :]


def test_rejected_tokens_leave_no_trace(runner_of: Callable[[str, DType], ModelRunner]) -> None:
    runner, tokens = runner_of("llama", "float16"), some_tokens(90)
    expected = logits_in_pieces(runner, tokens, itertools.repeat(9))
    runner.forward([SequenceRows(tokens[:60], 0, [3, 9], 0)])
    runner.forward([SequenceRows([7] * 20, 60, [3, 9], 20)])  # a draft, rejected
    logits = runner.forward([SequenceRows(tokens[60:], 60, [3, 9], 30)])
    assert torch.equal(logits, expected[60:])


def test_only_the_wanted_logits_come_back(runner_of: Callable[[str, DType], ModelRunner]) -> None:
    runner, tokens = runner_of("llama", "float16"), some_tokens(40)
    rows = [SequenceRows(tokens, 0, [0], 3), SequenceRows(tokens[:5], 0, [1], 0), SequenceRows(tokens[:9], 0, [2], 1)]
    logits = runner.forward(rows)
    expected = logits_in_pieces(runner, tokens, itertools.repeat(40))
    assert logits.dtype == torch.float32
    assert torch.equal(logits, expected[[37, 38, 39, 8]])
    assert runner.forward([SequenceRows(tokens, 0, [0], 0)]).shape == (0, 288)


def test_pieces_of_the_whole_step_and_many_logits(tmp_path: Path) -> None:
    runner = make_runner(make_tiny_llama(tmp_path), max_tokens_per_step=200)
    assert runner.max_tokens <= 200
    tokens = some_tokens(runner.max_tokens)
    whole = logits_in_pieces(runner, tokens, itertools.repeat(runner.max_tokens))
    assert torch.equal(whole, logits_in_pieces(runner, tokens, itertools.repeat(10)))


def test_a_vocabulary_without_padding(tmp_path: Path) -> None:
    runner = make_runner(make_tiny_llama(tmp_path, vocab_size=TOKENIZER_VOCAB_SIZE))
    logits = runner.forward([SequenceRows([1, 2], 0, [0], 2)])
    assert logits.shape == (2, TOKENIZER_VOCAB_SIZE)
    assert logits.isfinite().all()


def test_the_longest_sequence_is_checked(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, max_position_embeddings=4096)
    assert make_runner(folder, max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match="max_model_len is 4097, but the model was made for 4096"):
        make_runner(folder, max_model_len=4097)
    # 64 blocks of 2 layers x (key + value) x 2 heads x 16 x 64 positions x 4 bytes
    assert make_runner(folder, kv_cache_bytes=64 * 2 * 2 * 2 * 16 * 64 * 4).num_blocks == 64
    with pytest.raises(ConfigError, match="kv_cache_bytes is 2097151, but one sequence of max_model_len 4096 takes"):
        make_runner(folder, kv_cache_bytes=64 * 2 * 2 * 2 * 16 * 64 * 4 - 1)
