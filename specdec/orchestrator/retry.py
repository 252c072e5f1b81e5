"""Exponential backoff with jitter."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from specdec.config import RetrySettings


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
    """Whether a pool that may be down is worth a call now.

    After a failure the pool is left alone for a backoff; then one caller's call is the test.
    """

    def __init__(self, settings: RetrySettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._backoff = Backoff(settings)
        self._clock = clock
        self._closed_until = 0.0

    @property
    def available(self) -> bool:
        """The pool answered last time, or its backoff is over."""
        return self._clock() >= self._closed_until

    def succeeded(self) -> None:
        """A call was answered."""
        self._backoff.reset()
        self._closed_until = 0.0

    def failed(self) -> float:
        """A call failed or was late; seconds the pool is left alone.

        Calls that were under way together fail together: while the pool is left alone, that is one failure.
        """
        if self.available:
            self._closed_until = self._clock() + self._backoff.next_wait_s()
        return self._closed_until - self._clock()
