"""What sequences share of each other's KV, and what they never do; stepped by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specdec.cache.blocks import BLOCK_SIZE
from specdec.types import ProposeItem, SamplingParams, VerifyItem
from specdec.worker.calls import Call, Result
from specdec.worker.jobs import VerifyJob
from specdec.worker.scheduler import Scheduler
from specdec.worker.sequences import CachedSequence, SequenceTable
from tests.worker.prefix_runner import VOCAB_SIZE, FakeClock, PrefixRunner, make_scheduler, plain_tokens, step, whole

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, top_k=8, seed=5)
COMMON = [(n * n + n // 7) % VOCAB_SIZE for n in range(200)]


class Bench:
    """A scheduler and its runner, and what was fed since it was last asked."""

    def __init__(self, *, prefix_cache: bool = True, num_blocks: int = 64, max_tokens: int = 48) -> None:
        self.runner = PrefixRunner(num_blocks=num_blocks, max_tokens=max_tokens)
        self.clock = FakeClock()
        self.scheduler: Scheduler = make_scheduler(self.runner, self.clock, prefix_cache=prefix_cache)
        self.pool = self.scheduler.table.pool

    def submit(self, item: VerifyItem | ProposeItem) -> Call:
        call = Call([item])
        self.scheduler.add(call)
        return call

    def finish(self) -> None:
        while step(self.scheduler, self.runner):
            pass

    def ask(self, item: VerifyItem | ProposeItem) -> Result:
        call = self.submit(item)
        self.finish()
        assert call.future.done(), "not answered"
        return call.future.result()[0]

    def num_fed(self) -> int:
        """Rows computed since the last time."""
        count = sum(len(rows.token_ids) for forward in self.runner.forwards for rows in forward)
        self.runner.forwards.clear()
        return count

    def findable(self) -> list[list[int | None]]:
        """The contents of all blocks that later sequences could find."""
        return [self.runner.held(block) for block in self.pool._block_of.values()]


def blocks_of(tokens: list[int]) -> list[list[int]]:
    """A sequence's full blocks."""
    return [tokens[start : start + BLOCK_SIZE] for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE)]


def in_order(blocks: list[list[int | None]]) -> list[list[int | None]]:
    return sorted(blocks, key=str)


@pytest.mark.parametrize("released", [True, False])
def test_a_common_prefix_is_computed_once(released: bool) -> None:
    bench = Bench()
    assert bench.ask(whole("a", [*COMMON, 1, 2], [], GREEDY)).num_cached_tokens == 0
    assert bench.num_fed() == 202
    if released:
        bench.scheduler.release(["a"])
    before = bench.pool.num_free
    for name, params in (("b", GREEDY), ("c", SAMPLED)):
        result = bench.ask(whole(name, [*COMMON, 3, 4, 5], [], params))
        assert result.output == plain_tokens([*COMMON, 3, 4, 5], params, 1)
        assert result.num_cached_tokens == 192
        assert bench.num_fed() == 203 - 192
    # Three blocks are shared; each sequence has one of its own.
    assert bench.pool.num_free == before - 2 - (3 if released else 0)
    bench.scheduler.release(["a", "b", "c"])
    assert bench.pool.num_free == bench.pool.num_blocks
    assert bench.pool.num_cached == 3


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129])
def test_the_last_token_is_always_computed(length: int) -> None:
    bench, tokens = Bench(), COMMON[:length]
    target = plain_tokens(tokens, GREEDY, 4)
    assert bench.ask(whole("a", tokens, [], GREEDY)).output == target[:1]
    bench.num_fed()
    result = bench.ask(whole("b", tokens, target[:3], GREEDY))
    assert (result.output, result.num_accepted) == (target, 3)
    assert result.num_cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert bench.num_fed() == length - result.num_cached_tokens + 3
    result = bench.ask(ProposeItem("c", 0, tokens, 3, GREEDY))
    assert result.draft == target[:3]
    # Bringing a worker up to date, with nothing to draft, is answered too.
    assert bench.ask(ProposeItem("d", 0, tokens, 0, GREEDY)).error is None


