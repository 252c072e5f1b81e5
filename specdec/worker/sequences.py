"""The sequences a worker holds KV for, and what happens when blocks run out.

KV is only a cache: the orchestrator can send any sequence again from its first token. So memory pressure never fails
a request: a sequence that needs blocks may take them from others, which are recomputed later.

Full blocks of committed tokens are registered by key when a job ends. A sequence that is sent whole takes over the
longest chain of them that its tokens begin with, whoever computed it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from specdec.cache.blocks import BLOCK_SIZE, BlockPool, num_blocks_for
from specdec.cache.keys import KVIdentity, block_key
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
        token_ids: the tokens whose KV is held, drafted ones included while they may still turn out right.
        root_key: the parent of the first block's key.
        keys: of the first blocks, those that are registered.
        busy: a job is computing on it.
        doomed: to be freed when that job ends.
    """

    sequence_id: str
    sampling: SamplingParams
    order: int
    last_used: float
    history: TokenHistory
    blocks: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    root_key: bytes = b""
    keys: list[bytes] = field(default_factory=list)
    busy: bool = False
    doomed: bool = False

    @property
    def length(self) -> int:
        """Valid positions."""
        return len(self.token_ids)

    def crop(self, length: int) -> None:
        """Drop all tokens but the first ``length``. Their blocks stay in the table."""
        del self.token_ids[length:]


class SequenceTable:
    """All sequences of a worker, and the block pool they share. Owned by the worker's step thread.

    Attributes:
        num_prefix_hits, num_prefix_misses: tokens of sequences begun so far, with KV in the cache and without.
    """

    def __init__(
        self,
        num_blocks: int,
        idle_timeout_s: float,
        *,
        identity: KVIdentity | None,
        copy_block: Callable[[int, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            identity: of the KV; None caches no prefixes.
            copy_block: copies a block's contents to another block.
        """
        self.pool = BlockPool(num_blocks)
        self.num_prefix_hits = 0
        self.num_prefix_misses = 0
        self._sequences: dict[str, CachedSequence] = {}
        self._idle_timeout_s = idle_timeout_s
        self._identity = identity
        self._copy_block = copy_block
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

    def restart(self, sequence: CachedSequence, token_ids: list[int], cache_salt: str | None) -> None:
        """Let a sequence hold what the cache has of its tokens, and nothing else. The last token is always left to be
        computed, since the next token is chosen from its logits.
        """
        self.pool.release(sequence.blocks)
        sequence.keys.clear()
        sequence.token_ids.clear()
        if self._identity is None:
            return
        key = sequence.root_key = self._identity.root_key(cache_salt)
        for start in range(0, (len(token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE):
            key = block_key(key, token_ids[start : start + BLOCK_SIZE])
            if not self.pool.adopt(sequence.blocks, key):
                break
            sequence.keys.append(key)
            sequence.token_ids += token_ids[start : start + BLOCK_SIZE]

    def crop(self, sequence: CachedSequence, length: int) -> None:
        """Drop what a sequence holds beyond its first ``length`` tokens, and the blocks for it."""
        sequence.crop(length)
        self.pool.shrink(sequence.blocks, num_blocks_for(length))
        del sequence.keys[length // BLOCK_SIZE :]

    def begin(self, sequence: CachedSequence, num_cached: int, num_missing: int) -> None:
        """A job starts to compute on a sequence.

        Args:
            num_cached, num_missing: tokens of a sequence sent whole with KV in the cache and without; else 0.
        """
        sequence.busy = True
        self.num_prefix_hits += num_cached
        self.num_prefix_misses += num_missing

    def end(self, sequence: CachedSequence, num_committed: int) -> None:
        """The job is over. Full blocks of the first ``num_committed`` tokens are registered: guesses never are."""
        self._register(sequence, min(num_committed, sequence.length))
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
        """Make room for ``num_tokens`` positions of a sequence, at the expense of others if need be, and make the
        block its next token goes to its own.

        Blocks that are only cached go first, then those of stale sequences, then of those younger than this one, the
        youngest first: so the oldest always advances, and two of them cannot take each other's blocks in turn.

        Returns:
            False when there is not enough to take; nothing was taken then.
        """
        last = len(sequence.blocks) - 1
        copied = sequence.length % BLOCK_SIZE != 0 and self.pool.is_final(sequence.blocks[last])
        needed = num_blocks_for(num_tokens) - len(sequence.blocks) + copied
        if needed > self.pool.num_free and not self._preempt_for(sequence, needed):
            return False
        if copied:
            self._copy_block(*self.pool.replace(sequence.blocks, last))
        self.pool.extend(sequence.blocks, num_blocks_for(num_tokens))
        return True

    def sweep(self) -> None:
        """Free the sequences nobody has asked for in the idle time."""
        oldest = self._clock() - self._idle_timeout_s
        self._close_all(s.sequence_id for s in self._sequences.values() if not s.busy and s.last_used < oldest)

    def clear(self) -> None:
        """Free every sequence, none of which may be busy, and forget all that is cached."""
        self._close_all(self._sequences)
        self.pool.forget_all()

    def _close_all(self, sequence_ids: Iterable[str]) -> None:
        for sequence_id in list(sequence_ids):
            self.close(sequence_id)

    def _register(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Register the full blocks of a sequence's first tokens that are not yet."""
        if self._identity is None:
            return
        for index in range(len(sequence.keys), num_tokens // BLOCK_SIZE):
            parent = sequence.keys[-1] if sequence.keys else sequence.root_key
            key = block_key(parent, sequence.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
            self.pool.register(sequence.blocks, index, key)
            sequence.keys.append(key)

    def _preempt_for(self, sequence: CachedSequence, num_blocks: int) -> bool:
        """Close other sequences until ``num_blocks`` are free; False, and none is, where that cannot be reached."""
        victims = self._victims(sequence)
        if self.pool.num_free + self.pool.num_freed_by(victim.blocks for victim in victims) < num_blocks:
            return False
        for victim in victims:
            if num_blocks <= self.pool.num_free:
                break
            logger.info("out of KV blocks: %s is preempted for %s", victim.sequence_id, sequence.sequence_id)
            self.close(victim.sequence_id)
        return True

    def _victims(self, sequence: CachedSequence) -> list[CachedSequence]:
        """Sequences that may lose their blocks to this one, in the order in which they do."""
        stale = self._clock() - _STALE_AFTER_S
        others = [other for other in self._sequences.values() if other is not sequence and not other.busy]
        gone = sorted((s for s in others if s.last_used < stale), key=lambda s: s.last_used)
        younger = sorted(
            (s for s in others if s.last_used >= stale and s.order > sequence.order), key=lambda s: -s.order
        )
        return gone + younger
