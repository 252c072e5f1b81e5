"""Feeding token sequences to a runner, in pieces."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.cache.blocks import BlockPool, num_blocks_for
from specdec.runner.batch import SequenceRows
from specdec.runner.model import ModelRunner


@dataclass
class Fed:
    """A sequence on its way through a runner.

    Attributes:
        logits: of the tokens fed so far.
    """

    token_ids: list[int]
    blocks: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.logits)

    @property
    def rest(self) -> int:
        return len(self.token_ids) - self.length


def feed(runner: ModelRunner, parts: Sequence[tuple[Fed, int]], pool: BlockPool) -> None:
    """One forward: the next ``count`` tokens of each sequence."""
    rows = []
    for fed, count in parts:
        pool.extend(fed.blocks, num_blocks_for(fed.length + count))
        rows.append(SequenceRows(fed.token_ids[fed.length : fed.length + count], fed.length, fed.blocks, count))
    logits = iter(runner.forward(rows))
    for fed, count in parts:
        fed.logits += [next(logits) for _ in range(count)]


def logits_in_pieces(runner: ModelRunner, token_ids: list[int], sizes: Iterator[int]) -> Tensor:
    """Logits of every token of a sequence that is alone in its forwards; the last size is used as far as needed."""
    fed, pool = Fed(token_ids), BlockPool(runner.num_blocks)
    while fed.rest:
        feed(runner, [(fed, min(next(sizes), fed.rest, runner.max_tokens))], pool)
    return torch.stack(fed.logits)


def logits_in_company(runner: ModelRunner, sequences: list[list[int]], seed: int) -> list[Tensor]:
    """Logits of every token of several sequences, fed in random pieces in random company."""
    choice, pool = random.Random(seed), BlockPool(runner.num_blocks)
    all_fed = [Fed(token_ids) for token_ids in sequences]
    while unfinished := [fed for fed in all_fed if fed.rest]:
        parts, budget = [], runner.max_tokens
        for fed in choice.sample(unfinished, choice.randint(1, len(unfinished))):
            count = min(choice.choice([1, 1, 2, 5, 9, 33, 70]), fed.rest, budget)
            if count:
                parts.append((fed, count))
                budget -= count
        feed(runner, parts, pool)
    return [torch.stack(fed.logits) for fed in all_fed]
