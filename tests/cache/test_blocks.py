from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specdec.cache.blocks import BLOCK_SIZE, BlockPool, OutOfBlocksError, num_blocks_for

NUM_TABLES = 4
tables = st.integers(0, NUM_TABLES - 1)


@dataclass
class Table:
    """A block table, and the names of its first blocks: a key is the path of letters from the first block on."""

    blocks: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def path(self) -> str:
        return self.names[-1] if self.names else ""

    def cut(self, size: int) -> None:
        del self.blocks[size:]
        del self.names[size:]


class PoolMachine(RuleBasedStateMachine):
    """Random use of a pool by some sequences, against a model that counts everything anew.

    Attributes:
        known: the model's idea of which blocks can be found.
        last_used: when each of them was last let go of.
    """

    @initialize(num_blocks=st.integers(0, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.total = num_blocks
        self.tables = [Table() for _ in range(NUM_TABLES)]
        self.known: dict[str, int] = {}
        self.last_used: dict[str, int] = {}
        self.now = 0

    # --- the model ---

    def users(self) -> Counter[int]:
        return Counter(block for table in self.tables for block in table.blocks)

    def num_free(self) -> int:
        return self.total - len(self.users())

    def expect_taken(self, count: int) -> None:
        """Taking this many blocks uses up the empty ones, then evicts the leaf that has been unused the longest."""
        used = self.users()
        num_empty = self.total - len(set(used) | set(self.known.values()))
        for _ in range(count - num_empty):
            unused = [name for name, block in self.known.items() if block not in used]
            leaves = [name for name in unused if not any(n != name and n.startswith(name) for n in self.known)]
            del self.known[min(leaves, key=lambda name: self.last_used[name])]

    def let_go(self, table: Table, size: int) -> None:
        for name in table.names[size:]:
            self.last_used[name] = self.now
        table.cut(size)

    # --- what sequences do ---

    @rule(who=tables, size=st.integers(0, 8))
    def extend(self, who: int, size: int) -> None:
        table = self.tables[who]
        before, missing, used = list(table.blocks), size - len(table.blocks), set(self.users())
        if missing > self.num_free():
            with pytest.raises(OutOfBlocksError):
                self.pool.extend(table.blocks, size)
            assert table.blocks == before
            return
        self.expect_taken(missing)
        self.pool.extend(table.blocks, size)
        assert table.blocks[: len(before)] == before
        assert len(table.blocks) == max(size, len(before))
        assert not used & set(table.blocks[len(before) :])

    @rule(who=tables, size=st.integers(0, 8))
    def shrink(self, who: int, size: int) -> None:
        self.now += 1
        table, expected = self.tables[who], self.tables[who].blocks[:size]
        blocks = list(table.blocks)
        self.let_go(table, size)
        self.pool.shrink(blocks, size)
        assert blocks == expected == table.blocks

    @rule(who=tables)
    def release(self, who: int) -> None:
        self.now += 1
        blocks = list(self.tables[who].blocks)
        self.let_go(self.tables[who], 0)
        self.pool.release(blocks)
        assert blocks == []

    @rule(who=tables, letter=st.sampled_from("ab"))
    def register(self, who: int, letter: str) -> None:
        table = self.tables[who]
        index = len(table.names)
        if index == len(table.blocks):
            return
        name, before = table.path + letter, list(table.blocks)
        self.pool.register(table.blocks, index, name.encode())
        table.names.append(name)
        self.known.setdefault(name, before[index])
        before[index] = self.known[name]
        assert table.blocks == before

    @rule(who=tables, path=st.text("ab", max_size=6))
    def adopt(self, who: int, path: str) -> None:
        table = self.tables[who]
        if len(table.names) < len(table.blocks):
            return
        for letter in path:
            name = table.path + letter
            assert self.pool.adopt(table.blocks, name.encode()) == (name in self.known)
            if name not in self.known:
                break
            table.names.append(name)
            assert table.blocks[-1] == self.known[name]

    @rule(who=tables)
    def write_into_the_last_final_block(self, who: int) -> None:
        self.now += 1
        table = self.tables[who]
        index = len(table.names) - 1
        if index < 0:
            return
        self.pool.shrink(table.blocks, index + 1)
        if self.num_free() == 0:
            with pytest.raises(OutOfBlocksError):
                self.pool.replace(table.blocks, index)
            return
        self.expect_taken(1)
        old, new = self.pool.replace(table.blocks, index)
        self.last_used[table.names[index]] = self.now
        assert self.known[table.names.pop()] == old
        assert table.blocks[index] == new
        assert not self.pool.is_final(new)

    @rule()
    def fail(self) -> None:
        for who in range(NUM_TABLES):
            self.release(who)
        self.pool.forget_all()
        self.known.clear()
        assert self.pool.num_cached == 0

    # --- what holds at every step ---

    @invariant()
    def the_counts_are_right(self) -> None:
        if not hasattr(self, "pool"):
            return
        users = self.users()
        assert [self.pool._num_users[block] for block in range(self.total)] == [users[b] for b in range(self.total)]
        assert self.pool.num_free == self.num_free()
        assert self.pool.num_cached == len(set(self.known.values()) - set(users))
        lying = [*self.pool._empty, *self.pool._cached]
        assert sorted(lying) == sorted(set(range(self.total)) - set(users)), "a block is lost or free twice"
        for table in self.tables:
            assert len(set(table.blocks)) == len(table.blocks)
        chosen = [table.blocks for table in self.tables[:2]]
        kept = {block for table in self.tables[2:] for block in table.blocks}
        assert self.pool.num_freed_by(chosen) == len({block for blocks in chosen for block in blocks} - kept)

    @invariant()
    def what_is_known_can_be_found_and_no_child_is_without_its_parent(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool._block_of == {name.encode(): block for name, block in self.known.items()}
        assert all(name[:-1] in self.known for name in self.known if len(name) > 1)
        for table in self.tables:
            assert [self.pool.is_final(block) for block in table.blocks] == [
                index < len(table.names) for index in range(len(table.blocks))
            ]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_the_whole_pool_can_be_taken_in_pieces() -> None:
    pool = BlockPool(9)
    tables: list[list[int]] = [[], [], []]
    for length in range(1, 4):
        for table in tables:
            pool.extend(table, length)
    assert sorted(block for table in tables for block in table) == list(range(9))
    with pytest.raises(OutOfBlocksError, match="1 KV blocks needed, 0 free"):
        pool.extend(tables[0], 4)
    pool.release(tables[1])
    pool.extend(tables[0], 6)
    assert pool.num_free == 0


def test_no_more_blocks_are_touched_than_were_ever_used_at_once() -> None:
    pool = BlockPool(32)
    touched = set()
    for length in (3, 1, 4, 1, 5):
        table: list[int] = []
        pool.extend(table, length)
        touched |= set(table)
        pool.release(table)
    assert touched == set(range(5))


def cached_chain(pool: BlockPool, *keys: bytes) -> None:
    """Cache a chain of blocks that nobody uses."""
    table: list[int] = []
    pool.extend(table, len(keys))
    for index, key in enumerate(keys):
        pool.register(table, index, key)
    pool.release(table)


def test_the_least_recently_used_chain_goes_first_and_from_its_end() -> None:
    pool = BlockPool(4)
    cached_chain(pool, b"a", b"ab")
    cached_chain(pool, b"x", b"xy")
    table: list[int] = []
    assert pool.adopt(table, b"a")  # a is used again; ab is not
    pool.release(table)
    for count, left in enumerate(([b"a", b"x", b"xy"], [b"a", b"x"], [b"a"], []), start=1):
        pool.extend(table, count)
        assert sorted(pool._block_of) == left


def test_a_block_is_not_cached_before_its_parent_nor_under_two_keys() -> None:
    pool = BlockPool(3)
    table: list[int] = []
    pool.extend(table, 2)
    with pytest.raises(RuntimeError, match="whose parent is not"):
        pool.register(table, 1, b"child")
    pool.register(table, 0, b"a")
    with pytest.raises(RuntimeError, match="another key"):
        pool.register(table, 0, b"b")


def test_blocks_for_tokens() -> None:
    assert [num_blocks_for(n) for n in (0, 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE)] == [0, 1, 1, 2, 3]
