"""Attention of a ragged batch over the KV blocks, behind transformers' attention interface.

The model calls `paged_attention` in every layer. It stores the new keys and values in the block pool, then asks
the forward's `AttentionPlan` for the outputs. Two kernels make plans: `specdec.runner.exact_attention` (CPU;
reproducible to the bit) and `specdec.runner.gather_attention` (CUDA; PyTorch's fused attention).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from specdec.cache.storage import KVShape, KVStorage
from specdec.errors import UnsupportedModelError
from specdec.runner.batch import RaggedBatch

ATTENTION_NAME = "specdec_paged"


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What one layer asks of attention.

    Attributes:
        scaling: of the scores.
        window: a query sees its own position and the ``window - 1`` before it; None sees all.
        softcap: scores are squashed into (-softcap, softcap); None leaves them.
    """

    scaling: float
    window: int | None
    softcap: float | None


class AttentionPlan(Protocol):
    """One forward's attention: where its tokens stand and which keys they see, prepared for all layers."""

    def attend(self, heads: Tensor, num_heads: int, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        """Store a layer's new keys and values in the pool, then attend.

        Args:
            heads: [padded tokens, num_heads + 2 * num_kv_heads, head_dim], contiguous: each token's queries, keys and
                values, in the order of the batch.
            keys, values: the layer's part of the pool, from the kernel's own `KVStorage`.

        Returns:
            [padded tokens, num_heads, head_dim]; rows of padding are zero.
        """


class AttentionKernel(Protocol):
    """A way to compute attention over the pool."""

    def make_storage(self, shape: KVShape, num_blocks: int) -> KVStorage:
        """A pool laid out as this kernel reads it."""

    def plan(self, batch: RaggedBatch) -> AttentionPlan:
        """Prepare the attention of one forward."""


@dataclass(slots=True)
class AttentionStep:
    """What a forward carries through the model to its attention layers.

    Attributes:
        num_calls: attention layers run so far, so that a model which loses the step on the way is noticed.
    """

    batch: RaggedBatch
    storage: KVStorage
    plan: AttentionPlan
    num_calls: int = 0

    def attend(self, layer: int, heads: Tensor, num_heads: int, options: AttentionOptions) -> Tensor:
        """Attention of one layer; arguments and result as for `AttentionPlan.attend`."""
        self.num_calls += 1
        return self.plan.attend(heads, num_heads, self.storage.keys[layer], self.storage.values[layer], options)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    specdec_step: AttentionStep | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The function transformers calls in every attention layer.

    Args:
        query: [1, num_heads, padded tokens, head_dim].
        key, value: [1, num_kv_heads, padded tokens, head_dim].
        attention_mask: None; the step knows which keys a query sees.

    Returns:
        [1, padded tokens, num_heads, head_dim], and no weights.
    """
    if specdec_step is None:
        raise UnsupportedModelError("the model does not pass keyword arguments on to its attention layers")
    if attention_mask is not None:
        raise UnsupportedModelError("the model makes an attention mask of its own, which is not supported")
    if kwargs.get("s_aux") is not None:
        raise UnsupportedModelError("attention sinks are not supported")
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise UnsupportedModelError("the model's attention layers have no layer_idx")
    options = AttentionOptions(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    heads = torch.cat([query[0], key[0], value[0]]).transpose(0, 1).contiguous()
    return specdec_step.attend(layer, heads, query.shape[1], options).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