def test_what_was_generated_is_found_by_the_next_turn() -> None:
    bench, tokens = Bench(), COMMON[:100]
    target = plain_tokens(tokens, GREEDY, 40)
    first = bench.ask(whole("a", tokens, target[:35], GREEDY))
    assert first.num_accepted == 35
    bench.scheduler.release(["a"])
    second = bench.ask(whole("b", [*tokens, *target[:36], 7, 7], [], GREEDY))
    assert second.num_cached_tokens == 128
    assert second.output == plain_tokens([*tokens, *target[:36], 7, 7], GREEDY, 1)


def test_sequences_that_computed_the_same_side_by_side_end_up_sharing() -> None:
    bench = Bench(max_tokens=400)
    calls = [bench.submit(whole(name, COMMON[:150], [], GREEDY)) for name in ("a", "b")]
    bench.finish()
    assert bench.num_fed() == 300
    assert all(call.future.result()[0].output == plain_tokens(COMMON[:150], GREEDY, 1) for call in calls)
    assert bench.pool.num_blocks - bench.pool.num_free == 2 + 1 + 1
    for name in ("a", "b"):
        again = bench.ask(VerifyItem(name, 150, [3], []))
        assert again.output == plain_tokens([*COMMON[:150], 3], GREEDY, 1)


def test_who_writes_into_a_shared_block_gets_a_copy() -> None:
    bench = Bench()
    for name in ("a", "b"):
        bench.ask(whole(name, COMMON[:130], [], GREEDY))
    # "a" goes back to the middle of a block that it shares with "b", and on with something else.
    other = [*COMMON[:100], 9, 9, 9]
    assert bench.ask(VerifyItem("a", 100, [9, 9, 9], [])).output == plain_tokens(other, GREEDY, 1)
    assert bench.runner.num_copies == 1
    assert bench.ask(VerifyItem("b", 130, [1], [])).output == plain_tokens([*COMMON[:130], 1], GREEDY, 1)
    assert bench.ask(VerifyItem("a", 103, [4], [])).output == plain_tokens([*other, 4], GREEDY, 1)
    third = bench.ask(whole("c", COMMON[:130], [], GREEDY))
    assert (third.num_cached_tokens, third.output) == (128, plain_tokens(COMMON[:130], GREEDY, 1))
    assert bench.runner.num_copies == 1
    bench.scheduler.release(["a", "b", "c"])
    assert bench.pool.num_free == bench.pool.num_blocks


def test_what_follows_after_going_back_is_found_under_its_own_name() -> None:
    bench = Bench()
    bench.ask(whole("a", COMMON[:130], [], GREEDY))
    other = [*COMMON[:100], *COMMON[:100]]
    bench.ask(VerifyItem("a", 100, other[100:], []))
    for text in (other, COMMON[:130]):
        result = bench.ask(whole("b", text, [], GREEDY))
        assert result.output == plain_tokens(text, GREEDY, 1)
        assert result.num_cached_tokens == len(text) // BLOCK_SIZE * BLOCK_SIZE


def test_going_back_to_the_end_of_a_block_copies_nothing() -> None:
    bench = Bench()
    for name in ("a", "b"):
        bench.ask(whole(name, COMMON[:130], [], GREEDY))
    other = [*COMMON[:64], 9]
    assert bench.ask(VerifyItem("a", 64, [9], [])).output == plain_tokens(other, GREEDY, 1)
    assert bench.ask(VerifyItem("b", 130, [1], [])).output == plain_tokens([*COMMON[:130], 1], GREEDY, 1)
    assert bench.runner.num_copies == 0


def test_no_room_for_a_copy_asks_for_the_sequence_whole() -> None:
    bench = Bench(num_blocks=3)
    bench.ask(whole("old", COMMON[:64], [], GREEDY))
    bench.ask(whole("a", COMMON[:129], [], GREEDY))
    assert bench.ask(VerifyItem("a", 100, [9], [])).output == plain_tokens([*COMMON[:100], 9], GREEDY, 1)
    bench = Bench(num_blocks=2)
    bench.ask(whole("a", COMMON[:128], [], GREEDY))
    assert bench.ask(VerifyItem("a", 100, [9], [])).need_from == 0
    again = bench.ask(whole("a", [*COMMON[:100], 9], [], GREEDY))
    assert (again.num_cached_tokens, again.output) == (64, plain_tokens([*COMMON[:100], 9], GREEDY, 1))


