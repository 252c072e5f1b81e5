"""Sticky routing: a lane is a replica, and its calls go there while it lives."""

from __future__ import annotations

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

# Serve makes the router inside the handle, out of our reach; what it knows is left here for the handle's owner. One
# entry per deployment this process calls.
_replicas_by_deployment: dict[str, tuple[str, ...]] = {}


def known_replicas(deployment_name: str) -> tuple[str, ...]:
    """Ids of the replicas this process can call now, sorted; empty before the first call."""
    return _replicas_by_deployment.get(deployment_name, ())


class LaneRouter(ConsistentHashRouter):
    """Sends a call to the replica its session id names. If there is no such replica (any more), to the one that
    consistent hashing gives the session id: the same one for all calls of a lane.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve tells of a change."""
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A call found the replica dead, before Serve has told."""
        super().on_replica_actor_died(replica_id)
        self._publish()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each, the named one first."""
        ranks: list[list[RunningReplica]] = await super().choose_replicas(candidate_replicas, pending_request)
        session_id = pending_request.metadata.session_id if pending_request is not None else ""
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == session_id]
        return [named, *(rank for rank in ranks if rank != named)] if named else ranks

    def _publish(self) -> None:
        _replicas_by_deployment[self._deployment_id.name] = tuple(
            sorted(replica_id.unique_id for replica_id in self.curr_replicas)
        )
