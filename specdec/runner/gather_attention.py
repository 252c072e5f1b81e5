"""Attention for CUDA: blocks gathered into one padded batch, then PyTorch's fused attention.

Equal to `specdec.runner.exact_attention` up to rounding; not reproducible to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specdec.cache.blocks import BLOCK_SIZE, num_blocks_for
from specdec.cache.storage import KVShape, KVStorage
from specdec.errors import UnsupportedModelError
from specdec.runner.attention import AttentionOptions
from specdec.runner.batch import RaggedBatch


class GatherAttention:
    """Makes `GatherPlan` objects for one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def make_storage(self, shape: KVShape, num_blocks: int) -> KVStorage:
        """A pool whose keys are rows, as PyTorch's attention takes them."""
        return KVStorage(shape, num_blocks, self._device)

    def plan(self, batch: RaggedBatch) -> GatherPlan:
        """Prepare the attention of one forward."""
        return GatherPlan(batch)


class GatherPlan:
    """The attention of one forward, as a batch of sequences padded to the longest.

    The block tables, each token's place in the padded batch and the visible keys are laid out once, on the device.
    """

    def __init__(self, batch: RaggedBatch) -> None:
        sequences, device = batch.sequences, batch.input_ids.device
        self._num_sequences = len(sequences)
        self._blocks, self._offsets = batch.blocks, batch.offsets
        self._max_queries = max(len(rows.token_ids) for rows in sequences)
        tables = [rows.blocks[: num_blocks_for(rows.end)] for rows in sequences]
        max_blocks = max(len(table) for table in tables)
        self._tables = torch.tensor([table + [0] * (max_blocks - len(table)) for table in tables], device=device)
        places = [i * self._max_queries + j for i, rows in enumerate(sequences) for j in range(len(rows.token_ids))]
        self._places = torch.tensor(places, device=device)
        starts = torch.tensor([rows.start for rows in sequences], device=device)
        self._query_positions = starts[:, None, None] + torch.arange(self._max_queries, device=device)[None, :, None]
        self._key_positions = torch.arange(max_blocks * BLOCK_SIZE, device=device)[None, None, :]
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, heads: Tensor, num_heads: int, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        if options.softcap is not None:
            raise UnsupportedModelError("soft-capped attention scores need device: cpu")
        num_kv_heads, head_dim = keys.shape[1], heads.shape[2]
        queries, new_keys, new_values = heads[: len(self._places)].split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        keys[self._blocks, :, self._offsets] = new_keys
        values[self._blocks, :, self._offsets] = new_values
        padded = heads.new_zeros(self._num_sequences * self._max_queries, num_heads, head_dim)
        padded[self._places] = queries
        outputs = scaled_dot_product_attention(
            padded.view(self._num_sequences, self._max_queries, num_heads, head_dim).transpose(1, 2),
            self._gather(keys),
            self._gather(values),
            attn_mask=self._mask(options.window),
            scale=options.scaling,
            enable_gqa=num_kv_heads != num_heads,
        )
        result = heads.new_zeros(len(heads), num_heads, head_dim)
        result[: len(self._places)] = outputs.transpose(1, 2).flatten(0, 1)[self._places]
        return result

    def _gather(self, layer: Tensor) -> Tensor:
        """A layer of the pool as [sequences, kv_heads, keys, head_dim]."""
        return layer[self._tables].transpose(1, 2).flatten(2, 3)

    def _mask(self, window: int | None) -> Tensor:
        """Visible keys, bool [sequences, 1, queries, keys]."""
        if window not in self._masks:
            visible = self._key_positions <= self._query_positions
            if window is not None:
                visible = visible & (self._key_positions > self._query_positions - window)
            self._masks[window] = visible.unsqueeze(1)
        return self._masks[window]
