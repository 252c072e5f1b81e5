"""Attention on CPU whose results do not depend, to the last bit, on what else is computed with them.

Softmax attention is a sum over keys, and floating-point sums depend on their order. Here the order is fixed by
the absolute positions alone: every product spans exactly one block of keys (masked where a query sees less), the
products of a run of neighbouring blocks are one batched product over a view of the pool, and the sums over blocks
are taken in a binary tree over the absolute block index. The zeros of masked blocks are exact, so a query gets
the same bits alone, in a batch, in a prefill chunk of any size, and with more or fewer blocks after its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.cache.blocks import BLOCK_SIZE, contiguous_runs
from specdec.runner.attention import AttentionOptions
from specdec.runner.batch import RaggedBatch, SequenceRows
from specdec.runner.rows import SafeRows, find_safe_rows

# Queries of a prompt are computed in tiles: a tile's scores stay in cache, and it skips the keys after it.
_TILE_QUERIES = 64


class ExactAttention:
    """Makes `ExactPlan` objects.

    Args:
        num_groups: query heads that share a key head.
        head_dim: of the model.
    """

    def __init__(self, num_groups: int, head_dim: int) -> None:
        self._safe_rows = find_safe_attention_rows(num_groups, head_dim)

    def plan(self, batch: RaggedBatch) -> ExactPlan:
        """Prepare the attention of one forward."""
        return ExactPlan(batch, self._safe_rows)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some consecutive queries of one sequence: ``count`` of them from position ``start``, at ``first`` in the flat
    row.
    """

    rows: SequenceRows
    first: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class _View:
    """What a tile reads, for one window: runs of (first block, number of blocks), their number in all, the absolute
    index of the first, and the mask of the last ones, [blocks, 1, padded rows, BLOCK_SIZE].
    """

    runs: list[tuple[int, int]]
    num_blocks: int
    first_index: int
    mask: Tensor


