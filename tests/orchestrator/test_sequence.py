from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.orchestrator.sequence import Sequence
from specdec.types import (
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    SamplingParams,
    SpeculativeStats,
    TokenLogprobs,
    TokenOrigin,
    VerifyResult,
)
from tests.orchestrator.harness import EOS, PROMPT, TOKENIZER, request

ACCEPTED, RECOVERED, BONUS, PLAIN = (
    TokenOrigin.ACCEPTED,
    TokenOrigin.RECOVERED,
    TokenOrigin.BONUS,
    TokenOrigin.PLAIN,
)


def commit(sequence: Sequence, output: bytes | list[int], *, draft: bytes | list[int] = b"") -> GenerationChunk:
    """Give the sequence what the target says, and return what the request hears of it."""
    num_accepted = 0
    while num_accepted < min(len(draft), len(output)) and draft[num_accepted] == output[num_accepted]:
        num_accepted += 1
    assert len(output) == num_accepted + 1, "a target says no more than that"
    sequence.commit(VerifyResult(sequence.sequence_id, list(output), num_accepted), list(draft))
    event = sequence.events.get_nowait()
    assert isinstance(event, GenerationChunk)
    assert sequence.events.empty()
    return event


def sequence_for(generation: GenerationRequest) -> Sequence:
    return Sequence(generation, TOKENIZER, deadline=1e9)


@pytest.mark.parametrize(
    ("draft", "output", "origins"),
    [
        pytest.param(b"", b"x", (PLAIN,), id="no draft"),
        pytest.param(b"abc", b"x", (RECOVERED,), id="all wrong"),
        pytest.param(b"abc", b"ax", (ACCEPTED, RECOVERED), id="one right"),
        pytest.param(b"abc", b"abx", (ACCEPTED, ACCEPTED, RECOVERED), id="two right"),
        pytest.param(b"abc", b"abcx", (ACCEPTED, ACCEPTED, ACCEPTED, BONUS), id="all right"),
    ],
)
def test_origins_and_counters(draft: bytes, output: bytes, origins: tuple[TokenOrigin, ...]) -> None:
    chunk = commit(sequence_for(request()), output, draft=draft)
    assert chunk.token_ids == tuple(output)
    assert chunk.text == output.decode()
    assert chunk.origins == origins
    assert chunk.stats == SpeculativeStats(1, len(draft), len(output) - 1)
    assert (chunk.finish_reason, chunk.stop_reason) == (None, None)


def test_counters_add_up_and_chunks_keep_their_own() -> None:
    sequence = sequence_for(request())
    first = commit(sequence, b"abx", draft=b"abc")
    second = commit(sequence, b"y")
    assert first.stats == SpeculativeStats(1, 3, 2)
    assert second.stats == SpeculativeStats(2, 3, 2)
    assert second.stats.acceptance_length == pytest.approx(4 / 2)


def test_cached_tokens_are_told_once() -> None:
    sequence = sequence_for(request())
    for output, told in ((b"a", 3), (b"b", 0)):
        # What is found when the sequence is computed again, after a failure, it has put there itself.
        sequence.commit(VerifyResult(sequence.sequence_id, list(output), num_cached_tokens=3), [])
        event = sequence.events.get_nowait()
        assert isinstance(event, GenerationChunk)
        assert event.num_cached_tokens == told


def test_the_salt_goes_along_on_first_contact() -> None:
    sequence = sequence_for(replace(request(), cache_salt="secret"))
    items = sequence.verify_item([]), sequence.propose_item(2), sequence.draft_prefill_item()
    assert [(item.base_length, item.cache_salt) for item in items] == [(0, "secret")] * 3
    commit(sequence, b"a")
    sequence.draft_length = sequence.target_length
    items = sequence.verify_item([]), sequence.propose_item(2), sequence.draft_prefill_item()
    assert [item.cache_salt for item in items] == [None] * 3


def test_the_end_token_ends_it_and_has_no_text() -> None:
    chunk = commit(sequence_for(request()), [*b"ab", EOS, *b"cd"], draft=[*b"ab", EOS, *b"c"])
    assert chunk.token_ids == (*b"ab", EOS)
    assert chunk.origins == (ACCEPTED,) * 3
    assert chunk.text == "ab"
    assert (chunk.finish_reason, chunk.stop_reason) == (FinishReason.STOP, None)
    # The counters are those of the step, whatever the stop cuts off.
    assert chunk.stats == SpeculativeStats(1, 4, 4)


def test_the_end_token_can_be_ignored() -> None:
    chunk = commit(sequence_for(request(ignore_eos=True)), [*b"a", EOS, *b"b"], draft=[*b"a", EOS])
    assert chunk.token_ids == (*b"a", EOS, *b"b")
    assert chunk.text == "ab"
    assert chunk.finish_reason is None


