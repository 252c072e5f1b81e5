from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specdec.cache.blocks import BLOCK_SIZE, BlockPool, OutOfBlocksError, contiguous_runs, num_blocks_for


class PoolMachine(RuleBasedStateMachine):
    """Random use of a pool by some sequences, against plain sets."""

    @initialize(num_blocks=st.integers(0, 24))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.total = num_blocks
        self.tables: list[list[int]] = [[] for _ in range(4)]

    def free(self) -> set[int]:
        return set(range(self.total)) - {block for table in self.tables for block in table}

    @rule(who=st.integers(0, 3), size=st.integers(0, 12))
    def extend(self, who: int, size: int) -> None:
        table, free = self.tables[who], self.free()
        before = list(table)
        if size - len(before) > len(free):
            with pytest.raises(OutOfBlocksError):
                self.pool.extend(table, size)
            assert table == before
            return
        self.pool.extend(table, size)
        added = table[len(before) :]
        assert table[: len(before)] == before
        assert len(table) == max(size, len(before))
        assert set(added) <= free
        self.check_neighbours(before, added, free)

    def check_neighbours(self, before: list[int], added: list[int], free: set[int]) -> None:
        """A table that can grow in place does; otherwise what is added is one run where one is free."""
        if before and added and before[-1] + 1 in free:
            assert added[0] == before[-1] + 1
        elif added and any(set(range(s, s + len(added))) <= free for s in range(self.total)):
            assert len(contiguous_runs(added)) == 1

    @rule(who=st.integers(0, 3))
    def release(self, who: int) -> None:
        self.pool.release(self.tables[who])
        assert self.tables[who] == []

    @rule(who=st.integers(0, 3), size=st.integers(0, 12))
    def shrink(self, who: int, size: int) -> None:
        before = list(self.tables[who])
        self.pool.shrink(self.tables[who], size)
        assert self.tables[who] == before[:size]

    @invariant()
    def nothing_is_owned_twice_and_the_count_is_right(self) -> None:
        owned = [block for table in self.tables for block in table]
        assert len(set(owned)) == len(owned)
        assert self.pool.num_free == self.total - len(owned)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_new_sequence_leaves_the_one_before_it_room_to_grow() -> None:
    pool = BlockPool(32)
    first: list[int] = []
    second: list[int] = []
    for length in range(1, 8):
        pool.extend(first, length)
        pool.extend(second, length)
    assert len(contiguous_runs(first)) == len(contiguous_runs(second)) == 1


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


@pytest.mark.parametrize(
    ("blocks", "runs"),
    [
        ([], []),
        ([5], [(5, 1)]),
        ([2, 3, 4], [(2, 3)]),
        ([4, 3, 2], [(4, 1), (3, 1), (2, 1)]),
        ([0, 1, 7, 8, 9, 2], [(0, 2), (7, 3), (2, 1)]),
    ],
)
def test_contiguous_runs(blocks: list[int], runs: list[tuple[int, int]]) -> None:
    assert contiguous_runs(blocks) == runs


def test_blocks_for_tokens() -> None:
    assert [num_blocks_for(n) for n in (0, 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE)] == [0, 1, 1, 2, 3]
