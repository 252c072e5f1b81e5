"""How many tokens to draft."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.types import SpeculativeParams


@dataclass(frozen=True, slots=True)
class FixedDraftLength:
    """The same number of draft tokens in every step.

    Attributes:
        default: draft tokens where a request does not say; 0 turns speculation off.
        limit: the most any request gets.
    """

    default: int
    limit: int

    def num_draft_tokens(self, params: SpeculativeParams, num_remaining_tokens: int) -> int:
        """Draft tokens for the next step of a sequence.

        Args:
            params: what the request asked for.
            num_remaining_tokens: tokens it may still emit, at least 1. A step emits one token more than it accepts,
                so a longer draft than one less than this would be wasted.
        """
        if not params.enabled:
            return 0
        wanted = self.default if params.num_draft_tokens is None else params.num_draft_tokens
        return max(0, min(wanted, self.limit, num_remaining_tokens - 1))
