"""Compiled attention for the CPU: see `specdec.runner.exact_attention` for what it guarantees, and
`specdec.runner.kernels` for how it is compiled.
"""

from __future__ import annotations

import math

import numpy as np

from specdec.cache.blocks import BLOCK_SIZE
from specdec.runner.kernels import LANES, F, Floats, Ints, Scalar, compiled, exp, sum_lanes

# Rows of queries that go through a block of keys together. Fewer rows than this are filled up with copies of the
# last, so that every row goes through the same instructions.
_TILE_ROWS = 4


@compiled
def store_keys_values(heads: Floats, num_heads: int, keys: Floats, values: Floats, blocks: Ints, offsets: Ints) -> None:
    """Put the keys and values of new tokens into their blocks.

    Args:
        heads: [at least num_tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values.
        keys: [num_blocks, num_kv_heads, head_dim, BLOCK_SIZE], a key is a column.
        values: [num_blocks, num_kv_heads, BLOCK_SIZE, head_dim].
        blocks, offsets: [num_tokens].
    """
    num_kv_heads, head_dim = keys.shape[1], keys.shape[2]
    for token in range(blocks.shape[0]):
        block, offset = blocks[token], offsets[token]
        for head in range(num_kv_heads):
            for index in range(head_dim):
                keys[block, head, index, offset] = heads[token, num_heads + head, index]
                values[block, head, offset, index] = heads[token, num_heads + num_kv_heads + head, index]


@compiled
def attend(
    heads: Floats,
    num_heads: int,
    keys: Floats,
    values: Floats,
    tables: Ints,
    starts: Ints,
    counts: Ints,
    scaling: float,
    window: int,
    softcap: float,
    outputs: Floats,
) -> None:
    """Attention of all queries of a ragged batch over the blocks of their sequences.

    Keys are visited block by block with a running maximum and sum (online softmax; Milakov, Gimelshein, arXiv
    1805.02867).

    Args:
        heads, keys, values: as for `store_keys_values`, which has run.
        tables: [sequences, blocks], each sequence's blocks.
        starts, counts: [sequences], position of the first query, and number of queries.
        window: a query sees its own position and the ``window - 1`` before it; 0 sees all.
        softcap: scores are squashed into (-softcap, softcap); 0 leaves them.
        outputs: [at least num_tokens, num_heads, head_dim].
    """
    num_kv_heads = keys.shape[1]
    num_groups = num_heads // num_kv_heads
    scores = np.empty((_TILE_ROWS, BLOCK_SIZE), np.float32)
    sums = np.empty((_TILE_ROWS, keys.shape[2]), np.float32)
    token_of = np.empty(_TILE_ROWS, np.int64)
    head_of = np.empty(_TILE_ROWS, np.int64)
    positions = np.empty(_TILE_ROWS, np.int64)
    first = 0
    for sequence in range(starts.shape[0]):
        # Rows of queries that meet the same key head: (query, head of the group).
        num_rows = counts[sequence] * num_groups
        for kv_head in range(num_kv_heads):
            for tile in range(0, num_rows, _TILE_ROWS):
                for row in range(_TILE_ROWS):
                    index = min(tile + row, num_rows - 1)
                    token_of[row] = first + index // num_groups
                    head_of[row] = kv_head * num_groups + index % num_groups
                    positions[row] = starts[sequence] + index // num_groups
                _attend_tile(
                    heads, keys, values, tables[sequence], kv_head, token_of, head_of, positions, F(scaling), window,
                    F(softcap), scores, sums, outputs,
                )  # fmt: skip
        first += counts[sequence]


