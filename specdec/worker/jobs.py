"""What a worker does for one sequence of one call, forward by forward.

A job has tokens to feed. Its last rows (the tail) give the logits it wants and are computed in one forward; what
comes before them may be fed in chunks. `VerifyJob` needs one tail; `ProposeJob` one for every token it drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from specdec.drafting.model import ModelDraft
from specdec.runner.batch import SequenceRows
from specdec.sampling.choose import RowToChoose, accept_draft
from specdec.sampling.history import RowContext
from specdec.types import ProposeItem, ProposeResult, TokenLogprobs, VerifyItem, VerifyResult
from specdec.worker.sequences import CachedSequence

ResultT = TypeVar("ResultT", VerifyResult, ProposeResult)


@dataclass(frozen=True, slots=True)
class JobRows:
    """A job's part in a forward.

    Attributes:
        rows: what the runner computes.
        choices: how to choose a token from each of the logits.
    """

    rows: SequenceRows
    choices: list[RowToChoose]


class Job(ABC, Generic[ResultT]):
    """The computation of one item of a call on one sequence.

    Attributes:
        result: the item's answer; complete when ``done``.
        num_committed: the sequence's first tokens that are no guesses.
        max_length: positions the sequence may come to hold.
    """

    def __init__(
        self, sequence: CachedSequence, item: VerifyItem | ProposeItem, draft: list[int], max_length: int
    ) -> None:
        """
        Args:
            sequence: holds what the job goes on from; if it was sent whole, maybe a prefix found in the cache.
            draft: fed after the item's tokens.
        """
        self.sequence: CachedSequence = sequence
        self.result: ResultT
        self.num_committed: int = item.base_length + len(item.tokens)
        self.max_length: int = max_length
        self.done: bool = False
        num_held: int = sequence.length - item.base_length
        # The history comes from what was sent, whether or not its KV had to be computed.
        sequence.history.crop(item.base_length)
        sequence.history.extend(item.tokens)
        self._to_feed = [*item.tokens[num_held:], *draft]

    @abstractmethod
    def tail_choices(self) -> list[RowToChoose]:
        """How to choose from the logits of the last tokens to feed; one entry per row of the tail."""

    @abstractmethod
    def take_choices(self, tokens: list[int], logprobs: Sequence[TokenLogprobs | None]) -> None:
        """Take the tokens chosen for `tail_choices`; sets ``done``, or what to feed next."""

    @property
    @abstractmethod
    def num_tail_rows(self) -> int:
        """Length of `tail_choices`, without making them."""

    @property
    def num_tokens_to_feed(self) -> int:
        """Tokens the job would like to have computed in the next forward."""
        return len(self._to_feed)

    def next_rows(self, budget: int) -> JobRows | None:
        """The job's part in the next forward, of at most ``budget`` tokens; None if it cannot use them."""
        choices = self.tail_choices()
        if len(self._to_feed) <= budget:
            return JobRows(self._rows(len(self._to_feed), len(choices)), choices)
        # The tail is computed in one piece, later.
        chunk = min(budget, len(self._to_feed) - len(choices))
        return JobRows(self._rows(chunk, 0), []) if chunk > 0 else None

    def advance(self, rows: SequenceRows, tokens: list[int], logprobs: Sequence[TokenLogprobs | None] = ()) -> None:
        """Take the outcome of a forward: the rows are computed, and ``tokens`` chosen from their logits."""
        self.sequence.token_ids += rows.token_ids
        del self._to_feed[: len(rows.token_ids)]
        if not self._to_feed:
            self.take_choices(tokens, logprobs)

    def _rows(self, count: int, num_logits: int) -> SequenceRows:
        return SequenceRows(self._to_feed[:count], self.sequence.length, self.sequence.blocks, num_logits)


class VerifyJob(Job[VerifyResult]):
    """Feed the committed tokens and the draft; keep of the draft what equals the target's own tokens."""

    def __init__(self, item: VerifyItem, draft: list[int], sequence: CachedSequence) -> None:
        """
        Args:
            draft: ``item.draft``, or less of it.
        """
        super().__init__(sequence, item, draft, item.base_length + len(item.tokens) + len(draft))
        self._draft = draft
        self.result = VerifyResult(item.sequence_id)

    @property
    def num_tail_rows(self) -> int:
        return len(self._draft) + 1

    def tail_choices(self) -> list[RowToChoose]:
        params, history = self.sequence.sampling, self.sequence.history
        # A position's context is the committed tokens and the draft before it, so that no penalty is weaker there.
        return [
            RowToChoose(
                params,
                self.num_committed + index,
                RowContext(history, self._draft[:index]) if params.edits_logits else None,
                params.logprobs,
            )
            for index in range(self.num_tail_rows)
        ]

    def take_choices(self, tokens: list[int], logprobs: Sequence[TokenLogprobs | None]) -> None:
        num_accepted = self.result.num_accepted = accept_draft(self._draft, tokens)
        self.result.output = tokens[: num_accepted + 1]
        self.result.logprobs = [each for each in logprobs[: num_accepted + 1] if each is not None]
        # Of the draft, the worker keeps only what it has verified.
        self.num_committed += num_accepted
        self.sequence.crop(self.num_committed)
        self.sequence.history.extend(self._draft[:num_accepted])
        self.done = True


class ProposeJob(Job[ProposeResult]):
    """Feed the committed tokens, then draft one token per forward."""

    def __init__(self, item: ProposeItem, num_draft_tokens: int, sequence: CachedSequence) -> None:
        """
        Args:
            num_draft_tokens: ``item.num_draft_tokens``, or fewer.
        """
        committed = item.base_length + len(item.tokens)
        super().__init__(sequence, item, [], committed + max(num_draft_tokens - 1, 0))
        self._drafting = ModelDraft(sequence.sampling, num_draft_tokens, committed, sequence.history)
        self.result = ProposeResult(item.sequence_id, draft=self._drafting.tokens)

    @property
    def num_tail_rows(self) -> int:
        return 0 if self._drafting.done else 1

    def tail_choices(self) -> list[RowToChoose]:
        return [] if self._drafting.done else [self._drafting.next_choice()]

    def take_choices(self, tokens: list[int], logprobs: Sequence[TokenLogprobs | None]) -> None:
        self._drafting.tokens.extend(tokens)
        self.sequence.history.extend(tokens)
        self.done = self._drafting.done
        if not self.done:
            # Only what is needed for the next token is fed: the last drafted token stays out of the cache.
            self._to_feed = list(tokens)
