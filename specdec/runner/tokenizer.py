"""The tokenizer, as the rest of the package sees it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from specdec.errors import InvalidRequestError

Message = dict[str, Any]
"""A chat message: ``{"role": "user", "content": "..."}``."""


def _byte_of_symbol() -> dict[str, int]:
    """Byte-level tokenizers write every byte as a printable character: those that are one as themselves, the others
    in their order from U+0100 on (Radford et al., GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_SYMBOL = _byte_of_symbol()


class Tokenizer:
    """A Hugging Face tokenizer with the few operations serving needs.

    Attributes:
        eos_token_ids: ids that end a generation (the tokenizer's own and the generation config's).
        vocab_size: ids the tokenizer knows; a model's embedding may be padded beyond it.
    """

    def __init__(self, hf_tokenizer: PreTrainedTokenizerBase, eos_token_ids: frozenset[int]) -> None:
        self._hf = hf_tokenizer
        self.eos_token_ids = eos_token_ids
        self.vocab_size = len(hf_tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, with the special tokens the model expects around a plain prompt."""
        ids: list[int] = self._hf.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def encode_chat(self, messages: list[Message]) -> list[int]:
        """Token ids of a conversation in the model's own chat template, ready for the assistant's turn.

        Raises:
            InvalidRequestError: the model has no chat template, or its template refuses the messages.
        """
        if self._hf.chat_template is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", param="messages")
        try:
            text = self._hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"the model's chat template refuses the messages: {error}", param="messages"
            ) from error
        return self.encode(str(text), add_special_tokens=False)

    def decode(self, token_ids: list[int]) -> str:
        """Text of ``token_ids`` without special tokens; an incomplete code point shows as U+FFFD."""
        return str(self._hf.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of words to be kept out of a text: each as it begins a text, and after a space, as vLLM
        has it.

        Raises:
            InvalidRequestError: a word is empty.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip()
            for text in (word, bare, f" {bare}"):
                ids = tuple(self.encode(text, add_special_tokens=False)) if bare else ()
                if not ids:
                    raise InvalidRequestError("a bad word is empty; remove it", param="bad_words")
                sequences[ids] = None
        return tuple(sequences)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text: UTF-8, which need not be whole code points. Special tokens give their name."""
        text = str(self._hf.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        symbol = str(self._hf.convert_ids_to_tokens(token_id))
        if "\ufffd" in text:
            if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", symbol):
                return bytes.fromhex(match[1])
            if all(char in _BYTE_OF_SYMBOL for char in symbol):
                return bytes(_BYTE_OF_SYMBOL[char] for char in symbol)
        # Decoding a single SentencePiece token drops its space, as if a text began with it.
        return (f" {text}" if symbol.startswith("\u2581") and not text.startswith(" ") else text).encode()

    def fingerprint(self) -> str:
        """SHA-256 hex over the vocabulary: equal for two tokenizers whose ids mean the same tokens."""
        vocabulary = json.dumps(sorted(self._hf.get_vocab().items()), ensure_ascii=True)
        return hashlib.sha256(vocabulary.encode()).hexdigest()
