from __future__ import annotations

from specdec.types import VerifyItem
from specdec.worker.rounds import RoundClock
from tests.worker.prefix_runner import FakeClock, PrefixRunner, make_scheduler, step, whole
from tests.worker.test_memory import GREEDY, answers, call, finish, plain_tokens, prompt


def rounds(clock: FakeClock, *, pause_s: float, count: int) -> RoundClock:
    """Rounds of 10 ms with pauses between them; the clock stands at the end of the last."""
    known = RoundClock(clock)
    for _ in range(count):
        known.begin()
        clock.now += 0.010
        known.end()
        clock.now += pause_s
    clock.now -= pause_s
    return known


def test_a_round_is_due_for_about_the_usual_pause() -> None:
    clock = FakeClock()
    known = rounds(clock, pause_s=0.010, count=50)
    clock.now += 0.015
    assert known.due
    clock.now += 0.010
    assert not known.due
    assert known.decoding


def test_nobody_is_waited_for_before_the_first_round_or_long_after_the_last() -> None:
    clock = FakeClock()
    assert not RoundClock(clock).due
    assert not RoundClock(clock).decoding
    known = rounds(clock, pause_s=0.010, count=50)
    clock.now += 5.0
    assert not known.due
    assert not known.decoding
    known.begin()  # the long pause was no pause between rounds
    clock.now += 0.010
    known.end()
    clock.now += 0.025
    assert not known.due


def test_a_slow_loop_is_not_waited_for_beyond_reason() -> None:
    clock = FakeClock()
    known = rounds(clock, pause_s=0.400, count=50)
    clock.now += 0.060
    assert not known.due


def test_prefill_is_held_back_while_a_round_is_due_and_goes_on_if_it_does_not_come() -> None:
    runner, clock = PrefixRunner(max_tokens=64, max_prefill_beside_decode=8), FakeClock()
    scheduler = make_scheduler(runner, clock)
    call(scheduler, whole("short", [1, 2], [], GREEDY))
    finish(scheduler, runner)
    token = 3
    for position in range(2, 20):
        decode = call(scheduler, VerifyItem("short", position, [token], []))
        step(scheduler, runner)
        (token,) = answers(decode)[0].output
        clock.now += 0.010
    long = call(scheduler, whole("long", prompt(1, 100), [], GREEDY))
    clock.now -= 0.009  # the last round ended a millisecond ago
    assert not step(scheduler, runner)
    assert scheduler.has_work
    clock.now += 0.040
    assert step(scheduler, runner)
    assert [len(rows.token_ids) for rows in runner.forwards[-1]] == [8]
    finish(scheduler, runner)
    assert answers(long)[0].output == plain_tokens(prompt(1, 100), GREEDY, 1)
