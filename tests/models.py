"""Tiny models with random weights, saved as a user's folder would be: config, safetensors, tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)

NUM_BYTES = 256
EOS_TOKEN_ID = 256
TURN_TOKEN_ID = 257
TOKENIZER_VOCAB_SIZE = 258
SPECIAL_TOKENS = ["<|end|>", "<|turn|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}: {{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)

SLIDING_WINDOW = 24
"""Far less than the tests' sequences."""


def save_tiny_tokenizer(folder: Path, *, extra_tokens: list[str] | None = None) -> Path:
    """A byte-level tokenizer: ids 0 to 255 are single bytes, then the end token, the turn token, ``extra_tokens``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(SPECIAL_TOKENS)
    fast.add_tokens(extra_tokens or [])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=SPECIAL_TOKENS[0])
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def save_tiny_model(
    config: PreTrainedConfig, folder: Path, *, seed: int = 0, extra_tokens: list[str] | None = None
) -> Path:
    """A model of this config with random weights, and the tiny tokenizer, in ``folder``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                # Untrained norms are all ones and biases all zeros, which would hide that one was left out.
                torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.1)
    model.generation_config = GenerationConfig(eos_token_id=EOS_TOKEN_ID, pad_token_id=EOS_TOKEN_ID)
    model.save_pretrained(folder)
    return save_tiny_tokenizer(folder, extra_tokens=extra_tokens)


def make_tiny_llama(
    folder: Path,
    *,
    seed: int = 0,
    vocab_size: int = 288,
    num_layers: int = 2,
    max_position_embeddings: int = 512,
    extra_tokens: list[str] | None = None,
) -> Path:
    """A Llama with grouped key heads. Its vocabulary is padded beyond the tokenizer's 258 ids."""
    config = LlamaConfig(
        **{**_common(), "vocab_size": vocab_size, "num_hidden_layers": num_layers},
        max_position_embeddings=max_position_embeddings,
    )
    return save_tiny_model(config, folder, seed=seed, extra_tokens=extra_tokens)


def _common() -> dict[str, object]:
    """Sizes shared by the tiny models; weights wide enough for logits that are far apart."""
    return {
        "vocab_size": 288,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": None,
    }


TINY_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_common(), max_position_embeddings=512),
    "llama-tied": lambda: LlamaConfig(**_common(), max_position_embeddings=512, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(
        **_common(), head_dim=16, max_position_embeddings=512, sliding_window=SLIDING_WINDOW
    ),
    "qwen2": lambda: Qwen2Config(**_common(), max_position_embeddings=512),
    "qwen2-sliding": lambda: Qwen2Config(
        **_common(),
        max_position_embeddings=512,
        use_sliding_window=True,
        sliding_window=SLIDING_WINDOW,
        max_window_layers=1,
    ),
    "qwen3": lambda: Qwen3Config(**_common(), head_dim=32, max_position_embeddings=512),
    "gemma2": lambda: Gemma2Config(
        **_common(),
        head_dim=16,
        max_position_embeddings=512,
        sliding_window=SLIDING_WINDOW,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **{**_common(), "num_hidden_layers": 3},
        head_dim=16,
        max_position_embeddings=512,
        sliding_window=SLIDING_WINDOW,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=288,
        n_positions=512,
        n_embd=64,
        n_layer=2,
        n_head=4,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_ID,
    ),
    "gpt-neox": lambda: GPTNeoXConfig(**_without_kv_heads(), max_position_embeddings=512),
    "phi3": lambda: Phi3Config(**_common(), max_position_embeddings=512, original_max_position_embeddings=512),
    "olmo2": lambda: Olmo2Config(**_common(), max_position_embeddings=512),
    "stablelm": lambda: StableLmConfig(**_common(), max_position_embeddings=512),
    "granite": lambda: GraniteConfig(
        **_common(),
        max_position_embeddings=512,
        attention_multiplier=0.2,
        residual_multiplier=0.7,
        embedding_multiplier=2.0,
        logits_scaling=0.5,
    ),
    "mixtral": lambda: MixtralConfig(
        **_common(), head_dim=16, max_position_embeddings=512, num_local_experts=4, num_experts_per_tok=2
    ),
}
"""One small config per architecture, by name."""


def _without_kv_heads() -> dict[str, object]:
    common = _common()
    del common["num_key_value_heads"]
    return common


def make_tiny_model(name: str, folder: Path, *, seed: int = 0) -> Path:
    """The model of `TINY_CONFIGS` of this name, in ``folder``."""
    return save_tiny_model(TINY_CONFIGS[name](), folder, seed=seed)
