"""Which KV blocks are free: bookkeeping only, no tensors.

A block holds `BLOCK_SIZE` consecutive token positions of one sequence, for all layers. Sequences get
neighbouring blocks where possible, since attention on CPU reads a run of neighbours as a view, without a copy.
"""

from __future__ import annotations

from specdec.errors import SpecdecError

BLOCK_SIZE = 64
"""Token positions in a block; also the width of one attention product (see `specdec.runner.attention`)."""


class OutOfBlocksError(SpecdecError):
    """The pool has fewer free blocks than asked for."""


def num_blocks_for(num_tokens: int) -> int:
    """Blocks needed to hold ``num_tokens`` positions."""
    return -(-num_tokens // BLOCK_SIZE)


class BlockPool:
    """A fixed number of blocks, each free or owned by one sequence. Not thread-safe: one worker thread owns it."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._is_free = [True] * num_blocks
        self.num_free = num_blocks

    def extend(self, blocks: list[int], num_blocks: int) -> None:
        """Grow a block table in place until it has ``num_blocks`` entries.

        Raises:
            OutOfBlocksError: not enough free blocks; the table is unchanged.
        """
        missing = num_blocks - len(blocks)
        if missing <= 0:
            return
        if missing > self.num_free:
            raise OutOfBlocksError(f"{missing} KV blocks needed, {self.num_free} free")
        following = blocks[-1] + 1 if blocks else None
        while missing:
            if following is None or following >= self.num_blocks or not self._is_free[following]:
                following = self._best_start(missing)
            self._is_free[following] = False
            blocks.append(following)
            following += 1
            missing -= 1
            self.num_free -= 1

    def release(self, blocks: list[int]) -> None:
        """Give all blocks of a table back; the table is emptied."""
        for block in blocks:
            self._is_free[block] = True
        self.num_free += len(blocks)
        blocks.clear()

    def shrink(self, blocks: list[int], num_blocks: int) -> None:
        """Give back the blocks of a table beyond the first ``num_blocks``."""
        surplus = blocks[num_blocks:]
        del blocks[num_blocks:]
        self.release(surplus)

    def _best_start(self, length: int) -> int:
        """A free block to begin a new run at: the middle of the longest free run, so that the sequence before it
        and the new one both have room to grow; its start where the run would otherwise be too short.
        """
        best_start, best_length, start = 0, 0, None
        for block in range(self.num_blocks + 1):
            free = block < self.num_blocks and self._is_free[block]
            if free and start is None:
                start = block
            elif not free and start is not None:
                if block - start > best_length:
                    best_start, best_length = start, block - start
                start = None
        used_before = best_start > 0
        return best_start + best_length // 2 if used_before and best_length >= 2 * length else best_start


def contiguous_runs(blocks: list[int]) -> list[tuple[int, int]]:
    """A block table as (first block, number of blocks) of each run of neighbours, in order."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and block == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs
