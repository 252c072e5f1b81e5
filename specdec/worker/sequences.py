"""The sequences a worker holds KV for, and what happens when blocks run out.

KV is only a cache: the orchestrator can send any sequence again from its first token. So memory pressure never fails
a request: a sequence that needs blocks may take them from others, which are recomputed later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from specdec.cache.blocks import BlockPool, num_blocks_for
from specdec.sampling.history import TokenHistory
from specdec.types import SamplingParams

logger = logging.getLogger(__name__)

# A sequence in a running lane is asked for every round. One left alone for this long is done for or waiting for
# something slow, and its blocks go first.
_STALE_AFTER_S = 5.0


@dataclass(slots=True)
class CachedSequence:
    """KV of the first ``length`` tokens of a sequence.

    Attributes:
        history: the tokens the sequence is known to have, in particular those ``length`` counts: penalties and masks
            need them.
        order: age; lower is older.
        blocks: block table; may reach beyond ``length``.
        length: valid positions. Dropping rejected tokens is lowering this.
        busy: a job is computing on it.
        doomed: to be freed when that job ends.
    """

    sequence_id: str
    sampling: SamplingParams
    order: int
    last_used: float
    history: TokenHistory
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    busy: bool = False
    doomed: bool = False


class SequenceTable:
    """All sequences of a worker, and the block pool they share. Owned by the worker's step thread."""

    def __init__(self, num_blocks: int, idle_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.pool = BlockPool(num_blocks)
        self._sequences: dict[str, CachedSequence] = {}
        self._idle_timeout_s = idle_timeout_s
        self._clock = clock
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def find(self, sequence_id: str) -> CachedSequence | None:
        """The sequence, if the worker knows it."""
        return self._sequences.get(sequence_id)

    def open(self, sequence_id: str, sampling: SamplingParams, history: TokenHistory) -> CachedSequence:
        """Begin a sequence with no KV."""
        sequence = CachedSequence(sequence_id, sampling, self._num_opened, self._clock(), history)
        self._num_opened += 1
        self._sequences[sequence_id] = sequence
        return sequence

    def begin(self, sequence: CachedSequence) -> None:
        """A job starts to compute on a sequence."""
        sequence.busy = True

    def end(self, sequence: CachedSequence) -> None:
        """The job is over."""
        sequence.busy = False
        sequence.last_used = self._clock()
        if sequence.doomed:
            self.close(sequence.sequence_id)

    def close(self, sequence_id: str) -> None:
        """Free a sequence, now or when the job on it ends. An unknown one is free already."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return
        if sequence.busy:
            sequence.doomed = True
            return
        del self._sequences[sequence_id]
        self.pool.release(sequence.blocks)

    def reserve(self, sequence: CachedSequence, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` positions of a sequence, at the expense of others if need be.

        Stale sequences give way first, then those younger than this one, the youngest first: so the oldest always
        advances, and two of them cannot take each other's blocks in turn.

        Returns:
            False when there is not enough to take; nothing was taken then.
        """
        missing = num_blocks_for(num_tokens) - len(sequence.blocks) - self.pool.num_free
        if missing > 0:
            victims = self._victims(sequence)
            if sum(len(victim.blocks) for victim in victims) < missing:
                return False
            for victim in victims:
                if num_blocks_for(num_tokens) - len(sequence.blocks) <= self.pool.num_free:
                    break
                logger.info("out of KV blocks: %s is preempted for %s", victim.sequence_id, sequence.sequence_id)
                self.close(victim.sequence_id)
        self.pool.extend(sequence.blocks, num_blocks_for(num_tokens))
        return True

    def sweep(self) -> None:
        """Free the sequences nobody has asked for in the idle time."""
        oldest = self._clock() - self._idle_timeout_s
        self._close_all(s.sequence_id for s in self._sequences.values() if not s.busy and s.last_used < oldest)

    def clear(self) -> None:
        """Free every sequence."""
        self._close_all(self._sequences)

    def _close_all(self, sequence_ids: Iterable[str]) -> None:
        for sequence_id in list(sequence_ids):
            self.close(sequence_id)

    def _victims(self, sequence: CachedSequence) -> list[CachedSequence]:
        """Sequences that may lose their blocks to this one, in the order in which they do."""
        stale = self._clock() - _STALE_AFTER_S
        others = [other for other in self._sequences.values() if other is not sequence and not other.busy]
        gone = sorted((s for s in others if s.last_used < stale), key=lambda s: s.last_used)
        younger = sorted(
            (s for s in others if s.last_used >= stale and s.order > sequence.order), key=lambda s: -s.order
        )
        return gone + younger
