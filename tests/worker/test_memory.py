"""What happens to the KV of many sequences in a small pool, stepped by hand with a clock moved by hand."""

from __future__ import annotations

import pytest

from specdec.cache.blocks import BLOCK_SIZE
from specdec.types import ProposeItem, SamplingParams, VerifyItem
from specdec.worker.calls import Call, Result
from specdec.worker.scheduler import Scheduler
from tests.worker.prefix_runner import FakeClock, PrefixRunner, make_scheduler, plain_tokens, step, whole

GREEDY = SamplingParams(temperature=0.0)


def call(scheduler: Scheduler, *items: VerifyItem | ProposeItem) -> Call:
    call = Call(list(items))
    scheduler.add(call)
    return call


def answers(call: Call) -> list[Result]:
    assert call.future.done(), "not answered"
    return call.future.result()


def finish(scheduler: Scheduler, runner: PrefixRunner) -> None:
    while step(scheduler, runner):
        pass


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 7 + n * n) % 11 for n in range(length)]


class Client:
    """A caller that decodes some sequences and follows the contract: it sends again what is asked for."""

    def __init__(self, scheduler: Scheduler, prompts: dict[str, list[int]], params: SamplingParams) -> None:
        self.scheduler = scheduler
        self.params = params
        self.tokens = {name: list(tokens) for name, tokens in prompts.items()}
        self.base = dict.fromkeys(prompts, 0)
        self.calls: dict[str, Call] = {}
        self.num_asked_again = 0

    def send(self, name: str, draft: list[int]) -> None:
        if name not in self.calls:
            base = self.base[name]
            params = self.params if base == 0 else None
            self.calls[name] = call(self.scheduler, VerifyItem(name, base, self.tokens[name][base:], draft, params))

    def receive(self) -> None:
        for name, sent in list(self.calls.items()):
            if not sent.future.done():
                continue
            del self.calls[name]
            (result,) = sent.future.result()
            assert result.error is None
            if result.need_from is not None:
                assert result.need_from < self.base[name]
                self.base[name] = result.need_from
                self.num_asked_again += 1
            else:
                self.base[name] = len(self.tokens[name]) + result.num_accepted
                self.tokens[name] += result.output


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_blocks", [3, 4, 7, 64])
def test_a_tiny_pool_changes_no_result(num_blocks: int, params: SamplingParams) -> None:
    runner, clock = PrefixRunner(num_blocks=num_blocks, max_model_len=3 * BLOCK_SIZE), FakeClock()
    scheduler = make_scheduler(runner, clock)
    prompts = {f"s{n}": prompt(n, 40 + 12 * n) for n in range(5)}
    client, wanted = Client(scheduler, prompts, params), 30
    for _ in range(5000):
        unfinished = [n for n in prompts if len(client.tokens[n]) < len(prompts[n]) + wanted]
        if not unfinished:
            break
        for name in unfinished:
            client.send(name, [1, 2])
        step(scheduler, runner)
        client.receive()
        for name in set(prompts) - set(unfinished):
            scheduler.release([name])
        clock.now += 0.05
    for name, tokens in prompts.items():
        assert client.tokens[name][len(tokens) :][:wanted] == plain_tokens(tokens, params, wanted)
    assert (client.num_asked_again > 0) == (num_blocks < 10)
    scheduler.release(prompts)
    assert scheduler.table.pool.num_free == num_blocks
    assert len(scheduler.table) == 0


def test_the_oldest_takes_from_the_youngest() -> None:
    runner = PrefixRunner(num_blocks=3, max_model_len=3 * BLOCK_SIZE)
    scheduler = make_scheduler(runner)
    for name in ("old", "middle", "young"):
        call(scheduler, whole(name, prompt(1, 60), [], GREEDY))
        finish(scheduler, runner)
    grown = prompt(1, 60) + [1] * 10
    again = call(scheduler, VerifyItem("old", 60, [1] * 10, []))
    finish(scheduler, runner)
    assert answers(again)[0].output == plain_tokens(grown, GREEDY, 1)
    assert scheduler.table.find("young") is None
    assert scheduler.table.find("middle") is not None


