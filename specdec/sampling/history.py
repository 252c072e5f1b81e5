"""The tokens before a position, and how often each occurs: what penalties and masks go by."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from specdec.sampling.mask import TokenMask


class TokenHistory:
    """Tokens of one sequence, which grow and are cropped, with counts that follow.

    Counts are made when first asked for and brought up to date from then on, so that who needs none pays nothing.

    Attributes:
        mask: of the sequence's grammar.
        num_prompt_tokens: the first tokens, which were not generated.
        tokens: change them by `extend` and `crop` only.
    """

    def __init__(self, num_prompt_tokens: int = 0, mask: TokenMask | None = None) -> None:
        self.mask = mask
        self.num_prompt_tokens = num_prompt_tokens
        self.tokens: list[int] = []
        self._all = _Counts(0)
        self._generated = _Counts(num_prompt_tokens)
        self._mask_states: list[Hashable] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        self.tokens.extend(tokens)

    def crop(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        self._all.crop(self.tokens, length)
        self._generated.crop(self.tokens, length)
        del self.tokens[length:]
        # One state before the first generated token, and one after each.
        del self._mask_states[max(0, length - self.num_prompt_tokens) + 1 :]

    def all_counts(self) -> dict[int, int]:
        """How often each token occurs, the prompt included. Not to be changed."""
        return self._all.up_to_date(self.tokens)

    def generated_counts(self) -> dict[int, int]:
        """How often each token was generated. Not to be changed."""
        return self._generated.up_to_date(self.tokens)

    def mask_state(self, mask: TokenMask) -> Hashable:
        """The state of the sequence's mask after all tokens."""
        states = self._mask_states
        if not states:
            states.append(mask.start())
        for token in self.tokens[self.num_prompt_tokens + len(states) - 1 :]:
            states.append(mask.advance(states[-1], token))
        return states[-1]


@dataclass(frozen=True, slots=True)
class RowContext:
    """What stands before one position: a history as it is now, then draft tokens that are not part of it.

    Attributes:
        history: of the sequence.
        ahead: draft tokens between the history's end and the position.
    """

    history: TokenHistory
    ahead: Sequence[int] = ()

    @property
    def num_generated(self) -> int:
        """Generated tokens before the position."""
        return len(self.history.tokens) + len(self.ahead) - self.history.num_prompt_tokens

    def generated_counts(self) -> dict[int, int]:
        """How often each token was generated before the position."""
        counts = self.history.generated_counts()
        if self.ahead:
            counts = dict(counts)
            for token in self.ahead:
                counts[token] = counts.get(token, 0) + 1
        return counts

    def seen(self) -> set[int]:
        """All tokens before the position, the prompt included."""
        return {*self.history.all_counts(), *self.ahead}

    def allowed(self) -> Collection[int] | None:
        """The tokens the sequence's grammar allows; None where it has none."""
        mask = self.history.mask
        if mask is None:
            return None
        state = self.history.mask_state(mask)
        for token in self.ahead:
            state = mask.advance(state, token)
        return mask.allowed(state)

    def generated_tail(self, length: int) -> tuple[int, ...]:
        """The last ``length`` generated tokens before the position, or all if they are fewer."""
        tokens = self.history.tokens
        start = max(self.history.num_prompt_tokens, len(tokens) + len(self.ahead) - length)
        tail = (*tokens[start:], *self.ahead)
        return tail[max(0, len(tail) - length) :]


class _Counts:
    """Counts of the tokens from a fixed start up to where they have been counted."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._end = start
        self._counts: dict[int, int] = {}

    def up_to_date(self, tokens: list[int]) -> dict[int, int]:
        """The counts, after counting what is new."""
        for token in tokens[self._end :]:
            self._counts[token] = self._counts.get(token, 0) + 1
        self._end = max(self._end, len(tokens))
        return self._counts

    def crop(self, tokens: list[int], length: int) -> None:
        """Take back what was counted of ``tokens`` from ``length`` on."""
        length = max(length, self._start)
        for token in tokens[length : self._end]:
            self._counts[token] -= 1
            if not self._counts[token]:
                del self._counts[token]
        self._end = min(self._end, length)
