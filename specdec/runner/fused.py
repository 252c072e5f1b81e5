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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.cache.blocks import num_blocks_for
from specdec.cache.storage import KVShape, KVStorage
from specdec.runner import kernels
from specdec.runner.attention import AttentionOptions, AttentionStep
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
def fuse_layers(model: PreTrainedModel, *, packed: bool) -> int:
    """Replace a model's decoder layers by fused ones, in place, where those compute the same; how many.

    Args:
        model: with our attention function, its linears not packed.
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
        trial = _Trial(layer, model.config.get_text_config(), rotary)
        wanted = trial.run(layer)
        fused = FusedDecoderLayer(layer, wanted.options, packed=False)
        if wanted.agrees_with(trial.run(fused)):
            layers[index] = FusedDecoderLayer(layer, wanted.options, packed=packed)
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
    """Runs layers on the same random input, at positions over the whole context.

    Attention itself is left out: it is the same code for both. What matters is what a layer asks of it, so the queries,
    keys and values that arrive there are compared, too; behind an average over thousands of keys a difference in them
    would hardly show.
    """

    def __init__(self, layer: HFModule, config: PreTrainedConfig, rotary: HFModule) -> None:
        self._rotary = rotary
        # Never read nor written, but asked for.
        shape = KVShape(layer.self_attn.layer_idx + 1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
        self._storage = KVStorage(shape, num_blocks=1, device=torch.device("cpu"))
        generator = torch.Generator().manual_seed(layer.self_attn.layer_idx)
        self._hidden = torch.randn(1, _NUM_TRIAL_TOKENS, config.hidden_size, generator=generator)
        # Not only from position 0, where a rotation changes nothing. Some models scale by position, but only beyond
        # the length they were first trained for.
        end = int(config.max_position_embeddings)
        self._starts = [max(0, start) for start in (7, end // 8, end // 2, end - _NUM_TRIAL_TOKENS)]

    def run(self, layer: HFModule) -> _Outcome:
        """What a layer makes of the input, at all starts."""
        plan = _RecordingPlan()
        outputs = [self._run_from(layer, start, plan) for start in self._starts]
        return _Outcome(torch.cat(outputs), torch.cat(plan.heads), plan.options)

    def _run_from(self, layer: HFModule, start: int, plan: _RecordingPlan) -> Tensor:
        num_blocks = num_blocks_for(start + _NUM_TRIAL_TOKENS)
        rows = SequenceRows([0] * _NUM_TRIAL_TOKENS, start, [0] * num_blocks, 0)
        batch = build_batch([rows], padded_tokens=_NUM_TRIAL_TOKENS, device=torch.device("cpu"))
        output = layer(
            self._hidden.clone(),
            attention_mask=None,
            position_ids=batch.position_ids,
            position_embeddings=self._rotary(self._hidden, position_ids=batch.position_ids),
            use_cache=False,
            specdec_step=AttentionStep(batch, self._storage, plan),
        )
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a layer computed, and what it asked of attention on the way."""

    outputs: Tensor
    heads: Tensor
    options: AttentionOptions

    def agrees_with(self, other: _Outcome) -> bool:
        """Whether two layers did the same."""
        pairs = ((self.outputs, other.outputs), (self.heads, other.heads))
        return self.options == other.options and all(
            a.shape == b.shape and torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * float(a.abs().max()))
            for a, b in pairs
        )


class _RecordingPlan:
    """Stands in for attention: notes what it is given and passes the queries on."""

    def __init__(self) -> None:
        self.heads: list[Tensor] = []
        self._options: list[AttentionOptions] = []

    @property
    def options(self) -> AttentionOptions:
        """What was asked for, the same every time."""
        return self._options[0]

    def attend(self, heads: Tensor, num_heads: int, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        self.heads.append(heads.clone())
        self._options.append(options)
        return heads[:, :num_heads].clone()