@compiled
def _attend_tile(
    heads: Floats,
    keys: Floats,
    values: Floats,
    table: Ints,
    kv_head: int,
    token_of: Ints,
    head_of: Ints,
    positions: Ints,
    scaling: Scalar,
    window: int,
    softcap: Scalar,
    scores: Floats,
    sums: Floats,
    outputs: Floats,
) -> None:
    """Attention of the rows of a tile; ``scores`` and ``sums`` are room to work in."""
    maxima = np.full(_TILE_ROWS, -np.inf, np.float32)
    totals = np.zeros(_TILE_ROWS, np.float32)
    sums[:] = 0.0
    first_block = 0
    if window > 0:
        first_block = max(0, positions[0] - window + 1) // BLOCK_SIZE
    for block in range(first_block, positions[_TILE_ROWS - 1] // BLOCK_SIZE + 1):
        _score(heads, token_of, head_of, keys[table[block], kv_head], scores)
        for row in range(_TILE_ROWS):
            end = min(BLOCK_SIZE, positions[row] + 1 - block * BLOCK_SIZE)
            begin = 0
            if window > 0:
                begin = max(0, positions[row] - window + 1 - block * BLOCK_SIZE)
            if begin >= end:
                scores[row] = 0.0
                continue
            maximum = _scale_and_mask(scores[row], begin, end, scaling, softcap, maxima[row])
            _exponentiate(scores[row], begin, end, maximum)
            shrink = F(math.exp(maxima[row] - maximum))
            maxima[row] = maximum
            totals[row] = totals[row] * shrink + _sum_block(scores[row])
            for index in range(sums.shape[1]):
                sums[row, index] *= shrink
        _add_values(scores, values[table[block], kv_head], sums)
    for row in range(_TILE_ROWS):
        for index in range(sums.shape[1]):
            outputs[token_of[row], head_of[row], index] = sums[row, index] / totals[row]


@compiled
def _score(heads: Floats, token_of: Ints, head_of: Ints, block: Floats, scores: Floats) -> None:
    """Products of a tile's queries with a block of keys: [_TILE_ROWS, BLOCK_SIZE].

    Four dimensions at a time, so that a score is loaded and stored once for four products.
    """
    head_dim = block.shape[0]
    query0, query1 = heads[token_of[0], head_of[0]], heads[token_of[1], head_of[1]]
    query2, query3 = heads[token_of[2], head_of[2]], heads[token_of[3], head_of[3]]
    scores0, scores1, scores2, scores3 = scores[0], scores[1], scores[2], scores[3]
    scores[:] = 0.0
    for d in range(0, head_dim - head_dim % 4, 4):
        a0, a1, a2, a3 = query0[d], query0[d + 1], query0[d + 2], query0[d + 3]
        b0, b1, b2, b3 = query1[d], query1[d + 1], query1[d + 2], query1[d + 3]
        c0, c1, c2, c3 = query2[d], query2[d + 1], query2[d + 2], query2[d + 3]
        e0, e1, e2, e3 = query3[d], query3[d + 1], query3[d + 2], query3[d + 3]
        for j in range(BLOCK_SIZE):
            k0, k1, k2, k3 = block[d, j], block[d + 1, j], block[d + 2, j], block[d + 3, j]
            scores0[j] = scores0[j] + a0 * k0 + a1 * k1 + a2 * k2 + a3 * k3
            scores1[j] = scores1[j] + b0 * k0 + b1 * k1 + b2 * k2 + b3 * k3
            scores2[j] = scores2[j] + c0 * k0 + c1 * k1 + c2 * k2 + c3 * k3
            scores3[j] = scores3[j] + e0 * k0 + e1 * k1 + e2 * k2 + e3 * k3
    for d in range(head_dim - head_dim % 4, head_dim):
        for j in range(BLOCK_SIZE):
            scores0[j] += query0[d] * block[d, j]
            scores1[j] += query1[d] * block[d, j]
            scores2[j] += query2[d] * block[d, j]
            scores3[j] += query3[d] * block[d, j]


@compiled
def _add_values(weights: Floats, block: Floats, sums: Floats) -> None:
    """Add a block's values, weighted, to the rows' sums: [_TILE_ROWS, head_dim]. Four keys at a time, as `_score`."""
    weights0, weights1, weights2, weights3 = weights[0], weights[1], weights[2], weights[3]
    sums0, sums1, sums2, sums3 = sums[0], sums[1], sums[2], sums[3]
    for j in range(0, BLOCK_SIZE, 4):
        a0, a1, a2, a3 = weights0[j], weights0[j + 1], weights0[j + 2], weights0[j + 3]
        b0, b1, b2, b3 = weights1[j], weights1[j + 1], weights1[j + 2], weights1[j + 3]
        c0, c1, c2, c3 = weights2[j], weights2[j + 1], weights2[j + 2], weights2[j + 3]
        e0, e1, e2, e3 = weights3[j], weights3[j + 1], weights3[j + 2], weights3[j + 3]
        for d in range(block.shape[1]):
            v0, v1, v2, v3 = block[j, d], block[j + 1, d], block[j + 2, d], block[j + 3, d]
            sums0[d] = sums0[d] + a0 * v0 + a1 * v1 + a2 * v2 + a3 * v3
            sums1[d] = sums1[d] + b0 * v0 + b1 * v1 + b2 * v2 + b3 * v3
            sums2[d] = sums2[d] + c0 * v0 + c1 * v1 + c2 * v2 + c3 * v3
            sums3[d] = sums3[d] + e0 * v0 + e1 * v1 + e2 * v2 + e3 * v3


@compiled
def _scale_and_mask(scores: Floats, begin: int, end: int, scaling: Scalar, softcap: Scalar, maximum: Scalar) -> Scalar:
    """Scale a row of scores, hide what is not in [begin, end), and give the new running maximum."""
    for j in range(BLOCK_SIZE):
        scores[j] *= scaling
    if softcap > 0.0:
        for j in range(BLOCK_SIZE):
            scores[j] = F(math.tanh(scores[j] / softcap)) * softcap
    for j in range(begin):
        scores[j] = -np.inf
    for j in range(end, BLOCK_SIZE):
        scores[j] = -np.inf
    lanes = np.empty(LANES, np.float32)
    for lane in range(LANES):
        lanes[lane] = max(
            max(scores[lane], scores[lane + LANES]), max(scores[lane + 2 * LANES], scores[lane + 3 * LANES])
        )
    for lane in range(LANES):
        maximum = max(maximum, lanes[lane])
    return maximum


@compiled
def _exponentiate(scores: Floats, begin: int, end: int, maximum: Scalar) -> None:
    """``exp(score - maximum)``; exactly 0 outside [begin, end)."""
    for j in range(BLOCK_SIZE):
        scores[j] = exp(scores[j] - maximum)
    for j in range(begin):
        scores[j] = 0.0
    for j in range(end, BLOCK_SIZE):
        scores[j] = 0.0


@compiled
def _sum_block(weights: Floats) -> Scalar:
    """Sum of a row of BLOCK_SIZE weights, in a fixed order."""
    lanes = np.empty(LANES, np.float32)
    for lane in range(LANES):
        lanes[lane] = (weights[lane] + weights[lane + LANES]) + (weights[lane + 2 * LANES] + weights[lane + 3 * LANES])
    return sum_lanes(lanes)
