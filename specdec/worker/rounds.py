"""When the next decode rows will come."""

from __future__ import annotations

import math
from collections.abc import Callable

# After this long without a round nobody is decoding.
_FORGET_AFTER_S = 0.5
# No longer than this is worth waiting for a round; beyond it, the time is better spent on prefill.
_MAX_WAIT_S = 0.05
_SMOOTHING = 0.2


class RoundClock:
    """Learns how soon a round follows the one before.

    Between two rounds of a lane a worker has nothing of it to compute. A piece of somebody's prompt begun in that
    moment would make the round wait, so a worker holds prefill back while the next round is due.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended = -math.inf
        self._usual_pause_s = 0.0

    @property
    def decoding(self) -> bool:
        """Whether there was a round lately."""
        return self._clock() < self._ended + _FORGET_AFTER_S

    @property
    def due(self) -> bool:
        """Whether the next round should come any moment."""
        return self._clock() < self._ended + min(2.0 * self._usual_pause_s, _MAX_WAIT_S)

    def begin(self) -> None:
        """Decode rows are about to be computed."""
        if self.decoding:
            self._usual_pause_s += _SMOOTHING * (self._clock() - self._ended - self._usual_pause_s)

    def end(self) -> None:
        """Decode rows were computed."""
        self._ended = self._clock()
