from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.config import AutoscalingContext

from deployments.autoscaling import DraftPolicy, TargetPolicy
from deployments.workers import TargetDeployment

Policy = Callable[[AutoscalingContext], tuple[int, dict[str, Any]]]


def context(current: int = 1, low: int = 1, high: int = 8, **figures: list[float]) -> AutoscalingContext:
    """What Serve passes to a policy, with figures by name and replica."""
    deployment = DeploymentID("Target", "app")
    replicas = [ReplicaID(str(index), deployment) for index in range(current)]
    return AutoscalingContext(
        deployment_id=deployment,
        deployment_name="Target",
        app_name="app",
        current_num_replicas=current,
        target_num_replicas=current,
        running_replicas=replicas,
        total_num_requests=0.0,
        total_queued_requests=0.0,
        aggregated_metrics={name: dict(zip(replicas, values, strict=True)) for name, values in figures.items()},
        raw_metrics=None,
        capacity_adjusted_min_replicas=low,
        capacity_adjusted_max_replicas=high,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=None,
    )


def wanted(policy: Policy, ctx: AutoscalingContext) -> int:
    return policy(ctx)[0]


def test_target_follows_sequences() -> None:
    policy = TargetPolicy(sequences_per_replica=32)
    assert wanted(policy, context(num_sequences=[32.0], kv_used_share=[0.1])) == 1
    assert wanted(policy, context(num_sequences=[33.0], kv_used_share=[0.1])) == 2
    assert wanted(policy, context(3, num_sequences=[20.0, 10.0, 1.0], kv_used_share=[0.1] * 3)) == 1


def test_target_follows_memory_where_that_is_shorter() -> None:
    policy = TargetPolicy(sequences_per_replica=32, max_kv_used_share=0.8)
    assert wanted(policy, context(num_sequences=[4.0], kv_used_share=[0.79])) == 1
    assert wanted(policy, context(num_sequences=[4.0], kv_used_share=[0.9])) == 2


def test_draft_follows_busy_time() -> None:
    policy = DraftPolicy(busy_share=0.5)
    assert wanted(policy, context(busy_share=[0.4])) == 1
    assert wanted(policy, context(busy_share=[0.8])) == 2
    assert wanted(policy, context(2, busy_share=[0.1, 0.1])) == 1


@pytest.mark.parametrize("policy", [TargetPolicy(32), DraftPolicy()])
def test_bounds_are_kept_and_no_report_is_no_load(policy: Policy) -> None:
    busy = context(num_sequences=[1e6], kv_used_share=[1.0], busy_share=[100.0], high=4)
    assert wanted(policy, busy) == 4
    assert wanted(policy, context(low=2)) == 2


@pytest.mark.parametrize("make", [lambda: TargetPolicy(0), lambda: TargetPolicy(1, 0), lambda: DraftPolicy(-1)])
def test_impossible_arguments_are_refused(make: Callable[[], Policy]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        make()


def test_workers_report_what_the_policies_read() -> None:
    class Worker:
        def info(self) -> object:
            from specdec.types import WorkerInfo

            return WorkerInfo("target", "f", 100, 7, 10, 4, 0.25, 3.0)

        def close(self) -> None: ...

    deployment = TargetDeployment.__new__(TargetDeployment)
    deployment._worker = Worker()  # type: ignore[assignment]
    stats = deployment.record_autoscaling_stats()
    ctx = context(**{name: [value] for name, value in stats.items()})
    assert wanted(TargetPolicy(sequences_per_replica=3.5), ctx) == 2
    assert wanted(TargetPolicy(100, max_kv_used_share=0.5), ctx) == 2
    assert wanted(DraftPolicy(busy_share=0.1), ctx) == 3
