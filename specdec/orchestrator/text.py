"""From token ids to text, as they come: whole code points only, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.runner.tokenizer import Tokenizer

# Tokens of the prompt decoded along with the first new ones: some tokenizers treat the first token of a text
# differently (they drop its leading space), and the first generated token is not the first of its text.
_NUM_CONTEXT_TOKENS = 5
_REPLACEMENT = "\ufffd"


class IncrementalDecoder:
    """Decodes a growing run of tokens.

    A token may end within a code point, so its text is held back until later tokens complete it. Text is taken as the
    difference of two decodings with the same start, which is right for tokenizers that join tokens with rules of
    their own.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        self._start = 0  # decoding starts at this token ...
        self._done = len(self._tokens)  # ... and the text before this one was given out.

    def add(self, token: int) -> str:
        """The text that ``token`` completes; empty while a code point is incomplete."""
        self._tokens.append(token)
        return self._take(final=False)

    def finish(self) -> str:
        """The text still held back; bytes that never became a code point show as U+FFFD."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._tokens[self._start : self._done])
        after = self._tokenizer.decode(self._tokens[self._start :])
        if len(after) <= len(before) or (after.endswith(_REPLACEMENT) and not final):
            return ""
        self._start, self._done = self._done, len(self._tokens)
        return after[len(before) :]


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
        """The text that can be given out now. When a stop string appears: what stood before it, and no more."""
        if not self._stop:
            return text
        if self._matched is not None:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            at, self._matched = min(found)
            return self._release(at)
        return self._release(len(self._held) - self._num_held_back())

    def finish(self) -> str:
        """The text still held back, when no more will come; none after a stop string."""
        return "" if self._matched is not None else self._release(len(self._held))

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
