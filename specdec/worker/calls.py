"""A call on its way through the worker: its items become jobs, its answer is complete when they are."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

from specdec.types import ProposeItem, ProposeResult, VerifyItem, VerifyResult
from specdec.worker.jobs import Job

Item = VerifyItem | ProposeItem
Result = VerifyResult | ProposeResult
AnyJob = Job[VerifyResult] | Job[ProposeResult]


@dataclass(slots=True)
class Call:
    """Some items that are answered together.

    Attributes:
        items: of one kind.
        future: cancelled by a caller that no longer waits.
        results: by item; None while the item is unanswered.
    """

    items: Sequence[Item]
    future: Future[list[Result]] = field(default_factory=Future)
    results: list[Result | None] = field(init=False)

    def __post_init__(self) -> None:
        self.results = [None] * len(self.items)

    def answer(self, index: int, result: Result) -> None:
        """Answer one item; the last one completes the call."""
        self.results[index] = result
        complete = [given for given in self.results if given is not None]
        if len(complete) == len(self.results):
            try:
                self.future.set_result(complete)
            except InvalidStateError:
                return  # The caller gave up in this very moment.

    def fail(self, error: BaseException) -> None:
        """End the call with an error, unless it has ended."""
        try:
            self.future.set_exception(error)
        except InvalidStateError:
            return  # Answered, failed or given up already.


@dataclass(slots=True)
class PendingItem:
    """An item of a call, waiting to become a job or being one.

    Attributes:
        job: None while it waits.
    """

    call: Call
    index: int
    job: AnyJob | None = None

    @property
    def item(self) -> Item:
        """The item."""
        return self.call.items[self.index]

    def refuse(self, error: str) -> None:
        """Answer that the item cannot be served."""
        self.call.answer(self.index, _result_type(self.item)(self.item.sequence_id, error=error))

    def ask_from(self, length: int) -> None:
        """Answer that the worker holds only ``length`` tokens."""
        self.call.answer(self.index, _result_type(self.item)(self.item.sequence_id, need_from=length))


def _result_type(item: Item) -> type[VerifyResult] | type[ProposeResult]:
    return VerifyResult if isinstance(item, VerifyItem) else ProposeResult