class ExactPlan:
    """The attention of one forward; tiles and masks are shared by its layers."""

    def __init__(self, batch: RaggedBatch, safe_rows: SafeRows) -> None:
        self._batch = batch
        self._safe_rows = safe_rows
        self._tiles: list[_Tile] = []
        self._views: dict[int | None, list[_View]] = {}

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        num_heads, num_tokens, head_dim = queries.shape
        num_kv_heads = keys.shape[1]
        num_groups = num_heads // num_kv_heads
        if not self._tiles:
            self._tiles = _make_tiles(self._batch, min(_TILE_QUERIES, self._safe_rows.max_rows // num_groups))
        if options.window not in self._views:
            self._views[options.window] = [self._view(tile, num_groups, options.window) for tile in self._tiles]
        if options.scaling != 1.0:
            queries = queries * options.scaling
        # One matrix per block and key head; the heads that share a key head are rows of one product.
        queries = queries.unflatten(0, (num_kv_heads, num_groups))
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        outputs = queries.new_zeros(num_tokens, num_heads, head_dim)
        for tile, view in zip(self._tiles, self._views[options.window], strict=True):
            span = slice(tile.first, tile.first + tile.count)
            rows = queries[:, :, span].flatten(1, 2)
            result = self._attend_tile(rows, keys, values, view, options.softcap)
            outputs[span] = result.unflatten(1, (num_groups, tile.count)).flatten(0, 1).transpose(0, 1)
        return outputs

    def _attend_tile(
        self, queries: Tensor, keys: Tensor, values: Tensor, view: _View, softcap: float | None
    ) -> Tensor:
        """Map queries [kv_heads, rows, head_dim] to outputs of the same shape, given keys and values as
        [num_blocks * kv_heads, BLOCK_SIZE, head_dim].
        """
        num_kv_heads, num_rows, head_dim = queries.shape
        padding = self._safe_rows.pad(num_rows) - num_rows
        if padding:
            queries = torch.nn.functional.pad(queries, (0, 0, 0, padding))
        queries = queries.repeat(view.num_blocks, 1, 1)
        spans = [slice(block * num_kv_heads, (block + length) * num_kv_heads) for block, length in view.runs]
        shape = (view.num_blocks, num_kv_heads, num_rows + padding, -1)
        if len(spans) == 1:
            scores = torch.bmm(queries, keys[spans[0]].mT)
        else:
            scores = torch.cat(
                [torch.bmm(part, keys[span].mT) for part, span in zip(_split(queries, spans), spans, strict=True)]
            )
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        by_block = scores.view(shape)
        by_block[-view.mask.shape[0] :] += view.mask
        by_block.sub_(by_block.amax(dim=(0, 3), keepdim=True)).exp_()
        if len(spans) == 1:
            products = torch.bmm(scores, values[spans[0]])
        else:
            products = torch.cat(
                [torch.bmm(part, values[span]) for part, span in zip(_split(scores, spans), spans, strict=True)]
            )
        # Numerator and denominator, side by side, are summed together.
        sums = tree_sum(torch.cat([products.view(shape), by_block.sum(-1, keepdim=True)], dim=-1), view.first_index)
        return (sums[..., :head_dim] / sums[..., head_dim:])[:, :num_rows]

    def _view(self, tile: _Tile, num_groups: int, window: int | None) -> _View:
        first_seen = 0 if window is None else max(0, tile.start - window + 1)
        first_block, last_block = first_seen // BLOCK_SIZE, (tile.start + tile.count - 1) // BLOCK_SIZE
        # Without a window, every query of the tile sees the blocks before its first query's whole.
        first_masked = first_block if window is not None else tile.start // BLOCK_SIZE
        key_positions = torch.arange(first_masked * BLOCK_SIZE, (last_block + 1) * BLOCK_SIZE)
        # Rows are ordered by (head of the group, query); padding rows see what the last query sees.
        row_positions = torch.arange(tile.start, tile.start + tile.count).repeat(num_groups)
        padding = self._safe_rows.pad(len(row_positions)) - len(row_positions)
        row_positions = torch.cat([row_positions, row_positions[-1:].expand(padding)])[:, None]
        hidden = key_positions > row_positions
        if window is not None:
            hidden |= key_positions <= row_positions - window
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        return _View(
            runs=contiguous_runs(tile.rows.blocks[first_block : last_block + 1]),
            num_blocks=last_block + 1 - first_block,
            first_index=first_block,
            mask=mask.view(len(row_positions), -1, BLOCK_SIZE).transpose(0, 1).unsqueeze(1).contiguous(),
        )


def _make_tiles(batch: RaggedBatch, size: int) -> list[_Tile]:
    """Cut every sequence's queries into tiles of at most ``size``."""
    tiles, first = [], 0
    for rows in batch.sequences:
        num_tokens = len(rows.token_ids)
        for offset in range(0, num_tokens, size):
            tiles.append(_Tile(rows, first + offset, rows.start + offset, min(size, num_tokens - offset)))
        first += num_tokens
    return tiles


def _split(matrices: Tensor, spans: list[slice]) -> tuple[Tensor, ...]:
    """Cut a batch of matrices into those of each run."""
    return torch.split(matrices, [span.stop - span.start for span in spans])


def tree_sum(terms: Tensor, first_index: int) -> Tensor:
    """Sum over dim 0 in a binary tree fixed by the absolute index of each term.

    Args:
        terms: [n, ...]; term j has the absolute index ``first_index + j``. Terms that are absent count as zero,
            which is exact: the bits are the same whether zero terms are present or not.
    """
    while terms.shape[0] > 1:
        if first_index % 2:
            terms = torch.cat([torch.zeros_like(terms[:1]), terms])
        if terms.shape[0] % 2:
            terms = torch.cat([terms, torch.zeros_like(terms[:1])])
        terms = terms[0::2] + terms[1::2]
        first_index //= 2
    return terms[0]


def find_safe_attention_rows(num_groups: int, head_dim: int) -> SafeRows:
    """Row counts at which the products with one block have reproducible rows on this processor."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randn(6, BLOCK_SIZE, head_dim, generator=generator)
    most = num_groups * _TILE_QUERIES
    candidates = sorted({*range(1, min(most, 33)), *range(40, most + 1, 8), most})

    def scores(rows: Tensor) -> Tensor:
        return torch.bmm(rows.repeat(len(blocks), 1, 1), blocks.mT)[-1]

    def outputs(rows: Tensor) -> Tensor:
        return torch.bmm(rows.repeat(len(blocks), 1, 1), blocks)[-1]

    return find_safe_rows([(scores, head_dim), (outputs, BLOCK_SIZE)], candidates)
