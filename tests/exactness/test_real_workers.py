"""Draft and target workers with real (tiny) models: the law of their tokens, whatever k and whoever else is there."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from specdec.config import ModelSettings, WorkerSettings
from specdec.runner.load import load_model, load_reference
from specdec.runner.model import ModelRunner
from specdec.types import ProposeItem, SamplingParams, VerifyItem
from specdec.worker.worker import DraftWorker, TargetWorker
from tests import oracles
from tests.models import make_tiny_llama

VOCAB_SIZE = 4
PROMPT = [1, 3, 0, 2]
DEPTH = 3
NUM_SEEDS = 2000


@dataclass
class Reader:
    """One sequence, as its caller sees it."""

    name: str
    params: SamplingParams
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    target_base: int = 0
    draft_base: int = 0
    num_accepted: int = 0

    @property
    def committed(self) -> list[int]:
        return self.prompt + self.tokens

    def propose_item(self, k: int) -> ProposeItem:
        base = self.draft_base
        params = None if base else self.params
        return ProposeItem(self.name, base, self.committed[base:], k, params, len(self.prompt))

    def verify_item(self, draft: list[int]) -> VerifyItem:
        base = self.target_base
        params = None if base else self.params
        return VerifyItem(self.name, base, self.committed[base:], draft, params, len(self.prompt))


async def one_round(target: TargetWorker, draft: DraftWorker, readers: list[Reader], k: int) -> None:
    """One propose and one verify call for all of them."""
    drafts: list[list[int]] = [[] for _ in readers]
    if k:
        proposals = await draft.propose([reader.propose_item(k) for reader in readers])
        assert all(proposal.error is None and proposal.need_from is None for proposal in proposals)
        drafts = [proposal.draft for proposal in proposals]
    items = [reader.verify_item(tokens) for reader, tokens in zip(readers, drafts, strict=True)]
    for reader, result in zip(readers, await target.verify(items), strict=True):
        assert result.error is None
        assert result.need_from is None
        held = len(reader.committed)
        reader.target_base = held + result.num_accepted
        # Of k drafted tokens the last was never fed.
        reader.draft_base = held + min(result.num_accepted, k - 1) if k else 0
        reader.tokens += result.output
        reader.num_accepted += result.num_accepted


async def decode(
    target: TargetWorker, draft: DraftWorker, readers: list[Reader], *, k: int, count: int
) -> list[list[int]]:
    """``count`` tokens of every reader."""
    while unfinished := [reader for reader in readers if len(reader.tokens) < count]:
        await one_round(target, draft, unfinished, k)
    names = [reader.name for reader in readers]
    await target.release(names)
    await draft.release(names)
    return [reader.tokens[:count] for reader in readers]


@contextmanager
def workers(target: Path, draft: Path, layers: list[int] | None = None) -> Iterator[tuple[TargetWorker, DraftWorker]]:
    settings = WorkerSettings(kv_cache_bytes=1 << 25, max_tokens_per_step=512)
    target_model = load_model(ModelSettings(source=str(target), device="cpu"))
    draft_model = load_model(ModelSettings(source=str(draft), device="cpu"), layers)
    pair = (
        TargetWorker(ModelRunner(target_model, settings), 60.0),
        DraftWorker(ModelRunner(draft_model, settings), 60.0),
    )
    try:
        yield pair
    finally:
        for worker in pair:
            worker.close()


def law(model: PreTrainedModel, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every text of DEPTH tokens, from transformers' logits and the naive processors."""
    texts = list(itertools.product(range(VOCAB_SIZE), repeat=DEPTH))
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *text[:-1]] for text in texts])).logits[:, len(PROMPT) - 1 :]
    result = {}
    for text, rows in zip(texts, logits.double().tolist(), strict=True):
        probability = 1.0
        for index, (token, logits_row) in enumerate(zip(text, rows, strict=True)):
            row = oracles.edited(logits_row, params, [*PROMPT, *text[:index]], len(PROMPT))
            kept = oracles.candidates(row, params)
            weights = {v: math.exp(row[v] / params.temperature) for v in kept}
            probability *= weights.get(token, 0.0) / sum(weights.values())
        result[text] = probability
    return result


def agree(texts: list[list[int]], expected: dict[tuple[int, ...], float]) -> bool:
    """Chi-square of the texts; rare ones share a cell."""
    counts = {text: sum(tuple(other) == text for other in texts) for text in expected}
    if any(counts[text] for text, probability in expected.items() if probability == 0.0):
        return False
    common = [text for text, probability in expected.items() if probability * len(texts) >= 8]
    observed = [counts[text] for text in common]
    probabilities = [expected[text] for text in common]
    if 1.0 - sum(probabilities) > 1e-9:
        observed.append(len(texts) - sum(observed))
        probabilities.append(1.0 - sum(probabilities))
    return oracles.chi_square(observed, probabilities) < oracles.chi_square_limit(len(observed) - 1)


