"""Attention on CPU whose results do not depend, to the last bit, on what else is computed with them.

Softmax attention is a sum over keys, and floating-point sums depend on their order. Here every query visits its own
keys in the order of their positions, block by block, by the same instructions
(`specdec.runner.attention_kernels.attend`). So it gets the same bits alone, in a batch, in a prefill chunk of any size,
and wherever its blocks lie. Blocks are read in place; nothing is copied.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specdec.cache.storage import KVShape, KVStorage
from specdec.runner import attention_kernels
from specdec.runner.attention import AttentionOptions
from specdec.runner.batch import RaggedBatch


class ExactAttention:
    """Makes `ExactPlan` objects; float32 on CPU."""

    def make_storage(self, shape: KVShape, num_blocks: int) -> KVStorage:
        """A pool whose keys are columns: the scores of a block are computed for all its keys side by side."""
        return KVStorage(shape, num_blocks, torch.device("cpu"), keys_as_columns=True)

    def plan(self, batch: RaggedBatch) -> ExactPlan:
        """Prepare the attention of one forward."""
        return ExactPlan(batch)


class ExactPlan:
    """The attention of one forward."""

    def __init__(self, batch: RaggedBatch) -> None:
        sequences = batch.sequences
        self._num_tokens = batch.num_tokens
        self._blocks, self._offsets = batch.blocks.numpy(), batch.offsets.numpy()
        self._starts = np.array([rows.start for rows in sequences], np.int64)
        self._counts = np.array([len(rows.token_ids) for rows in sequences], np.int64)
        self._tables = np.zeros((len(sequences), max(len(rows.blocks) for rows in sequences)), np.int64)
        for index, rows in enumerate(sequences):
            self._tables[index, : len(rows.blocks)] = rows.blocks

    def attend(self, heads: Tensor, num_heads: int, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        new, pool = heads.numpy(), (keys.numpy(), values.numpy())
        attention_kernels.store_keys_values(new, num_heads, *pool, self._blocks, self._offsets)
        outputs = heads.new_empty(len(heads), num_heads, heads.shape[2])
        outputs[self._num_tokens :] = 0.0
        attention_kernels.attend(
            new,
            num_heads,
            *pool,
            self._tables,
            self._starts,
            self._counts,
            options.scaling,
            options.window or 0,
            options.softcap or 0.0,
            outputs.numpy(),
        )
        return outputs
