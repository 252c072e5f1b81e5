"""Log-probabilities in OpenAI's two formats, for whole answers and for the pieces of a stream."""

from __future__ import annotations

import codecs

from specdec.api.responses import ChatLogprobs, CompletionLogprobs, ContentLogprob, TokenLogprob
from specdec.runner.tokenizer import Tokenizer
from specdec.types import GenerationChunk, TokenLogprobs

# JSON has no infinities; OpenAI and vLLM write this for a token without a chance.
_LEAST_LOGPROB = -9999.0


class LogprobsWriter:
    """Writes the log-probabilities of one answer. Chunks must come in order: offsets count on from one to the next."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def completion(self, chunk: GenerationChunk) -> CompletionLogprobs:
        """Those of a chunk's tokens, in the form of completions."""
        entries: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, logprobs in zip(chunk.token_ids, chunk.logprobs, strict=True):
            name = self._name(token)
            entries["tokens"].append(name)
            entries["token_logprobs"].append(_finite(logprobs.logprob))
            # Of two tokens of one name the likelier stays: written last.
            top = {self._name(other): _finite(value) for other, value in reversed(logprobs.top)}
            entries["top_logprobs"].append(dict(reversed(top.items())) | {name: _finite(logprobs.logprob)})
            entries["text_offset"].append(self._advance(token))
        return entries

    def chat(self, chunk: GenerationChunk) -> ChatLogprobs:
        """Those of a chunk's tokens, in the form of chat completions."""
        tokens = zip(chunk.token_ids, chunk.logprobs, strict=True)
        return {"content": [self._content(token, logprobs) for token, logprobs in tokens], "refusal": None}

    def _content(self, token: int, logprobs: TokenLogprobs) -> ContentLogprob:
        top = [self._entry(other, value) for other, value in logprobs.top]
        return {**self._entry(token, logprobs.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> TokenLogprob:
        return {
            "token": self._name(token),
            "logprob": _finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }

    def _name(self, token: int) -> str:
        """The token's text; bytes that are no text by themselves as OpenAI writes them."""
        content = self._tokenizer.token_bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _advance(self, token: int) -> int:
        """Where the token begins in the text, or the code point it is a part of."""
        offset = self._offset
        if self._tokenizer.decode([token]):  # a special token has no text
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return offset


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
