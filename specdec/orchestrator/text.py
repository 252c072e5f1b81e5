"""From token ids to text, as they come: whole code points only, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.runner.tokenizer import Tokenizer

# Tokens of the prompt decoded along with the first new ones: some tokenizers treat the first token of a text
# differently (they drop its leading space), and the first generated token is not the first of its text.
_NUM_CONTEXT_TOKENS = 5
_REPLACEMENT = "\ufffd"

# A code point has at most four bytes, and a token at least one: what is incomplete after that many tokens is noise.
_MAX_TOKENS_OF_CODE_POINT = 4

# Text of at most this many tokens is decoded again for every new one, whatever they are.
_MAX_WINDOW = 16


class IncrementalDecoder:
    """Decodes a growing run of tokens.

    A token may end within a code point, so its text is held back until later tokens complete it. Text is taken as what
    a decoding of the last few tokens has more than the one before it, which is right for tokenizers that join tokens
    with rules of their own.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        self._num_given = len(tokenizer.decode(self._tokens))  # characters of their text that were given out
        self._boundary = 0  # how many they were when text last came out that ended with a whole code point
        self._num_incomplete = 0  # tokens since the text last ended with a whole code point

    def add(self, token: int) -> str:
        """The text that ``token`` completes; empty while a code point is incomplete."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        num_held = len(text) - len(text.rstrip(_REPLACEMENT))
        self._num_incomplete = self._num_incomplete + 1 if num_held else 0
        if self._num_incomplete >= _MAX_TOKENS_OF_CODE_POINT:
            # Among invalid bytes, only the last few may still become a code point.
            num_held = min(num_held, _MAX_TOKENS_OF_CODE_POINT - 1)
        piece = text[self._num_given : len(text) - num_held]
        self._num_given += len(piece)
        self._shorten(text, piece)
        return piece

    def finish(self) -> str:
        """The text still held back; bytes that never became a code point show as U+FFFD."""
        text = self._tokenizer.decode(self._tokens)
        piece = text[self._num_given :]
        self._num_given = len(text)
        return piece

    def _shorten(self, text: str, piece: str) -> None:
        """Forget tokens that are no longer needed to decode the next one."""
        if piece and not self._num_incomplete:
            first, self._boundary = self._boundary, len(self._tokens) - self._boundary
        elif len(self._tokens) <= _MAX_WINDOW:
            return
        elif self._num_incomplete:
            first, self._boundary = len(self._tokens) - _MAX_WINDOW // 2, 0
        else:
            self._tokens.pop()  # one of many special tokens, which have no text
            return
        num_pending = len(text) - self._num_given
        del self._tokens[:first]
        self._num_given = max(0, len(self._tokenizer.decode(self._tokens)) - num_pending)


class StopStrings:
    """Passes text on until a stop string appears, and holds back what may be the beginning of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that appeared; None so far."""
        return self._matched

    def add(self, text: str) -> str:
        """The text that can be given out now. Once a stop string has appeared: what stood before it, then nothing.

        The first to appear is the first to be complete, however the text is split; of two that end together it is
        the longer one.
        """
        if self._matched is not None:
            return ""
        if not self._stop:
            return text
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self._matched = min(found)
            text, self._held = self._held[:at], ""
            return text
        return self._release(len(self._held) - self._num_held_back())

    def finish(self) -> str:
        """The text still held back, when no more will come; nothing after a stop string."""
        return self._release(len(self._held))

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that is a beginning of a stop string."""
        longest = min(len(self._held), max(len(stop) for stop in self._stop) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text
