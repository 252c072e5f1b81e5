"""Ragged attention problems, and the textbook solution in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.cache.blocks import num_blocks_for
from specdec.cache.storage import KVShape, KVStorage
from specdec.runner.attention import AttentionKernel, AttentionOptions
from specdec.runner.batch import SequenceRows, build_batch

HEAD_DIM = 16
NUM_BLOCKS = 16


@dataclass(frozen=True)
class Sequence:
    """All queries, keys and values of a sequence, and where its KV is to be put."""

    queries: Tensor  # [length, num_heads, HEAD_DIM]
    keys: Tensor  # [length, num_kv_heads, HEAD_DIM]
    values: Tensor
    blocks: list[int]

    @property
    def length(self) -> int:
        return len(self.queries)

    def moved(self, blocks: list[int]) -> Sequence:
        return replace(self, blocks=blocks)


def make_sequences(lengths: list[int], *, num_heads: int, num_kv_heads: int, scattered: bool) -> list[Sequence]:
    generator = torch.Generator().manual_seed(sum(lengths))
    free = list(range(NUM_BLOCKS))
    if scattered:
        random.Random(1).shuffle(free)
    sequences = []
    for length in lengths:
        blocks, free = free[: num_blocks_for(length)], free[num_blocks_for(length) :]
        queries = 2.0 * torch.randn(length, num_heads, HEAD_DIM, generator=generator)
        keys, values = torch.randn(2, length, num_kv_heads, HEAD_DIM, generator=generator)
        sequences.append(Sequence(queries, keys, values, blocks))
    return sequences


def run(
    kernel: AttentionKernel, parts: list[tuple[Sequence, int, int]], options: AttentionOptions, *, garbage: float = 7.0
) -> list[Tensor]:
    """Outputs [count, num_heads, HEAD_DIM] of the queries ``start`` to ``end`` of each sequence, in one forward.

    What no query may see (later positions, blocks of nobody) holds ``garbage``.
    """
    num_kv_heads = parts[0][0].keys.shape[1]
    storage = kernel.make_storage(KVShape(1, num_kv_heads, HEAD_DIM, torch.float32), NUM_BLOCKS)
    storage.keys[0].fill_(garbage)
    storage.values[0].fill_(garbage)
    forward(kernel, storage, [(sequence, 0, start) for sequence, start, _ in parts if start], options)
    return forward(kernel, storage, parts, options)


def forward(
    kernel: AttentionKernel, storage: KVStorage, parts: list[tuple[Sequence, int, int]], options: AttentionOptions
) -> list[Tensor]:
    """One forward over a pool that holds what comes before; its flat row is padded by two tokens."""
    if not parts:
        return []
    rows = [SequenceRows([0] * (end - start), start, sequence.blocks, 0) for sequence, start, end in parts]
    lengths = [end - start for _, start, end in parts]
    batch = build_batch(rows, padded_tokens=sum(lengths) + 2, device=torch.device("cpu"))
    tokens = [
        torch.cat([part[start:end] for part in (sequence.queries, sequence.keys, sequence.values)], dim=1)
        for sequence, start, end in parts
    ]
    heads = torch.cat([*tokens, torch.full((2, *tokens[0].shape[1:]), float("nan"))]).contiguous()
    num_heads = parts[0][0].queries.shape[1]
    outputs = kernel.plan(batch).attend(heads, num_heads, storage.keys[0], storage.values[0], options)
    assert not outputs[sum(lengths) :].any(), "rows of padding are not zero"
    return list(outputs[: sum(lengths)].split(lengths))


def naive(sequence: Sequence, options: AttentionOptions) -> Tensor:
    """Softmax attention of all queries over all keys at once, in float64."""
    num_groups = sequence.queries.shape[1] // sequence.keys.shape[1]
    keys = sequence.keys.double().repeat_interleave(num_groups, dim=1)
    values = sequence.values.double().repeat_interleave(num_groups, dim=1)
    position, key_position = torch.arange(sequence.length)[:, None], torch.arange(sequence.length)[None, :]
    hidden = key_position > position
    if options.window is not None:
        hidden |= key_position <= position - options.window
    scores = torch.einsum("qhd,khd->hqk", sequence.queries.double(), keys) * options.scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
