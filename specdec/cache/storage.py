"""The tensors behind the KV blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
        keys, values: one tensor per layer, [num_blocks, num_kv_heads, BLOCK_SIZE, head_dim], a block of a layer
            contiguous; with keys as columns, the last two dimensions of ``keys`` are swapped.
        layout: how the numbers of a block lie, in words; part of its key.
    """

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device, *, keys_as_columns: bool = False) -> None:
        self.layout = (
            f"{shape.num_layers} layers of {shape.num_kv_heads} heads of {BLOCK_SIZE} x {shape.head_dim}, "
            f"keys as {'columns' if keys_as_columns else 'rows'}"
        )
        rows = (num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        columns = (num_blocks, shape.num_kv_heads, shape.head_dim, BLOCK_SIZE)
        # Zeros, not empty memory: masked positions are multiplied by 0, and 0 * NaN is NaN.
        self.keys = [
            torch.zeros(columns if keys_as_columns else rows, dtype=shape.dtype, device=device)
            for _ in range(shape.num_layers)
        ]
        self.values = [torch.zeros(rows, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]

    def copy_block(self, source: int, destination: int) -> None:
        """Copy keys and values of a whole block, in all layers."""
        for tensor in (*self.keys, *self.values):
            tensor[destination].copy_(tensor[source])
