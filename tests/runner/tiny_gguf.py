"""The smallest GGUF file that transformers reads as a Llama with a tokenizer."""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

WIDTH, KV_WIDTH, HIDDEN_WIDTH, NUM_LAYERS = 16, 8, 32, 2
TOKENS = ["<unk>", "<bos>", "<eos>", *string.ascii_lowercase, "ab"]
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
LAST_WEIGHT = f"blk.{NUM_LAYERS - 1}.ffn_down.weight"

_BLOCK_SHAPES = {
    "attn_norm": (WIDTH,),
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (KV_WIDTH, WIDTH),
    "attn_v": (KV_WIDTH, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_norm": (WIDTH,),
    "ffn_gate": (HIDDEN_WIDTH, WIDTH),
    "ffn_up": (HIDDEN_WIDTH, WIDTH),
    "ffn_down": (WIDTH, HIDDEN_WIDTH),
}


def write_tiny_gguf(path: Path, *, architecture: str = "llama", without: str | None = None) -> Path:
    """Write the file, with random weights, ``without`` one of them if named."""
    writer = GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(HIDDEN_WIDTH)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS_TOKEN_ID)
    writer.add_chat_template(CHAT_TEMPLATE)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(NUM_LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in _BLOCK_SHAPES.items()}
    generator = np.random.default_rng(0)
    for name, shape in shapes.items():
        if name != without:
            writer.add_tensor(name, generator.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
