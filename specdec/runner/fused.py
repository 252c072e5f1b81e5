"""Decoder layers with fewer, larger operations, for CPU.

At one token a step, half the time of a small model goes into dispatching operations, not into arithmetic. Most decoders
share one shape of layer: a norm, attention with rotary positions, a residual, a norm, a gated MLP, a residual.
`FusedDecoderLayer` computes that with four products (q, k and v are one, gate and up are one) and a handful of compiled
kernels between them.

Nothing is assumed of a model: `fuse_layers` tries the fused layer against the original on random input, and keeps the
original where they differ.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.cache.blocks import BLOCK_SIZE
from specdec.cache.storage import KVShape
from specdec.runner import kernels
from specdec.runner.attention import AttentionKernel, AttentionOptions, AttentionPlan, AttentionStep
from specdec.runner.batch import SequenceRows, build_batch
from specdec.runner.linears import make_linear

logger = logging.getLogger(__name__)

HFModule = Any
"""A module of transformers': its submodules are found by name, which no type tells."""

_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")
# Both layers round alike up to the order of a few sums; a layer of another kind differs in the first digits.
_TOLERANCE = 1e-4
_NUM_TRIAL_TOKENS = 12


class FusedDecoderLayer(nn.Module):
    """A pre-norm decoder layer with rotary attention and a gated MLP; takes the place of transformers' own.

    Args:
        layer: the original.
        options: what the original asks of attention.
        packed: pack the products' weights as fp16.
    """

    def __init__(self, layer: HFModule, options: AttentionOptions, *, packed: bool) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = attention.layer_idx
        self._head_dim: int = attention.head_dim
        self._num_heads = attention.q_proj.out_features // self._head_dim
        self._num_kv_heads = attention.k_proj.out_features // self._head_dim
        self.qkv_proj = make_linear([attention.q_proj, attention.k_proj, attention.v_proj], packed=packed)
        self.o_proj = make_linear([attention.o_proj], packed=packed)
        self.gate_up_proj = make_linear([mlp.gate_proj, mlp.up_proj], packed=packed)
        self.down_proj = make_linear([mlp.down_proj], packed=packed)
        self.input_norm = _Norm(layer.input_layernorm)
        self.post_attention_norm = _Norm(layer.post_attention_layernorm)
        self.q_norm = _Norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.k_norm = _Norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self._options = options

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        specdec_step: AttentionStep,
        **_: object,
    ) -> Tensor:
        """Map [1, tokens, hidden] to the same shape; arguments as transformers passes them to a layer."""
        cos, sin = position_embeddings
        hidden: Tensor = hidden_states[0]
        heads = self.qkv_proj(self.input_norm(hidden)).view(len(hidden), -1, self._head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            keys_end = self._num_heads + self._num_kv_heads
            heads[:, : self._num_heads] = self.q_norm(heads[:, : self._num_heads])
            heads[:, self._num_heads : keys_end] = self.k_norm(heads[:, self._num_heads : keys_end])
        kernels.rotate(heads.numpy(), self._num_heads + self._num_kv_heads, cos[0].numpy(), sin[0].numpy())
        attended = specdec_step.attend(self.layer_idx, heads, self._num_heads, self._options)
        hidden = hidden + self.o_proj(attended.flatten(1))
        gate_up = self.gate_up_proj(self.post_attention_norm(hidden))
        activated = gate_up.new_empty(len(hidden), gate_up.shape[1] // 2)
        kernels.silu_and_multiply(gate_up.numpy(), activated.numpy())
        hidden.add_(self.down_proj(activated))
        return hidden.unsqueeze(0)


class _Norm:
    """Root-mean-square norm over the last dimension."""

    def __init__(self, norm: HFModule) -> None:
        self._weight = norm.weight.detach().float().contiguous().numpy()
        self._eps = float(getattr(norm, "variance_epsilon", None) or norm.eps)

    def __call__(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        outputs = torch.empty_like(rows)
        kernels.rms_norm(rows.numpy(), self._weight, self._eps, outputs.numpy())
        return outputs.view(inputs.shape)


@torch.inference_mode()
def fuse_layers(model: PreTrainedModel, attention: AttentionKernel, *, packed: bool) -> int:
    """Replace a model's decoder layers by fused ones, in place, where those compute the same; how many.

    Args:
        model: with our attention function, its linears not packed.
        attention: the kernel to try the layers with.
        packed: as for `FusedDecoderLayer`.
    """
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    rotary = getattr(decoder, "rotary_emb", None)
    if not isinstance(layers, nn.ModuleList) or rotary is None:
        return 0
    num_fused = 0
    for index, layer in enumerate(layers):
        if not _has_parts(layer):
            continue
        trial = _Trial(layer, model.config.get_text_config().hidden_size, rotary, attention)
        wanted = trial.run(layer)
        fused = FusedDecoderLayer(layer, trial.options(), packed=False)
        if torch.allclose(wanted, trial.run(fused), rtol=_TOLERANCE, atol=_TOLERANCE * float(wanted.abs().max())):
            layers[index] = FusedDecoderLayer(layer, trial.options(), packed=packed)
            num_fused += 1
    logger.info("%d of %d decoder layers are fused", num_fused, len(layers))
    return num_fused


def _has_parts(layer: HFModule) -> bool:
    """Whether a layer has the modules, and only the modules, that the fused one is made of."""
    if {name for name, _ in layer.named_children()} != set(_PARTS):
        return False
    attention, mlp = dict(layer.self_attn.named_children()), dict(layer.mlp.named_children())
    linears = [attention.get(name) for name in _ATTENTION_PARTS] + [mlp.get(name) for name in _MLP_PARTS[:-1]]
    norms = {"q_norm", "k_norm"}
    return (
        all(isinstance(linear, nn.Linear) for linear in linears)
        and set(attention) - norms == set(_ATTENTION_PARTS)
        and len(norms & set(attention)) in (0, 2)
        and set(mlp) == set(_MLP_PARTS)
        and all(hasattr(layer.self_attn, name) for name in ("layer_idx", "head_dim", "scaling"))
        and all(hasattr(norm, "weight") for norm in (layer.input_layernorm, layer.post_attention_layernorm))
    )


class _Trial:
    """Runs layers on the same random input, each over a KV pool of its own."""

    def __init__(self, layer: HFModule, hidden_size: int, rotary: HFModule, kernel: AttentionKernel) -> None:
        attention = layer.self_attn
        self._layer_idx: int = attention.layer_idx
        num_kv_heads = attention.k_proj.out_features // attention.head_dim
        self._shape = KVShape(self._layer_idx + 1, num_kv_heads, attention.head_dim, torch.float32)
        self._kernel = kernel
        self._rotary = rotary
        generator = torch.Generator().manual_seed(self._layer_idx)
        self._hidden = torch.randn(1, _NUM_TRIAL_TOKENS, hidden_size, generator=generator)
        self._options: list[AttentionOptions] = []

    def run(self, layer: HFModule) -> Tensor:
        """A layer's output, [1, tokens, hidden]."""
        # Across the border of two blocks, and not from position 0, where a rotation changes nothing.
        rows = SequenceRows([0] * _NUM_TRIAL_TOKENS, BLOCK_SIZE - _NUM_TRIAL_TOKENS // 2, [0, 1], 0)
        batch = build_batch([rows], padded_tokens=_NUM_TRIAL_TOKENS, device=torch.device("cpu"))
        plan = _RecordingPlan(self._kernel.plan(batch), self._options)
        storage = self._kernel.make_storage(self._shape, num_blocks=2)
        output = layer(
            self._hidden.clone(),
            attention_mask=None,
            position_ids=batch.position_ids,
            position_embeddings=self._rotary(self._hidden, position_ids=batch.position_ids),
            use_cache=False,
            specdec_step=AttentionStep(batch, storage, plan),
        )
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    def options(self) -> AttentionOptions:
        """What the layer that ran first asked of attention."""
        return self._options[0]


class _RecordingPlan:
    """A plan that notes what it is asked for."""

    def __init__(self, plan: AttentionPlan, options: list[AttentionOptions]) -> None:
        self._plan = plan
        self._options = options

    def attend(self, heads: Tensor, num_heads: int, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        self._options.append(options)
        return self._plan.attend(heads, num_heads, keys, values, options)