def drafts_across_blocks() -> Bench:
    """Wrong and right drafts over the ends of blocks, on a target and (the same scheduler) a draft worker."""
    bench = Bench()
    for name, length in (("a", 60), ("b", 127)):
        tokens = COMMON[:length]
        target = plain_tokens(tokens, GREEDY, 3)
        wrong = (target[2] + 1) % VOCAB_SIZE
        bench.ask(whole(name, tokens, [*target[:2], wrong, *COMMON[:9]], GREEDY))
        # The same sequence is drafted for: of the draft nothing is committed.
        bench.ask(ProposeItem(f"{name} drafted", 0, tokens, 12, GREEDY))
    return bench


COMMITTED_BLOCKS = in_order([*blocks_of(COMMON[:64]), [*COMMON[64:127], *plain_tokens(COMMON[:127], GREEDY, 1)]])


def test_a_draft_is_never_found_before_it_is_verified() -> None:
    bench = drafts_across_blocks()
    assert in_order(bench.findable()) == COMMITTED_BLOCKS
    # Once what was drafted is committed, it is found.
    drafted = plain_tokens(COMMON[:60], GREEDY, 8)
    bench.ask(ProposeItem("a drafted", 66, drafted[6:7], 1))
    assert [*COMMON[:60], *drafted[:4]] in bench.findable()


def test_a_target_that_keeps_unverified_drafts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_choices(self: VerifyJob, tokens: list[int], logprobs: Sequence[object]) -> None:
        self.result.output = tokens[:1]
        self.num_committed = self.sequence.length
        self.done = True

    monkeypatch.setattr(VerifyJob, "take_choices", take_choices)
    assert in_order(drafts_across_blocks().findable()) != COMMITTED_BLOCKS


def test_a_drafter_that_registers_its_drafts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    end = SequenceTable.end

    def register_all(self: SequenceTable, sequence: CachedSequence, num_committed: int) -> None:
        end(self, sequence, sequence.length)

    monkeypatch.setattr(SequenceTable, "end", register_all)
    assert in_order(drafts_across_blocks().findable()) != COMMITTED_BLOCKS


def test_salts_share_nothing() -> None:
    bench = Bench()
    for salt in (None, "a", "b"):
        item = VerifyItem(f"first {salt}", 0, COMMON, [], GREEDY, cache_salt=salt)
        assert bench.ask(item).num_cached_tokens == 0
    for salt in (None, "a", "b"):
        verify, propose = (
            VerifyItem(f"v {salt}", 0, COMMON, [], GREEDY, cache_salt=salt),
            ProposeItem("p", 0, COMMON, 1, GREEDY, cache_salt=salt),
        )
        for item in (verify, propose):
            assert bench.ask(item).num_cached_tokens == 192
    assert bench.pool.num_cached == 0
    assert len(bench.findable()) == 9


def test_a_reused_id_has_its_own_salt() -> None:
    bench = Bench()
    bench.ask(VerifyItem("a", 0, COMMON, [], GREEDY, cache_salt="old"))
    assert bench.ask(VerifyItem("a", 0, COMMON, [], GREEDY, cache_salt="new")).num_cached_tokens == 0
    assert bench.ask(VerifyItem("b", 0, COMMON, [], GREEDY, cache_salt="new")).num_cached_tokens == 192


def test_it_can_be_switched_off() -> None:
    bench = Bench(prefix_cache=False)
    for name in ("a", "b", "a"):
        result = bench.ask(whole(name, COMMON, [], GREEDY))
        assert (result.num_cached_tokens, result.output) == (0, plain_tokens(COMMON, GREEDY, 1))
        assert bench.num_fed() == len(COMMON)
    assert bench.findable() == []


