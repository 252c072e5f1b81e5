"""The worker pools behind Serve handles, as the loop's clients.

Everything that is Serve's and not quite public is kept in this module and in `deployments.routing`.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.routing import known_replicas
from specdec.errors import WorkerRequestError, WorkerUnavailableError
from specdec.types import ProposeItem, ProposeResult, VerifyItem, VerifyResult, WorkerInfo

logger = logging.getLogger(__name__)

_ANY_LANE = "any"


class ServePool:
    """Calls on one deployment."""

    def __init__(self, handle: DeploymentHandle, deployment_name: str) -> None:
        # The router then runs on this loop instead of a thread of its own: a millisecond less per call. There is no
        # public setting for it.
        handle._init(_run_router_in_separate_loop=False)
        self._handle = handle
        self._deployment_name = deployment_name

    async def info(self) -> WorkerInfo:
        """See `WorkerClient.info`."""
        answer: WorkerInfo = await self._call("info", _ANY_LANE)
        return answer

    async def release(self, sequence_ids: list[str], *, lane: str) -> None:
        """See `WorkerClient.release`."""
        try:
            await self._call("release", lane, sequence_ids)
        except (WorkerUnavailableError, WorkerRequestError) as error:
            logger.info("%s: release not delivered: %s", self._deployment_name, error)

    async def _call(self, method: str, lane: str, *args: Any) -> Any:
        """Call a method on the lane's replica.

        Raises:
            WorkerUnavailableError: the replica is dead, restarting or over its limit, or its worker said so.
            WorkerRequestError: the worker refused the call, or failed in a way that repeating would repeat.
        """
        try:
            return await self._handle.options(method_name=method, session_id=lane).remote(*args)
        except (WorkerUnavailableError, WorkerRequestError):
            raise
        except RayTaskError as error:
            raise WorkerRequestError(f"{self._deployment_name}.{method} failed: {error.cause!r}") from error
        except (RayError, RayServeException) as error:
            raise WorkerUnavailableError(
                f"{self._deployment_name}.{method}: {type(error).__name__}: {error}"
            ) from error


class ServeTarget(ServePool):
    """The target deployment; a `TargetClient`."""

    def lanes(self) -> list[str]:
        """One lane per replica; a single one to whichever replica there will be while none is known."""
        return list(known_replicas(self._deployment_name)) or [_ANY_LANE]

    async def verify(self, items: list[VerifyItem], *, lane: str) -> list[VerifyResult]:
        """See `TargetClient.verify`."""
        results: list[VerifyResult] = await self._call("verify", lane, items)
        return results


class ServeDraft(ServePool):
    """The draft deployment; a `DraftClient`."""

    async def propose(self, items: list[ProposeItem], *, lane: str) -> list[ProposeResult]:
        """See `DraftClient.propose`."""
        results: list[ProposeResult] = await self._call("propose", lane, items)
        return results
