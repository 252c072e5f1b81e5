"""The tokenizer, as the rest of the package sees it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from specdec.errors import InvalidRequestError

Message = dict[str, Any]
"""A chat message: ``{"role": "user", "content": "..."}``."""


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

    def fingerprint(self) -> str:
        """SHA-256 hex over the vocabulary: equal for two tokenizers whose ids mean the same tokens."""
        vocabulary = json.dumps(sorted(self._hf.get_vocab().items()), ensure_ascii=True)
        return hashlib.sha256(vocabulary.encode()).hexdigest()