def test_the_youngest_takes_from_nobody_until_they_are_stale() -> None:
    runner, clock = PrefixRunner(num_blocks=2, max_model_len=2 * BLOCK_SIZE), FakeClock()
    scheduler = make_scheduler(runner, clock)
    for name in ("old", "young"):
        call(scheduler, whole(name, prompt(1, 60), [], GREEDY))
        finish(scheduler, runner)
    # A sequence in the round is given up at once; its caller sends it whole, and then it waits.
    known = call(scheduler, VerifyItem("young", 60, [1] * 10, []))
    finish(scheduler, runner)
    assert answers(known)[0].need_from == 0
    again = call(scheduler, whole("young", prompt(1, 60) + [1] * 10, [], GREEDY))
    finish(scheduler, runner)
    assert not again.future.done()
    assert scheduler.table.find("old") is not None
    clock.now += 60.0
    finish(scheduler, runner)
    assert answers(again)[0].output == plain_tokens(prompt(1, 60) + [1] * 10, GREEDY, 1)
    assert scheduler.table.find("old") is None


def test_idle_sequences_are_swept_and_busy_ones_are_not() -> None:
    runner, clock = PrefixRunner(max_tokens=8), FakeClock()
    scheduler = make_scheduler(runner, clock, idle_timeout_s=30.0)
    for name in ("idle", "used"):
        call(scheduler, whole(name, [1, 2, 3], [], GREEDY))
    finish(scheduler, runner)
    long = call(scheduler, whole("busy", prompt(2, 40), [], GREEDY))
    step(scheduler, runner)
    clock.now += 29.0
    scheduler.table.sweep()
    assert len(scheduler.table) == 3
    call(scheduler, VerifyItem("used", 3, [4], []))
    assert len(scheduler.next_batch()) == 2  # both are busy now
    clock.now += 2.0
    scheduler.table.sweep()
    assert scheduler.table.find("idle") is None
    assert scheduler.table.find("used") is not None
    assert scheduler.table.find("busy") is not None
    finish(scheduler, runner)
    assert answers(long)[0].output == plain_tokens(prompt(2, 40), GREEDY, 1)
    assert scheduler.table.find("busy") is not None  # not even marked to be freed


def test_a_released_sequence_is_forgotten() -> None:
    runner = PrefixRunner()
    scheduler = make_scheduler(runner)
    call(scheduler, whole("a", [1, 2, 3], [], GREEDY))
    finish(scheduler, runner)
    scheduler.release(["a", "never seen"])
    assert scheduler.table.pool.num_free == runner.num_blocks
    after = call(scheduler, VerifyItem("a", 3, [4], []))
    finish(scheduler, runner)
    assert answers(after)[0].need_from == 0


def test_a_release_in_the_middle_of_a_job_frees_when_it_ends() -> None:
    runner = PrefixRunner(max_tokens=8)
    scheduler = make_scheduler(runner)
    running = call(scheduler, whole("a", prompt(1, 20), [], GREEDY))
    step(scheduler, runner)
    scheduler.release(["a"])
    assert scheduler.table.pool.num_free < runner.num_blocks
    finish(scheduler, runner)
    assert running.future.done()
    assert scheduler.table.pool.num_free == runner.num_blocks
    assert len(scheduler.table) == 0


def test_a_release_ends_what_waits_for_the_sequence() -> None:
    runner = PrefixRunner(max_tokens=8)
    scheduler = make_scheduler(runner)
    call(scheduler, whole("a", prompt(1, 20), [], GREEDY))
    waiting = call(scheduler, VerifyItem("a", 20, [1], []))
    step(scheduler, runner)
    scheduler.release(["a"])
    assert "released" in str(answers(waiting)[0].error)
    finish(scheduler, runner)
    assert not scheduler.has_work


def test_a_cancelled_call_leaves_no_work_behind() -> None:
    runner = PrefixRunner(max_tokens=8)
    scheduler = make_scheduler(runner)
    cancelled = call(scheduler, whole("a", prompt(1, 40), [], GREEDY), whole("b", prompt(2, 40), [], GREEDY))
    other = call(scheduler, whole("c", prompt(3, 10), [], GREEDY))
    step(scheduler, runner)
    assert cancelled.future.cancel()
    forwards = len(runner.forwards)
    finish(scheduler, runner)
    assert answers(other)[0].output == plain_tokens(prompt(3, 10), GREEDY, 1)
    assert len(runner.forwards) - forwards <= 2
    assert not scheduler.has_work
    # What was computed of it is kept, and good.
    held = call(scheduler, whole("a", prompt(1, 40), [], GREEDY))
    finish(scheduler, runner)
    assert answers(held)[0].output == plain_tokens(prompt(1, 40), GREEDY, 1)


