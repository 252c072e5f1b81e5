"""Drafting with a model, one token at a time, by the target's own formula and noise."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.sampling.choose import RowToChoose
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
        tokens: drafted so far.
    """

    sampling: SamplingParams
    num_tokens: int
    start: int
    tokens: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """No further token is wanted."""
        return len(self.tokens) >= self.num_tokens

    def next_choice(self) -> RowToChoose:
        """How the next token is to be chosen from the draft model's logits."""
        return RowToChoose(self.sampling, self.start + len(self.tokens))
