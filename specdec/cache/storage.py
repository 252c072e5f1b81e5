"""The tensors behind the KV blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.cache.blocks import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token's KV looks like.

    Attributes:
        num_layers, num_kv_heads, head_dim: of the model.
        dtype: of the stored keys and values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BLOCK_SIZE * self.dtype.itemsize


class KVStorage:
    """Keys and values of all blocks.

    Attributes:
        keys, values: one view per layer, [num_blocks, num_kv_heads, BLOCK_SIZE, head_dim]. A block of a layer is
            contiguous, so a run of neighbouring blocks is a view.
    """

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device) -> None:
        self._shape = shape
        self._num_blocks = num_blocks
        size = (2, num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        # Zeros, not empty memory: masked positions are multiplied by 0, and 0 * NaN is NaN.
        layers = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]
        self.keys = [layer[0] for layer in layers]
        self.values = [layer[1] for layer in layers]
        # Every head of every position is a row; keys come before values.
        self._rows = [layer.view(-1, shape.head_dim) for layer in layers]

    def slots(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Where the keys and values of some tokens are stored, in any layer; for `write`.

        Args:
            blocks, offsets: int64 [num_tokens], each token's block and its place in it.

        Returns:
            int64 [num_tokens * 2 * num_kv_heads].
        """
        num_heads = self._shape.num_kv_heads
        heads = torch.arange(num_heads, device=blocks.device) * BLOCK_SIZE
        keys = (blocks * (num_heads * BLOCK_SIZE) + offsets)[:, None] + heads
        return torch.cat([keys, keys + self._num_blocks * num_heads * BLOCK_SIZE], dim=1).flatten()

    def write(self, layer: int, keys_values: Tensor, slots: Tensor) -> None:
        """Store the keys and values of some tokens of one layer.

        Args:
            keys_values: [num_tokens, 2 * num_kv_heads, head_dim], a token's keys before its values.
            slots: from `slots`.
        """
        self._rows[layer].index_copy_(0, slots, keys_values.reshape(-1, self._shape.head_dim))
