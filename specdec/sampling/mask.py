"""The hook for grammars: which tokens may come next, as a function of those generated.

A request carries its grammar as text (`SamplingParams.grammar`); a worker that is given a `MaskFactory` makes a mask of
it. The mask is asked at every position, drafted ones included, and has no memory of its own: its states are kept with
the sequence's tokens and dropped with them, so that a rejected draft leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Protocol


class TokenMask(Protocol):
    """A language over token ids, as an automaton of immutable states."""

    def start(self) -> Hashable:
        """The state before the first generated token."""

    def advance(self, state: Hashable, token: int) -> Hashable:
        """The state after ``token``. It must not raise for any token of the vocabulary: a draft may hold tokens that
        are not allowed. What comes after such a token is never used.
        """

    def allowed(self, state: Hashable) -> Collection[int]:
        """The ids that may come next, all of them in the vocabulary. Where the text may end, the end token is one.

        With none, or where other masks forbid all that is allowed, the mask that would leave nothing is left out.
        """


MaskFactory = Callable[[str], TokenMask]
"""Makes a mask of a grammar's text; cheap for one it has seen. Raises `InvalidRequestError` for a wrong one."""
