"""Which KV blocks are free, used, shared and cached: bookkeeping only, no tensors.

A block holds `BLOCK_SIZE` consecutive token positions of one sequence, for all layers. A full block can be given a key
(`specdec.cache.keys`); from then on its contents never change, and other sequences that begin with the same tokens
share it. When the last of them lets go, it stays findable until its space is needed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from specdec.errors import SpecdecError

BLOCK_SIZE = 64
"""Token positions in a block; also the width of one attention product (see `specdec.runner.attention`)."""


class OutOfBlocksError(SpecdecError):
    """The pool has fewer free blocks than asked for."""


def num_blocks_for(num_tokens: int) -> int:
    """Blocks needed to hold ``num_tokens`` positions."""
    return -(-num_tokens // BLOCK_SIZE)


class BlockPool:
    """A fixed number of blocks with reference counts. Not thread-safe: one worker thread owns it.

    The blocks of a sequence are its table, in order of position. Those with keys come first in it, and the key of each
    stands for all tokens up to its end. So whoever uses a block uses its parent too, and a block that nobody uses has
    no used child: every unused block can be taken, children before parents.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_users = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        # Unused blocks without a key, the next to be taken last: what was used lately is taken first, so that no more
        # memory is touched than is needed.
        self._empty = list(reversed(range(num_blocks)))
        # Unused blocks with a key, the next to be taken first.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks no sequence uses; those that are cached count too."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks no sequence uses that can be found by key."""
        return len(self._cached)

    def extend(self, blocks: list[int], num_blocks: int) -> None:
        """Grow a block table in place until it has ``num_blocks`` entries.

        Raises:
            OutOfBlocksError: not enough free blocks; the table is unchanged.
        """
        missing = num_blocks - len(blocks)
        if missing > self.num_free:
            raise OutOfBlocksError(f"{missing} KV blocks needed, {self.num_free} free")
        blocks += [self._take() for _ in range(missing)]

    def release(self, blocks: list[int]) -> None:
        """Give all blocks of a table back; the table is emptied."""
        self.shrink(blocks, 0)

    def shrink(self, blocks: list[int], num_blocks: int) -> None:
        """Give back the blocks of a table beyond the first ``num_blocks``."""
        while len(blocks) > num_blocks:
            self._drop(blocks.pop())  # from the end: children become evictable before their parents

    def adopt(self, blocks: list[int], key: bytes) -> bool:
        """Append the block of this key to a table that ends in its parent; False if there is none."""
        block = self._block_of.get(key)
        if block is None:
            return False
        self._use(block)
        blocks.append(block)
        return True

    def register(self, blocks: list[int], index: int, key: bytes) -> None:
        """Make a full block of a table findable, and its contents final. The blocks before it have keys already.

        Where another block has this key, the table takes that one and gives its own back.
        """
        if index > 0 and blocks[index - 1] not in self._key_of:
            raise RuntimeError("a block is to be cached whose parent is not")
        block, known = blocks[index], self._block_of.get(key)
        if known == block:
            return
        if block in self._key_of:
            raise RuntimeError("a block has another key already")
        if known is None:
            self._key_of[block], self._block_of[key] = key, block
        else:
            self._use(known)
            blocks[index] = known
            self._drop(block)

    def is_final(self, block: int) -> bool:
        """Whether the block has a key, and must not be written to."""
        return block in self._key_of

    def replace(self, blocks: list[int], index: int) -> tuple[int, int]:
        """Exchange a block of a table for a free one, to which the caller copies the contents.

        Returns:
            The old block and the new one.

        Raises:
            OutOfBlocksError: there is no free block; the table is unchanged.
        """
        if self.num_free == 0:
            raise OutOfBlocksError("1 KV block needed, 0 free")
        old, blocks[index] = blocks[index], self._take()
        self._drop(old)
        return old, blocks[index]

    def num_freed_by(self, tables: Iterable[list[int]]) -> int:
        """How many blocks nobody would use if all these tables were released."""
        counts = Counter(block for blocks in tables for block in blocks)
        return sum(self._num_users[block] == count for block, count in counts.items())

    def forget_all(self) -> None:
        """Take all keys away: nothing will be found any more."""
        self._empty += self._cached
        self._cached.clear()
        self._key_of.clear()
        self._block_of.clear()

    def _take(self) -> int:
        """An unused block, now used: an empty one, or else the one that has been cached longest."""
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        self._num_users[block] = 1
        return block

    def _use(self, block: int) -> None:
        self._cached.pop(block, None)
        self._num_users[block] += 1

    def _drop(self, block: int) -> None:
        self._num_users[block] -= 1
        if self._num_users[block] > 0:
            return
        if block in self._key_of:
            self._cached[block] = None
        else:
            self._empty.append(block)
