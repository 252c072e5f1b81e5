"""One forward's worth of tokens, from many sequences, in one flat row.

Sequences are not padded to each other: the tokens of all of them stand one after another, each with its own
position, its own place in the KV cache, and its own range of visible keys.

    sequence        A A A A A   B   C C C C C C C C      5 rows to verify, 1 to decode, 8 to prefill
    position        9 ... 13   77   0 ...         7
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.cache.blocks import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The tokens of one sequence to compute in a forward.

    Attributes:
        token_ids: at least one.
        start: absolute position of the first; KV of all earlier positions is in the cache.
        blocks: the sequence's block table; covers ``start + len(token_ids)`` positions.
        num_logits: logits are wanted for this many of the last tokens.
    """

    token_ids: list[int]
    start: int
    blocks: list[int]
    num_logits: int

    @property
    def end(self) -> int:
        """Position after the last token: the number of keys the last token sees."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The tensors of one forward.

    Attributes:
        sequences: in the order of the flat row.
        num_tokens: real tokens; ``input_ids`` may hold padding after them, whose KV is not stored.
        input_ids, position_ids: int64 [1, padded tokens].
        blocks, offsets: int64 [num_tokens], where each token's KV goes.
        logit_rows: int64 [logits wanted], indices into the flat row.
    """

    sequences: list[SequenceRows]
    num_tokens: int
    input_ids: Tensor
    position_ids: Tensor
    blocks: Tensor
    offsets: Tensor
    logit_rows: Tensor


def build_batch(sequences: list[SequenceRows], *, padded_tokens: int, device: torch.device) -> RaggedBatch:
    """Lay out the tokens of a forward.

    Args:
        padded_tokens: length of the flat row; at least the number of tokens.
    """
    ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    logit_rows: list[int] = []
    for rows in sequences:
        ids += rows.token_ids
        positions += range(rows.start, rows.end)
        blocks += [rows.blocks[position // BLOCK_SIZE] for position in range(rows.start, rows.end)]
        logit_rows += range(len(ids) - rows.num_logits, len(ids))
    num_tokens = len(ids)
    flat = [
        ids + [0] * (padded_tokens - num_tokens),
        positions + [0] * (padded_tokens - num_tokens),
        blocks + [0] * (padded_tokens - num_tokens),
    ]
    packed = torch.tensor(flat, device=device)
    return RaggedBatch(
        sequences=sequences,
        num_tokens=num_tokens,
        input_ids=packed[0:1],
        position_ids=packed[1:2],
        blocks=packed[2, :num_tokens],
        offsets=packed[1, :num_tokens] % BLOCK_SIZE,
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
    )
