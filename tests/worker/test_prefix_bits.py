"""With real (tiny) models: a prefix taken over gives the bits that computing it gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec.cache.blocks import BLOCK_SIZE
from specdec.config import ModelSettings, WorkerSettings
from specdec.runner.batch import SequenceRows
from specdec.runner.load import load_model
from specdec.runner.model import ModelRunner
from specdec.sampling.choose import choose_tokens
from specdec.types import SamplingParams, VerifyItem, VerifyResult
from specdec.worker.calls import Call
from specdec.worker.scheduler import Scheduler
from specdec.worker.sequences import SequenceTable
from tests.models import SLIDING_WINDOW, TOKENIZER_VOCAB_SIZE

GREEDY = SamplingParams(temperature=0.0)
MODELS = ["llama", "mistral", "qwen2-sliding", "gemma2", "gemma3", "gpt2", "gpt-neox"]


def some_tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(TOKENIZER_VOCAB_SIZE), k=length)


class Bench:
    """A scheduler over a real runner, which keeps the logits that were wanted and the rows that were fed."""

    def __init__(self, runner: ModelRunner, *, prefix_cache: bool = True) -> None:
        self.runner = runner
        self.logits: list[Tensor] = []
        self.num_fed = 0
        table = SequenceTable(
            runner.num_blocks,
            60.0,
            identity=runner.kv_identity if prefix_cache else None,
            copy_block=runner.copy_block,
        )
        self.scheduler = Scheduler(
            table,
            vocab_size=runner.vocab_size,
            max_model_len=runner.max_model_len,
            max_tokens=runner.max_tokens,
            max_prefill_beside_decode=runner.max_tokens,
        )

    def forward(self, sequences: Sequence[SequenceRows]) -> Tensor:
        self.num_fed += sum(len(rows.token_ids) for rows in sequences)
        logits = self.runner.forward(sequences)
        self.logits.append(logits)
        return logits

    def ask(self, item: VerifyItem) -> tuple[VerifyResult, Tensor, int]:
        """The answer, the logits of all its rows, and how many rows were fed."""
        self.logits, self.num_fed = [], 0
        call = Call([item])
        self.scheduler.add(call)
        while batch := self.scheduler.next_batch():
            ((pending, rows),) = batch
            logits = self.forward([rows.rows])
            self.scheduler.advance(pending, rows, choose_tokens(logits, rows.choices))
        result = call.future.result()[0]
        assert isinstance(result, VerifyResult)
        return result, torch.cat(self.logits), self.num_fed


@pytest.fixture(scope="module", params=MODELS)
def runner(request: pytest.FixtureRequest, tiny_model_path: Callable[[str], Path]) -> ModelRunner:
    loaded = load_model(ModelSettings(source=str(tiny_model_path(request.param)), device="cpu"))
    return ModelRunner(loaded, WorkerSettings(kv_cache_bytes=1 << 23, max_tokens_per_step=50))


def computed(runner: ModelRunner, tokens: list[int], draft: list[int]) -> Tensor:
    """The logits with nothing to take over. It overwrites the runner's KV: to be called before all else."""
    bench = Bench(runner, prefix_cache=False)
    _, logits, num_fed = bench.ask(VerifyItem("alone", 0, tokens, draft, GREEDY))
    assert num_fed == len(tokens) + len(draft)
    return logits


def test_a_hit_has_the_bits_of_computing(runner: ModelRunner) -> None:
    assert SLIDING_WINDOW < BLOCK_SIZE  # so that some layers see a part of the prefix only
    prompt = some_tokens(200)
    cases = [(prompt, [1, 2, 3]), ([*prompt, *some_tokens(70, 1)], [4]), ([*prompt[:128], 9], [7, 7])]
    expected = [computed(runner, tokens, draft) for tokens, draft in cases]
    bench = Bench(runner)
    bench.ask(VerifyItem("first", 0, prompt, [], GREEDY))
    for (tokens, draft), wanted in zip(cases, expected, strict=True):
        result, logits, num_fed = bench.ask(VerifyItem("again", 0, tokens, draft, GREEDY))
        bench.scheduler.release(["again"])
        assert result.num_cached_tokens == min(len(tokens), 200) // BLOCK_SIZE * BLOCK_SIZE
        assert num_fed == len(tokens) + len(draft) - result.num_cached_tokens
        assert torch.equal(logits, wanted)


def test_a_copied_block_has_the_bits_of_computing(runner: ModelRunner) -> None:
    prompt = some_tokens(150, 3)
    other = [*prompt[:101], *some_tokens(90, 4)]
    expected = [computed(runner, tokens, [5, 6]) for tokens in (other, [*prompt, 8])]
    bench = Bench(runner)
    for name in ("a", "b"):
        bench.ask(VerifyItem(name, 0, prompt, [], GREEDY))
    _, changed, num_fed = bench.ask(VerifyItem("a", 101, other[101:], [5, 6]))
    _, unchanged, _ = bench.ask(VerifyItem("b", 150, [8], [5, 6]))
    assert num_fed == 92
    # The logits of the tail; what came before it gave none.
    for logits, wanted in ((changed, expected[0]), (unchanged, expected[1])):
        assert torch.equal(logits, wanted)


def test_the_bits_of_the_cache_itself_are_compared(runner: ModelRunner) -> None:
    # A negative control: a cached block changed, and the logits differ.
    prompt = some_tokens(129, 6)
    expected = computed(runner, prompt[:80], [])
    bench = Bench(runner)
    bench.ask(VerifyItem("first", 0, prompt, [], GREEDY))
    bench.scheduler.release(["first"])
    first_block = next(iter(bench.scheduler.table.pool._block_of.values()))
    runner._storage.values[0][first_block].add_(0.5)
    result, logits, _ = bench.ask(VerifyItem("second", 0, prompt[:80], [], GREEDY))
    assert result.num_cached_tokens == 64
    assert not torch.equal(logits, expected)
