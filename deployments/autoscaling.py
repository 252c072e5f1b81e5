"""How many replicas each deployment needs, by what it can be short of.

A target replica runs out of KV blocks and of batch room: it scales on the sequences it holds and on KV use. A draft
replica runs out of time: it scales on the share of time it is busy. The orchestrator runs out of event loop and scales
on its streams, which Serve counts by itself. The classes are named in the Serve config as autoscaling policies, their
arguments under ``policy_kwargs``; Serve applies its delays and bounds to what they return.
"""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingContext

Decision = tuple[int, dict[str, Any]]
"""Wanted replicas, and the policy's state, of which these have none."""


class TargetPolicy:
    """Replicas such that each holds about ``sequences_per_replica`` sequences, and none is nearly out of KV."""

    def __init__(self, sequences_per_replica: float, max_kv_used_share: float = 0.8) -> None:
        """
        Args:
            sequences_per_replica: sequences one replica decodes well together; > 0.
            max_kv_used_share: mean share of KV blocks in use above which another replica is wanted, in (0, 1].
        """
        self._sequences_per_replica = _positive("sequences_per_replica", sequences_per_replica)
        self._max_kv_used_share = _positive("max_kv_used_share", max_kv_used_share)

    def __call__(self, ctx: AutoscalingContext) -> Decision:
        by_sequences = sum(_by_replica(ctx, "num_sequences")) / self._sequences_per_replica
        by_memory = sum(_by_replica(ctx, "kv_used_share")) / self._max_kv_used_share
        return _bounded(ctx, math.ceil(max(by_sequences, by_memory))), {}


class DraftPolicy:
    """Replicas such that each is busy about ``busy_share`` of the time; a late draft is a draft not used."""

    def __init__(self, busy_share: float = 0.6) -> None:
        """
        Args:
            busy_share: in (0, 1].
        """
        self._busy_share = _positive("busy_share", busy_share)

    def __call__(self, ctx: AutoscalingContext) -> Decision:
        return _bounded(ctx, math.ceil(sum(_by_replica(ctx, "busy_share")) / self._busy_share)), {}


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"policy_kwargs.{name} must be above 0, not {value}")
    return value


def _by_replica(ctx: AutoscalingContext, name: str) -> list[float]:
    """A figure of `record_autoscaling_stats`, one per replica; empty until the first report."""
    return list((ctx.aggregated_metrics or {}).get(name, {}).values())


def _bounded(ctx: AutoscalingContext, wanted: int) -> int:
    return max(ctx.capacity_adjusted_min_replicas, min(wanted, ctx.capacity_adjusted_max_replicas))
