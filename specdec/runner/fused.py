"""Decoder layers with fewer, larger operations, for CPU.

At one token a step, half the time of a small model goes into dispatching operations, not into arithmetic. Most decoders
share one shape of layer: a norm, attention with rotary positions, a residual, a norm, a gated MLP, a residual.
`FusedDecoderLayer` computes that with one product for q, k and v, one for gate and up, and
three operations for the rotation.

Nothing is assumed of a model: `fuse_layers` tries the fused layer against the original on random input, and keeps the
original where they differ.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.cache.blocks import BLOCK_SIZE
from specdec.cache.storage import KVShape, KVStorage
from specdec.runner.attention import AttentionKernel, AttentionOptions, AttentionPlan, AttentionStep, RotaryFactors
from specdec.runner.batch import SequenceRows, build_batch
from specdec.runner.linears import make_linear

logger = logging.getLogger(__name__)

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

    def __init__(self, layer: nn.Module, options: AttentionOptions, *, packed: bool) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = attention.layer_idx
        self._head_dim: int = attention.head_dim
        self._num_heads = attention.q_proj.out_features // self._head_dim
        self._num_kv_heads = attention.k_proj.out_features // self._head_dim
        self._intermediate_size: int = mlp.gate_proj.out_features
        self.qkv_proj = make_linear([attention.q_proj, attention.k_proj, attention.v_proj], packed=packed)
        self.o_proj = make_linear([attention.o_proj], packed=packed)
        self.gate_up_proj = make_linear([mlp.gate_proj, mlp.up_proj], packed=packed)
        self.down_proj = make_linear([mlp.down_proj], packed=packed)
        self.act_fn = mlp.act_fn
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
        qkv = self.qkv_proj(self.input_norm(hidden_states[0])).view(hidden_states.shape[1], -1, self._head_dim)
        queries_keys = qkv[:, : self._num_heads + self._num_kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            queries_keys[:, : self._num_heads] = self.q_norm(queries_keys[:, : self._num_heads])
            queries_keys[:, self._num_heads :] = self.k_norm(queries_keys[:, self._num_heads :])
        _rotate(queries_keys, _rotary_factors(specdec_step, position_embeddings))
        attended = specdec_step.attend(
            self.layer_idx, qkv[:, : self._num_heads].transpose(0, 1), qkv[:, self._num_heads :], self._options
        )
        hidden = hidden_states[0] + self.o_proj(attended.flatten(1))
        gate_up = self.gate_up_proj(self.post_attention_norm(hidden))
        gate, up = gate_up[:, : self._intermediate_size], gate_up[:, self._intermediate_size :]
        return (hidden + self.down_proj(self.act_fn(gate).mul_(up))).unsqueeze(0)


class _Norm(nn.Module):
    """Root-mean-square norm over the last dimension.

    PyTorch's own takes twice as long on CPU: it is made of more operations.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight
        self._eps = torch.tensor(getattr(norm, "variance_epsilon", None) or norm.eps)

    def forward(self, inputs: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(inputs, dim=-1, keepdim=True)
        mean_square = torch.addcmul(self._eps, length, length, value=1.0 / inputs.shape[-1])
        return (inputs * mean_square.rsqrt_()).mul_(self.weight)


def _rotary_factors(step: AttentionStep, position_embeddings: tuple[Tensor, Tensor]) -> RotaryFactors:
    """The factors of a forward's positions, made once for all layers that share them."""
    cos, sin = position_embeddings
    if step.rotary is None or step.rotary.source is not cos:
        first, second = sin[0].chunk(2, dim=-1)
        step.rotary = RotaryFactors(cos, cos[0].unsqueeze(1), torch.cat([-first, second], dim=-1).unsqueeze(1))
    return step.rotary


def _rotate(heads: Tensor, factors: RotaryFactors) -> None:
    """Rotary position embedding in place: ``x * cos + rotate_half(x) * sin`` (Su et al., arXiv 2104.09864).

    Args:
        heads: [tokens, heads, head_dim].
    """
    swapped = heads.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    heads.mul_(factors.cos).addcmul_(swapped, factors.signed_sin)


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


def _has_parts(layer: nn.Module) -> bool:
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

    def __init__(self, layer: nn.Module, hidden_size: int, rotary: nn.Module, kernel: AttentionKernel) -> None:
        attention = layer.self_attn
        self._layer_idx: int = attention.layer_idx
        num_kv_heads = attention.k_proj.out_features // attention.head_dim
        self._shape = KVShape(self._layer_idx + 1, num_kv_heads, attention.head_dim, torch.float32)
        self._kernel = kernel
        self._rotary = rotary
        generator = torch.Generator().manual_seed(self._layer_idx)
        self._hidden = torch.randn(1, _NUM_TRIAL_TOKENS, hidden_size, generator=generator)
        self._options: list[AttentionOptions] = []

    def run(self, layer: nn.Module) -> Tensor:
        """A layer's output, [1, tokens, hidden]."""
        # Across the border of two blocks, and not from position 0, where a rotation changes nothing.
        rows = SequenceRows([0] * _NUM_TRIAL_TOKENS, BLOCK_SIZE - _NUM_TRIAL_TOKENS // 2, [0, 1], 0)
        batch = build_batch([rows], padded_tokens=_NUM_TRIAL_TOKENS, device=torch.device("cpu"))
        plan = _RecordingPlan(self._kernel.plan(batch), self._options)
        storage = KVStorage(self._shape, num_blocks=2, device=torch.device("cpu"))
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

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        self._options.append(options)
        return self._plan.attend(queries, keys, values, options)