def test_a_stop_token_ends_it_and_is_named() -> None:
    chunk = commit(sequence_for(request(stop_token_ids=(ord("c"),))), b"abcde", draft=b"abcd")
    assert chunk.token_ids == tuple(b"abc")
    assert (chunk.finish_reason, chunk.stop_reason) == (FinishReason.STOP, ord("c"))


def test_a_stop_token_ends_even_a_generation_that_ignores_the_end_token() -> None:
    chunk = commit(sequence_for(request(stop_token_ids=(EOS,), ignore_eos=True)), [EOS])
    assert (chunk.finish_reason, chunk.stop_reason) == (FinishReason.STOP, EOS)


def test_a_stop_string_inside_an_accepted_run_cuts_text_tokens_and_origins() -> None:
    chunk = commit(sequence_for(request(stop=("cd",))), b"abcdefg", draft=b"abcdef")
    assert chunk.text == "ab"
    assert chunk.token_ids == tuple(b"abcd"), "the token that completed it was generated"
    assert chunk.origins == (ACCEPTED,) * 4
    assert (chunk.finish_reason, chunk.stop_reason) == (FinishReason.STOP, "cd")


def test_a_stop_string_over_two_steps_is_never_shown() -> None:
    sequence = sequence_for(request(stop=("cd",)))
    first = commit(sequence, b"abc", draft=b"abx")
    assert (first.text, first.token_ids) == ("ab", tuple(b"abc"))
    second = commit(sequence, b"de", draft=b"d")
    assert (second.text, second.token_ids) == ("", tuple(b"d"))
    assert second.stop_reason == "cd"


def test_what_only_began_a_stop_string_is_given_out() -> None:
    sequence = sequence_for(request(stop=("cd",)))
    assert commit(sequence, b"abc", draft=b"abx").text == "ab"
    assert commit(sequence, b"x").text == "cx"


@pytest.mark.parametrize("end", [[EOS], [ord("!")]], ids=["end token", "stop token"])
def test_an_end_gives_out_what_was_held_back(end: list[int]) -> None:
    sequence = sequence_for(request(stop=("cd",), stop_token_ids=(ord("!"),)))
    assert commit(sequence, b"abc", draft=b"abx").text == "ab"
    last = commit(sequence, end)
    assert last.text == "c"
    assert last.finish_reason == FinishReason.STOP


def test_the_last_token_allowed_ends_it() -> None:
    sequence = sequence_for(request(max_tokens=4, stop=("zz",)))
    assert sequence.num_remaining_tokens == 4
    assert commit(sequence, b"abc", draft=b"abx").finish_reason is None
    assert sequence.num_remaining_tokens == 1
    chunk = commit(sequence, b"z")
    assert (chunk.text, chunk.finish_reason, chunk.stop_reason) == ("z", FinishReason.LENGTH, None)


def test_no_token_beyond_the_limit_whatever_a_step_brings() -> None:
    chunk = commit(sequence_for(request(max_tokens=3)), b"abcde", draft=b"abcd")
    assert chunk.token_ids == tuple(b"abc")
    assert chunk.text == "abc"
    assert chunk.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize(
    ("last", "options", "end"),
    [
        pytest.param(EOS, {}, (FinishReason.STOP, None), id="end token"),
        pytest.param(ord("x"), {"stop_token_ids": (ord("x"),)}, (FinishReason.STOP, ord("x")), id="stop token"),
        pytest.param(ord("x"), {"stop": ("x",)}, (FinishReason.STOP, "x"), id="stop string"),
    ],
)
def test_a_stop_at_the_very_limit_is_a_stop(
    last: int, options: dict[str, tuple[int, ...]], end: tuple[FinishReason, str | int | None]
) -> None:
    chunk = commit(sequence_for(request(max_tokens=3, **options)), [*b"ab", last], draft=b"ab")
    assert (chunk.finish_reason, chunk.stop_reason) == end
    assert chunk.text == "ab"


def test_an_incomplete_code_point_waits_for_the_next_step() -> None:
    raw = "né".encode()
    sequence = sequence_for(request())
    assert commit(sequence, raw[:2], draft=raw[:1]).text == "n"
    assert commit(sequence, raw[2:]).text == "é"


def test_an_incomplete_code_point_at_the_end_shows_as_a_replacement() -> None:
    sequence = sequence_for(request(max_tokens=2))
    chunk = commit(sequence, "né".encode()[:2], draft=b"n")
    assert (chunk.text, chunk.finish_reason) == ("n\ufffd", FinishReason.LENGTH)