@pytest.fixture(scope="module")
def small_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two unrelated models of four tokens."""
    folder = tmp_path_factory.mktemp("small-pair")
    target = make_tiny_llama(folder / "target", vocab_size=VOCAB_SIZE, seed=3)
    return target, make_tiny_llama(folder / "draft", vocab_size=VOCAB_SIZE, seed=4, num_layers=1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0),
        SamplingParams(0.7, 3, 0.95),
        SamplingParams(1.5, frequency_penalty=1.0, repetition_penalty=1.3, logit_bias=((2, 0.5),)),
        SamplingParams(2.0, min_p=0.05, min_tokens=2, end_token_ids=(0,), bad_words=((3, 1),), presence_penalty=-0.5),
    ],
    ids=["whole distribution", "top-k and top-p", "penalties", "masks"],
)
async def test_the_first_tokens_follow_the_targets_law(small_pair: tuple[Path, Path], params: SamplingParams) -> None:
    texts, num_accepted = [], 0
    with workers(*small_pair) as pair:
        for first in range(0, NUM_SEEDS, 250):
            readers = [Reader(f"s{seed}", replace(params, seed=seed), PROMPT) for seed in range(first, first + 250)]
            texts += await decode(*pair, readers, k=2, count=DEPTH)
            num_accepted += sum(reader.num_accepted for reader in readers)
    target_law, draft_law = (law(load_reference(path, "float16"), params) for path in small_pair)
    assert agree(texts, target_law)
    assert not agree(texts, draft_law)  # the check can fail
    assert not agree([[*text[:2], text[1]] for text in texts], target_law)
    assert num_accepted > NUM_SEEDS / 4  # or nothing speculative was tried


@pytest.fixture(scope="module", params=["llama", "qwen2-sliding", "gemma3", "gpt2"])
def pair(
    request: pytest.FixtureRequest, tiny_model_path: Callable[[str], Path]
) -> Iterator[tuple[TargetWorker, DraftWorker]]:
    folder = tiny_model_path(request.param)
    with workers(folder, folder, [0]) as made:
        yield made


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.3, seed=1),
    SamplingParams(temperature=0.8, top_k=20, seed=2),
    SamplingParams(temperature=1.0, top_p=0.9, seed=3),
]


def fresh_readers() -> list[Reader]:
    prompts = [[(n * n + s) % 256 for n in range(length)] for s, length in enumerate((5, 60, 130, 1))]
    return [Reader(f"r{n}", params, prompts[n]) for n, params in enumerate(PARAMS)]


async def test_the_tokens_do_not_depend_on_k_or_company(pair: tuple[TargetWorker, DraftWorker]) -> None:
    plain = [(await decode(*pair, [reader], k=0, count=24))[0] for reader in fresh_readers()]
    num_accepted = 0
    for k in (1, 4, 8):
        together = fresh_readers()
        assert await decode(*pair, together, k=k, count=24) == plain
        num_accepted += sum(reader.num_accepted for reader in together)
        for index in (1, 2):
            alone = fresh_readers()[index : index + 1]
            assert await decode(*pair, alone, k=k, count=24) == [plain[index]]
    assert num_accepted > 0


async def test_concurrent_callers_get_what_they_get_alone(pair: tuple[TargetWorker, DraftWorker]) -> None:
    plain = [(await decode(*pair, [reader], k=0, count=16))[0] for reader in fresh_readers()]
    tasks = [decode(*pair, [reader], k=k, count=16) for reader, k in zip(fresh_readers(), (0, 2, 3, 5), strict=True)]
    assert [tokens for (tokens,) in await asyncio.gather(*tasks)] == plain


@pytest.mark.parametrize("name", ["llama", "gemma3"])
async def test_plain_tokens_are_the_formulas(name: str, tiny_model_path: Callable[[str], Path]) -> None:
    folder = tiny_model_path(name)
    model = load_reference(folder, "float16")
    with workers(folder, folder, [0]) as made:
        decoded = await decode(*made, fresh_readers(), k=3, count=12)
    for reader, tokens in zip(fresh_readers(), decoded, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([reader.prompt + tokens])).logits[0, len(reader.prompt) - 1 : -1, :258]
        expected = [
            oracles.choose(row, reader.params, len(reader.prompt) + n) for n, row in enumerate(logits.double().tolist())
        ]
        assert tokens == expected
