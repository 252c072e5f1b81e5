"""The face of the engine towards the API, and of the workers towards the loop.

Both sides are protocols: the API does not know whether the loop runs here or behind Ray Serve, the loop
does not know whether a worker is a thread, an actor or a test double.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from specdec.runner.tokenizer import Tokenizer
from specdec.types import (
    GenerationChunk,
    GenerationRequest,
    ProposeItem,
    ProposeResult,
    VerifyItem,
    VerifyResult,
    WorkerInfo,
)


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether each worker pool has answered a warm-up.

    Attributes:
        target: required to serve.
        draft: None when no draft is configured. True once it has answered, even if it is down now: requests are then
            served, plainly.
        detail: what does not answer now, for a person to read; empty when all is well.
    """

    target: bool
    draft: bool | None
    detail: str = ""

    @property
    def ready(self) -> bool:
        """All that is configured has answered."""
        return self.target and self.draft is not False


class GenerationEngine(Protocol):
    """What the API needs."""

    @property
    def model_name(self) -> str:
        """The served model's name."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""

    @property
    def max_model_len(self) -> int:
        """Prompt plus generated tokens, at most."""

    @property
    def max_num_draft_tokens(self) -> int:
        """The largest ``speculative.num_draft_tokens`` a request may ask for."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        """Stream a generation, one chunk per verify step. Closing the iterator, or cancelling the task
        that runs it, frees the sequence everywhere.

        Raises (at the first step):
            InvalidRequestError: the request cannot be served.
            OverloadedError: no room now.
            DeadlineExceededError, WorkerError: it could not be finished.
        """

    async def readiness(self) -> Readiness:
        """Ask both pools for a sign of life; fast, and true only after their warm-up."""


class WorkerClient(Protocol):
    """A pool of workers of one kind, as the loop sees it.

    A lane is a name; calls of one lane go to one worker of the pool for as long as that worker lives.
    """

    async def info(self) -> WorkerInfo:
        """What some worker of the pool says of itself; workers answer only after their warm-up.

        Raises:
            WorkerUnavailableError: none answers.
        """

    async def release(self, sequence_ids: list[str], *, lane: str) -> None:
        """Forget sequences. Never raises: a worker that cannot be reached forgets them by its own clock."""


class TargetClient(WorkerClient, Protocol):
    """The pool of target workers."""

    def lanes(self) -> list[str]:
        """Names of the lanes the pool offers now, one per worker; at least one."""

    async def verify(self, items: list[VerifyItem], *, lane: str) -> list[VerifyResult]:
        """Results in the order of ``items``.

        Raises:
            WorkerUnavailableError: no answer; may be repeated.
            WorkerRequestError: refused.
        """


class DraftClient(WorkerClient, Protocol):
    """The pool of draft workers."""

    async def propose(self, items: list[ProposeItem], *, lane: str) -> list[ProposeResult]:
        """As `TargetClient.verify`."""
