"""Drafting with a model, one token at a time, by the target's own formula and noise."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.sampling.choose import RowToChoose
from specdec.sampling.history import RowContext, TokenHistory
from specdec.types import SamplingParams


@dataclass(slots=True)
class ModelDraft:
    """The draft of one sequence while it grows.

    Every token is chosen as the target would choose it: same processors, same noise at the same position, only the
    distribution is the draft model's.

    Attributes:
        sampling: of the request.
        num_tokens: how many to draft.
        start: absolute position of the first.
        history: all tokens before the next one, drafted ones included; whoever takes a token in extends it.
        tokens: drafted so far.
    """

    sampling: SamplingParams
    num_tokens: int
    start: int
    history: TokenHistory
    tokens: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """No further token is wanted."""
        return len(self.tokens) >= self.num_tokens

    def next_choice(self) -> RowToChoose:
        """How the next token is to be chosen from the draft model's logits."""
        context = RowContext(self.history) if self.sampling.edits_logits else None
        return RowToChoose(self.sampling, self.start + len(self.tokens), context)