def test_a_call_cancelled_while_it_waits_never_starts() -> None:
    runner = PrefixRunner()
    scheduler = make_scheduler(runner)
    cancelled = call(scheduler, whole("a", [1, 2], [], GREEDY))
    assert cancelled.future.cancel()
    assert not step(scheduler, runner)
    assert len(scheduler.table) == 0
    assert not scheduler.has_work


@pytest.mark.parametrize("max_tokens", [8, 9, 13, 64])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 63, 64, 65, 100])
def test_a_chunked_prefill_gives_the_same_tokens(max_tokens: int, length: int) -> None:
    runner = PrefixRunner(max_tokens=max_tokens)
    scheduler, tokens = make_scheduler(runner), prompt(3, length)
    target = plain_tokens(tokens, GREEDY, 8)
    done = call(scheduler, whole("a", tokens, target[:7], GREEDY))
    finish(scheduler, runner)
    assert answers(done)[0].output == target
    propose = call(scheduler, ProposeItem("b", 0, tokens, 3, GREEDY))
    finish(scheduler, runner)
    assert answers(propose)[0].draft == target[:3]


def test_decoding_goes_before_prefill_and_both_share_a_forward() -> None:
    runner = PrefixRunner(max_tokens=16)
    scheduler = make_scheduler(runner)
    call(scheduler, whole("short", [1, 2], [], GREEDY))
    finish(scheduler, runner)
    long = call(scheduler, whole("long", prompt(1, 100), [], GREEDY))
    step(scheduler, runner)
    decode = call(scheduler, VerifyItem("short", 2, [3], [1, 2, 3]))
    step(scheduler, runner)
    assert decode.future.done()
    assert not long.future.done()
    assert sorted(len(rows.token_ids) for rows in runner.forwards[-1]) == [4, 12]
    finish(scheduler, runner)
    assert answers(long)[0].output == plain_tokens(prompt(1, 100), GREEDY, 1)


def test_a_long_prompt_takes_a_small_part_of_every_forward_while_others_decode() -> None:
    runner, clock = PrefixRunner(max_tokens=64, max_prefill_beside_decode=10), FakeClock()
    scheduler = make_scheduler(runner, clock)
    call(scheduler, whole("short", [1, 2], [], GREEDY))
    finish(scheduler, runner)
    long = call(scheduler, whole("long", prompt(1, 300), [], GREEDY))
    rounds = [3]
    for position in range(2, 7):
        decode = call(scheduler, VerifyItem("short", position, [rounds[-1]], []))
        step(scheduler, runner)  # the round, with a piece of the prompt beside it
        assert sorted(len(rows.token_ids) for rows in runner.forwards[-1]) == [1, 10]
        rounds += answers(decode)[0].output
        clock.now += 0.1
        step(scheduler, runner)  # between two rounds
        assert [len(rows.token_ids) for rows in runner.forwards[-1]] == [10]
    clock.now += 10.0
    step(scheduler, runner)  # nobody decodes any more
    assert [len(rows.token_ids) for rows in runner.forwards[-1]] == [64]
    finish(scheduler, runner)
    assert answers(long)[0].output == plain_tokens(prompt(1, 300), GREEDY, 1)


def test_a_draft_longer_than_that_part_does_not_wait_for_ever() -> None:
    runner, clock = PrefixRunner(max_tokens=64, max_prefill_beside_decode=4), FakeClock()
    scheduler = make_scheduler(runner, clock)
    target = plain_tokens(prompt(1, 30), GREEDY, 12)
    call(scheduler, whole("short", [1, 2], [], GREEDY))
    finish(scheduler, runner)
    long = call(scheduler, whole("long", prompt(1, 30), target[:11], GREEDY))
    for position in range(2, 14):
        call(scheduler, VerifyItem("short", position, [position % 4], []))
        step(scheduler, runner)
    assert long.future.done()
    assert answers(long)[0].output == target
