"""The model runner: one forward of a ragged batch over the KV pool, for draft and target alike."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.cache.blocks import num_blocks_for
from specdec.cache.keys import KVIdentity
from specdec.cache.storage import KVShape
from specdec.config import WorkerSettings
from specdec.errors import ConfigError, UnsupportedModelError
from specdec.runner.attention import AttentionKernel, AttentionStep
from specdec.runner.batch import SequenceRows, build_batch
from specdec.runner.exact_attention import ExactAttention
from specdec.runner.experts import arrange_experts
from specdec.runner.fused import fuse_layers
from specdec.runner.gather_attention import GatherAttention
from specdec.runner.huge_pages import advise_tensor, collapse_heap
from specdec.runner.linears import RowSafeLinear, pack_linears, row_functions
from specdec.runner.load import LoadedModel
from specdec.runner.rows import SafeRows, candidate_row_counts, find_safe_rows

logger = logging.getLogger(__name__)

# A head over a large vocabulary is the widest product by far; logits are wanted for few rows.
_MAX_LOGIT_ROWS = 64

_CPU_TOKENS_PER_STEP = 512
_CUDA_TOKENS_PER_STEP = 2048
# What a decoding sequence does not notice: on a CPU a step with this many tokens takes about twice as long as one with
# a single token.
_CPU_PREFILL_BESIDE_DECODE = 8
_CUDA_PREFILL_BESIDE_DECODE = 512


class ModelRunner:
    """Runs a loaded model over ragged batches. It keeps no sequence: block tables come with each call.

    Attributes:
        num_blocks: size of the KV pool.
        max_model_len: longest sequence the model and the pool can hold, in tokens.
        max_tokens: most tokens in one forward.
        max_prefill_beside_decode: most prompt tokens in one forward while other sequences decode.
        vocab_size: token ids the model knows are below this.
        fingerprint: of the model.
        kv_identity: what the contents of KV blocks depend on, beside the tokens.
    """

    def __init__(self, loaded: LoadedModel, settings: WorkerSettings) -> None:
        """
        Raises:
            ConfigError: the KV cache cannot hold one sequence of ``max_model_len``, or that is longer than the
                model allows.
        """
        self._model = loaded.model
        self._device = loaded.device
        self.fingerprint = loaded.fingerprint
        self.vocab_size = loaded.tokenizer_vocab_size
        config = loaded.model.config.get_text_config()
        num_heads = int(config.num_attention_heads)
        num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // num_heads)
        self._num_layers = int(config.num_hidden_layers)
        self._padding_ids = slice(loaded.tokenizer_vocab_size, loaded.vocab_size)
        dtype = torch.float32 if self._device.type == "cpu" else next(loaded.model.parameters()).dtype
        shape = KVShape(self._num_layers, num_kv_heads, head_dim, dtype)
        self.max_model_len = _max_model_len(loaded, settings, shape)
        self.num_blocks = settings.kv_cache_bytes // shape.bytes_per_block
        self._attention: AttentionKernel
        if self._device.type == "cpu":
            self._attention = ExactAttention()
            prefill_default = _CPU_PREFILL_BESIDE_DECODE
            _arrange_for_cpu(loaded)
            counts = candidate_row_counts(settings.max_tokens_per_step or _CPU_TOKENS_PER_STEP)
            with torch.inference_mode():
                self._safe_tokens = find_safe_rows(row_functions(loaded.model), counts)
        else:
            self._attention = GatherAttention(self._device)
            prefill_default = _CUDA_PREFILL_BESIDE_DECODE
            self._safe_tokens = SafeRows(range(1, (settings.max_tokens_per_step or _CUDA_TOKENS_PER_STEP) + 1))
        self._storage = self._attention.make_storage(shape, self.num_blocks)
        self.kv_identity = KVIdentity(loaded.fingerprint, str(dtype), self._storage.layout)
        for tensor in (*self._storage.keys, *self._storage.values):
            advise_tensor(tensor)
        self.max_tokens = self._safe_tokens.max_rows
        self.max_prefill_beside_decode = settings.max_prefill_tokens_beside_decode or prefill_default
        logger.info(
            "KV cache: %d blocks, %.0f MiB; longest sequence %d tokens; at most %d tokens per step",
            self.num_blocks,
            self.num_blocks * shape.bytes_per_block / 2**20,
            self.max_model_len,
            self.max_tokens,
        )

    @torch.inference_mode()
    def forward(self, sequences: Sequence[SequenceRows]) -> Tensor:
        """Compute the tokens of some sequences and store their KV.

        Args:
            sequences: at most `max_tokens` tokens in all; each sequence once.

        Returns:
            float32 [sum of num_logits, vocab], in order; ids the tokenizer does not know are -inf.
        """
        num_tokens = sum(len(rows.token_ids) for rows in sequences)
        batch = build_batch(list(sequences), padded_tokens=self._safe_tokens.pad(num_tokens), device=self._device)
        step = AttentionStep(batch, self._storage, self._attention.plan(batch))
        logits = self._run(step)
        if step.num_calls != self._num_layers:
            raise UnsupportedModelError(
                f"{step.num_calls} of {self._num_layers} layers called the attention interface; "
                "layers of another kind are not supported"
            )
        logits[:, self._padding_ids] = float("-inf")
        return logits

    @torch.inference_mode()
    def copy_block(self, source: int, destination: int) -> None:
        """Copy the KV of a whole block to another block."""
        self._storage.copy_block(source, destination)

    def _run(self, step: AttentionStep) -> Tensor:
        """The model's forward: float32 [logits, vocab]."""
        batch = step.batch
        outputs = self._model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            specdec_step=step,
        )
        logits: Tensor = outputs.logits[0].float()
        return logits


def _max_model_len(loaded: LoadedModel, settings: WorkerSettings, shape: KVShape) -> int:
    """The longest sequence, checked against model and memory."""
    wanted = settings.max_model_len or loaded.max_model_len
    if wanted > loaded.max_model_len:
        raise ConfigError(
            f"max_model_len is {wanted}, but the model was made for {loaded.max_model_len} positions; lower it"
        )
    needed = num_blocks_for(wanted) * shape.bytes_per_block
    if needed > settings.kv_cache_bytes:
        raise ConfigError(
            f"kv_cache_bytes is {settings.kv_cache_bytes}, but one sequence of max_model_len {wanted} takes {needed}; "
            "raise kv_cache_bytes or lower max_model_len"
        )
    return wanted


def _arrange_for_cpu(loaded: LoadedModel) -> None:
    """Fuse layers, pack weights, and let what does not see all rows pad its own, in place."""
    packed = loaded.dtype == "float16"
    arrange_experts(loaded.model, packed=packed)
    fuse_layers(loaded.model, packed=packed)
    if packed:
        pack_linears(loaded.model)
    head = loaded.model.get_output_embeddings()
    with torch.inference_mode():
        safe_rows = find_safe_rows([(head, head.in_features)], candidate_row_counts(_MAX_LOGIT_ROWS))
    loaded.model.set_output_embeddings(RowSafeLinear(head, safe_rows))
    # Before the KV pool is there: it is to take memory only as it is used.
    collapse_heap()
