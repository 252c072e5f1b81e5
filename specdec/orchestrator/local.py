"""Workers in this process, as the loop's clients."""

from __future__ import annotations

from specdec.types import ProposeItem, ProposeResult, VerifyItem, VerifyResult, WorkerInfo
from specdec.worker.worker import DraftWorker, TargetWorker


class LocalTarget:
    """A pool of one target worker; a `TargetClient`."""

    def __init__(self, worker: TargetWorker) -> None:
        self._worker = worker

    def lanes(self) -> list[str]:
        """One worker, one lane."""
        return ["local"]

    async def info(self) -> WorkerInfo:
        """See `WorkerClient.info`."""
        return self._worker.info()

    async def verify(self, items: list[VerifyItem], *, lane: str) -> list[VerifyResult]:
        """See `TargetClient.verify`."""
        return await self._worker.verify(items)

    async def release(self, sequence_ids: list[str], *, lane: str) -> None:
        """See `WorkerClient.release`."""
        await self._worker.release(sequence_ids)


class LocalDraft:
    """A pool of one draft worker; a `DraftClient`."""

    def __init__(self, worker: DraftWorker) -> None:
        self._worker = worker

    async def info(self) -> WorkerInfo:
        """See `WorkerClient.info`."""
        return self._worker.info()

    async def propose(self, items: list[ProposeItem], *, lane: str) -> list[ProposeResult]:
        """See `DraftClient.propose`."""
        return await self._worker.propose(items)

    async def release(self, sequence_ids: list[str], *, lane: str) -> None:
        """See `WorkerClient.release`."""
        await self._worker.release(sequence_ids)
