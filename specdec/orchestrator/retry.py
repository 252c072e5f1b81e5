"""Deadlines of calls, and exponential backoff with jitter."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from specdec.config import RetrySettings
from specdec.errors import WorkerUnavailableError

T = TypeVar("T")


async def answer_within(call: Awaitable[T], timeout_s: float) -> T:
    """The answer to a call on a worker.

    Raises:
        TimeoutError: there is none after ``timeout_s`` seconds.
        WorkerUnavailableError: the call was cancelled, but not by us: a transport says so when it was the other side's
            task. Taken for a cancellation of ours, it would end whatever waits here.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise WorkerUnavailableError("the worker's side cancelled the call") from None


class Backoff:
    """Waits that grow with every failure in a row and are spread at random ("full jitter"), so that many callers
    that failed together do not come back together.

    Source: Brooker, Exponential Backoff and Jitter, AWS Architecture Blog, 2015.
    """

    def __init__(self, settings: RetrySettings, uniform: Callable[[float, float], float] = random.uniform) -> None:
        self._settings = settings
        self._uniform = uniform
        self._num_failures = 0

    def next_wait_s(self) -> float:
        """Count a failure; seconds to wait before the next try."""
        # The exponent is bounded: 2.0**1024 is an overflow, and the maximum is long reached.
        ceiling = self._settings.initial_backoff_s * 2.0 ** min(self._num_failures, 60)
        self._num_failures += 1
        return self._uniform(0.0, min(self._settings.max_backoff_s, ceiling))

    def reset(self) -> None:
        """Count a success."""
        self._num_failures = 0


class Availability:
    """Whether a pool that may be down is up, and whether it is time to find out.

    After a failure the pool counts as down, and is left alone for a backoff. Then somebody may probe it.

    Attributes:
        up: the last call was answered.
    """

    def __init__(self, settings: RetrySettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._backoff = Backoff(settings)
        self._clock = clock
        self._closed_until = 0.0
        self.up = True

    @property
    def probe_due(self) -> bool:
        """The pool is down, and its backoff is over."""
        return not self.up and self._clock() >= self._closed_until

    def succeeded(self) -> None:
        """A call was answered."""
        self._backoff.reset()
        self.up = True

    def probed(self) -> None:
        """The pool gave a sign of life. Only an answered call ends the row of failures."""
        self.up = True

    def failed(self) -> float:
        """A call failed or was late; seconds the pool is left alone.

        Calls that were under way together fail together: while the pool is left alone, that is one failure.
        """
        if self.up or self.probe_due:
            self.up = False
            self._closed_until = self._clock() + self._backoff.next_wait_s()
        return self._closed_until - self._clock()