def test_what_is_only_cached_goes_before_any_sequence_and_the_oldest_first() -> None:
    bench = Bench(num_blocks=6)
    prompts = {name: [n, *COMMON[:64]] for n, name in enumerate(("stale", "first", "second"))}
    bench.ask(whole("stale", prompts["stale"], [], GREEDY))
    for name in ("first", "second"):
        bench.ask(whole(name, prompts[name], [], GREEDY))
        bench.scheduler.release([name])
    bench.clock.now += 60.0
    assert (bench.pool.num_free, bench.pool.num_cached) == (4, 2)
    bench.ask(whole("new", COMMON[:150], [], GREEDY))
    assert bench.scheduler.table.find("stale") is not None
    bench.scheduler.release(["new"])
    assert bench.ask(whole("second again", prompts["second"], [], GREEDY)).num_cached_tokens == 64
    assert bench.ask(whole("first again", prompts["first"], [], GREEDY)).num_cached_tokens == 0


def test_a_preempted_sequence_finds_what_is_left_of_it() -> None:
    bench = Bench(num_blocks=5)
    bench.ask(whole("old", [5, *COMMON[:60]], [], GREEDY))
    bench.ask(whole("young", COMMON[:200], [], GREEDY))
    assert bench.pool.num_free == 0
    bench.ask(VerifyItem("old", 61, COMMON[60:64], []))
    assert bench.scheduler.table.find("young") is None
    assert bench.ask(VerifyItem("young", 200, [1], [])).need_from == 0
    bench.num_fed()
    bench.scheduler.release(["old"])
    again = bench.ask(whole("young", [*COMMON, 1], [], GREEDY))
    assert again.output == plain_tokens([*COMMON, 1], GREEDY, 1)
    assert again.num_cached_tokens == 192
    assert bench.num_fed() == 201 - 192


def test_blocks_that_an_older_sequence_shares_are_not_counted_as_gained() -> None:
    bench = Bench(num_blocks=4)
    bench.ask(whole("old", COMMON[:130], [], GREEDY))
    bench.ask(whole("young", COMMON[:130], [], GREEDY))
    assert bench.pool.num_free == 0
    # The youngest's two blocks are the oldest's as well: taking them from it would give one block, not three.
    waiting = bench.submit(whole("middle", [3] * 70, [], GREEDY))
    bench.finish()
    assert not waiting.future.done()
    assert bench.scheduler.table.find("young") is not None
    grown = bench.ask(VerifyItem("old", 130, [*COMMON[130:190], 1, 2, 3], []))
    assert grown.output == plain_tokens([*COMMON[:190], 1, 2, 3], GREEDY, 1)
    assert bench.scheduler.table.find("young") is None


def test_a_cancelled_prefill_leaves_what_it_has_computed() -> None:
    bench = Bench()
    call = bench.submit(whole("a", COMMON, [], GREEDY))
    for _ in range(3):
        step(bench.scheduler, bench.runner)
    assert call.future.cancel()
    bench.finish()
    bench.scheduler.release(["a"])
    assert bench.num_fed() == 3 * 48
    result = bench.ask(whole("b", COMMON, [], GREEDY))
    assert (result.num_cached_tokens, result.output) == (128, plain_tokens(COMMON, GREEDY, 1))


def test_after_a_failed_forward_nothing_is_found() -> None:
    bench = Bench()
    bench.ask(whole("a", COMMON, [], GREEDY))
    bench.submit(whole("b", [1, *COMMON], [], GREEDY))
    step(bench.scheduler, bench.runner)
    bench.scheduler.fail_all(RuntimeError("a forward failed"))
    assert bench.findable() == []
    assert bench.pool.num_free == bench.pool.num_blocks
    assert bench.ask(whole("c", COMMON, [], GREEDY)).num_cached_tokens == 0


def test_hits_and_misses_are_counted_once_in_tokens() -> None:
    bench = Bench()
    table = bench.scheduler.table
    bench.ask(whole("a", COMMON, [], GREEDY))
    assert (table.num_prefix_hits, table.num_prefix_misses) == (0, 200)
    bench.ask(VerifyItem("a", 200, [1], [2]))
    bench.ask(whole("b", COMMON[:130], [], GREEDY))
    assert (table.num_prefix_hits, table.num_prefix_misses) == (128, 202)
