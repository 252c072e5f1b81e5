from __future__ import annotations

import asyncio

import pytest

from specdec.config import RetrySettings
from specdec.errors import WorkerUnavailableError
from specdec.orchestrator.retry import Availability, Backoff, answer_within

SETTINGS = RetrySettings(initial_backoff_s=0.5, max_backoff_s=3.0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def recording_backoff(ranges: list[tuple[float, float]], settings: RetrySettings = SETTINGS) -> Backoff:
    def uniform(low: float, high: float) -> float:
        ranges.append((low, high))
        return high

    return Backoff(settings, uniform)


def test_the_range_of_waits_doubles_up_to_the_maximum() -> None:
    ranges: list[tuple[float, float]] = []
    backoff = recording_backoff(ranges)
    waits = [backoff.next_wait_s() for _ in range(5)]
    assert ranges == [(0.0, 0.5), (0.0, 1.0), (0.0, 2.0), (0.0, 3.0), (0.0, 3.0)]
    assert waits == [high for _, high in ranges]


def test_a_success_starts_over() -> None:
    ranges: list[tuple[float, float]] = []
    backoff = recording_backoff(ranges)
    for _ in range(3):
        backoff.next_wait_s()
    backoff.reset()
    backoff.next_wait_s()
    assert ranges[-1] == (0.0, 0.5)


def test_an_outage_of_days_overflows_nothing() -> None:
    ranges: list[tuple[float, float]] = []
    backoff = recording_backoff(ranges)
    for _ in range(3000):
        backoff.next_wait_s()
    assert ranges[-1] == (0.0, 3.0)


def test_waits_are_spread_over_the_whole_range() -> None:
    waits = [Backoff(SETTINGS).next_wait_s() for _ in range(300)]
    assert all(0.0 <= wait <= 0.5 for wait in waits)
    assert min(waits) < 0.1
    assert max(waits) > 0.4


def test_a_pool_is_left_alone_for_the_backoff_after_a_failure() -> None:
    clock = Clock()
    pool = Availability(SETTINGS, clock)
    assert pool.up
    assert not pool.probe_due
    wait_s = pool.failed()
    assert 0.0 <= wait_s <= 0.5
    clock.now += wait_s / 2
    assert not pool.up
    assert pool.probe_due == (wait_s == 0.0)
    clock.now += wait_s
    assert pool.probe_due
    assert not pool.up, "nobody has found out yet"
    pool.probed()
    assert pool.up


def test_a_success_opens_the_pool_at_once() -> None:
    pool = Availability(SETTINGS, Clock())
    pool.failed()
    pool.succeeded()
    assert pool.up


def test_failures_in_a_row_are_waited_for_longer() -> None:
    clock = Clock()
    firsts, fourths = [], []
    for _ in range(200):
        pool = Availability(SETTINGS, clock)
        for number in range(4):
            wait_s = pool.failed()
            firsts += [wait_s] if number == 0 else []
            fourths += [wait_s] if number == 3 else []
            clock.now += wait_s
    assert max(firsts) <= 0.5
    assert 1.0 < max(fourths) <= 3.0


def test_a_sign_of_life_does_not_end_the_row_of_failures() -> None:
    clock = Clock()
    fourths = []
    for _ in range(200):
        pool = Availability(SETTINGS, clock)
        for _ in range(4):
            wait_s = pool.failed()
            clock.now += wait_s
            pool.probed()
        fourths.append(wait_s)
    assert max(fourths) > 1.0


async def test_an_answer_comes_through() -> None:
    async def call() -> int:
        return 5

    assert await answer_within(call(), 1.0) == 5


async def test_a_late_answer_is_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        await answer_within(asyncio.Event().wait(), 0.01)


async def test_a_cancellation_from_the_other_side_is_no_cancellation_of_ours() -> None:
    async def call() -> None:
        raise asyncio.CancelledError

    with pytest.raises(WorkerUnavailableError, match="cancelled"):
        await answer_within(call(), 1.0)


async def test_a_cancellation_of_ours_is_one() -> None:
    task = asyncio.create_task(answer_within(asyncio.Event().wait(), 10.0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_calls_that_fail_together_are_one_failure() -> None:
    clock = Clock()
    waits = []
    for _ in range(200):
        pool = Availability(SETTINGS, clock)
        pool.failed()
        waits.append(max(pool.failed() for _ in range(8)))
        clock.now += waits[-1]
        assert pool.probe_due
    assert 0.4 < max(waits) <= 0.5