def test_a_stop_string_completed_by_what_the_end_gives_out_is_a_stop() -> None:
    sequence = sequence_for(request(max_tokens=2, stop=("\ufffd",)))
    chunk = commit(sequence, "né".encode()[:2], draft=b"n")
    assert chunk.text == "n"
    assert (chunk.finish_reason, chunk.stop_reason) == (FinishReason.STOP, "\ufffd")


def test_the_error_that_ends_a_sequence_is_its_last_event() -> None:
    sequence = sequence_for(request())
    error = RuntimeError("lost")
    sequence.fail(error)
    assert sequence.finished
    sequence.fail(RuntimeError("a second one"))
    assert sequence.events.get_nowait() is error
    assert sequence.events.empty()


def test_items_carry_what_the_worker_lacks_and_parameters_on_first_contact_only() -> None:
    sequence = sequence_for(request(seed=7))
    first = sequence.verify_item([])
    assert (first.base_length, first.tokens, first.draft) == (0, list(PROMPT), [])
    assert first.sampling == sequence.request.sampling
    commit(sequence, b"abx", draft=b"abc")
    # The target holds the prompt and "ab"; "x" it has said but not been fed.
    second = sequence.verify_item([1, 2])
    assert (second.base_length, second.tokens, second.draft) == (len(PROMPT) + 2, list(b"x"), [1, 2])
    assert second.sampling is None


@pytest.mark.parametrize(
    ("draft", "output", "num_held"),
    [
        pytest.param(b"abc", b"abx", 2, id="held: what was accepted"),
        pytest.param(b"abc", b"abcx", 2, id="held: not the last guess, which it was never fed"),
        pytest.param(b"abc", b"x", 0, id="held: none of a wrong draft"),
        pytest.param(b"a", b"ax", 0, id="held: nothing of a draft of one"),
    ],
)
def test_the_draft_worker_is_sent_what_it_was_not_fed(draft: bytes, output: bytes, num_held: int) -> None:
    sequence = sequence_for(request())
    commit(sequence, output, draft=draft)
    item = sequence.propose_item(3)
    assert item.base_length == len(PROMPT) + num_held
    assert item.tokens == list(output[num_held:])
    assert item.num_draft_tokens == 3
    assert item.sampling is None


def test_a_draft_worker_that_was_never_asked_is_brought_up_to_the_last_token_but_one() -> None:
    sequence = sequence_for(request())
    commit(sequence, b"x")
    item = sequence.draft_prefill_item()
    assert (item.base_length, item.tokens, item.num_draft_tokens) == (0, list(PROMPT), 0)
    assert item.sampling == sequence.request.sampling


def told(generation: GenerationRequest, sampling: SamplingParams) -> SamplingParams | None:
    """What a worker hears of a request with this sampling."""
    return sequence_for(replace(generation, sampling=sampling)).verify_item([]).sampling


def test_min_tokens_tells_the_workers_what_would_end_the_generation() -> None:
    sampling = SamplingParams(min_tokens=3)
    assert told(request(stop_token_ids=(7,)), sampling) == replace(sampling, end_token_ids=(7, EOS))
    ignoring = request(stop_token_ids=(7,), ignore_eos=True)
    assert told(ignoring, sampling) == replace(sampling, end_token_ids=(7,))
    assert told(request(stop_token_ids=(7,)), SamplingParams()) == SamplingParams()


def test_no_stop_string_is_looked_for_in_the_first_min_tokens_tokens() -> None:
    sequence = sequence_for(replace(request(stop=("ab",)), sampling=SamplingParams(min_tokens=3)))
    first = commit(sequence, b"abab", draft=b"aba")
    second = commit(sequence, b"xabc", draft=b"xab")
    assert (first.text + second.text, second.stop_reason) == ("ababx", "ab")


def test_every_item_says_how_long_the_prompt_is() -> None:
    sequence = sequence_for(request())
    commit(sequence, b"ab", draft=b"a")
    sequence.target_length = sequence.draft_length = 0
    items = [sequence.verify_item([]), sequence.propose_item(2), sequence.draft_prefill_item()]
    assert [item.num_prompt_tokens for item in items] == [len(PROMPT)] * 3


def test_logprobs_go_with_their_tokens_and_no_further_than_the_end() -> None:
    sequence = sequence_for(request(stop_token_ids=(66,)))
    entries = [TokenLogprobs(-float(n)) for n in range(3)]
    sequence.commit(VerifyResult(sequence.sequence_id, [65, 66, 67], 2, logprobs=entries), [65, 66])
    chunk = sequence.events.get_nowait()
    assert isinstance(chunk, GenerationChunk)
    assert (chunk.token_ids, chunk.logprobs) == ((65, 66), tuple(entries[:2]))
