"""The target and draft deployments: a model worker in a Serve replica."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.config import EngineConfig
from specdec.types import ProposeItem, ProposeResult, VerifyItem, VerifyResult, WorkerInfo
from specdec.worker.build import build_draft_worker, build_target_worker
from specdec.worker.worker import ModelWorker

# A step that takes longer than this hangs. The slowest honest one is a full prefill chunk of a large model on a CPU.
_MAX_STEP_S = 120.0


class _WorkerDeployment:
    """What target and draft replicas have in common.

    All tensor work is in the worker's own thread; the replica's event loop stays free for health checks.
    """

    _worker: ModelWorker

    async def info(self) -> WorkerInfo:
        """Figures of this replica."""
        return self._worker.info()

    async def release(self, sequence_ids: Sequence[str]) -> None:
        """Forget sequences."""
        await self._worker.release(sequence_ids)

    def check_health(self) -> None:
        """Serve restarts the replica when this raises."""
        self._worker.check_health(_MAX_STEP_S)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the policies in `deployments.autoscaling` decide on. Requests in flight say nothing here: a call
        carries any number of sequences.
        """
        info = self._worker.info()
        return {
            "num_sequences": float(info.num_sequences),
            "kv_used_share": 1.0 - info.num_free_blocks / info.num_blocks,
            "busy_share": info.busy_share,
        }

    def __del__(self) -> None:
        if hasattr(self, "_worker"):
            self._worker.close()


class TargetDeployment(_WorkerDeployment):
    """Verifies drafts."""

    def __init__(self, config: EngineConfig) -> None:
        self._worker = self._target = build_target_worker(config)

    async def verify(self, items: list[VerifyItem]) -> list[VerifyResult]:
        """See `TargetWorker.verify`."""
        return await self._target.verify(items)


class DraftDeployment(_WorkerDeployment):
    """Proposes drafts."""

    def __init__(self, config: EngineConfig) -> None:
        self._worker = self._draft = build_draft_worker(config)

    async def propose(self, items: list[ProposeItem]) -> list[ProposeResult]:
        """See `DraftWorker.propose`."""
        return await self._draft.propose(items)
