from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.orchestrator.text import StopStrings

stops_of_few_letters = st.lists(st.text("abc", min_size=1, max_size=4), max_size=5)


def run(stop: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """All text that comes out, and the stop string."""
    filter_ = StopStrings(stop)
    out = ""
    for piece in pieces:
        out += filter_.add(piece)
        if filter_.matched is not None:
            return out, filter_.matched
    return out + filter_.finish(), filter_.matched


def naive(stop: list[str], text: str) -> tuple[str, str | None]:
    """Read letter by letter, until the text ends in a stop string."""
    for end in range(len(text) + 1):
        ended = [each for each in stop if text[:end].endswith(each)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


def split(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(places)]


@given(stops_of_few_letters, st.text("abcd", max_size=20), st.lists(st.integers(0, 100), max_size=8))
def test_however_the_text_is_split_it_is_cut_before_the_first_to_appear(
    stop: list[str], text: str, cuts: list[int]
) -> None:
    assert run(stop, split(text, cuts)) == naive(stop, text)


@given(stops_of_few_letters.filter(bool), st.text("abcd", max_size=20))
def test_nothing_is_held_back_that_cannot_begin_a_stop_string(stop: list[str], text: str) -> None:
    filter_ = StopStrings(stop)
    out = ""
    for end in range(1, len(text) + 1):
        out += filter_.add(text[end - 1])
        if filter_.matched is not None:
            return
        held = text[len(out) : end]
        begun = [
            length
            for length in range(end + 1)
            if any(len(each) > length and each.startswith(text[end - length : end]) for each in stop)
        ]
        assert len(held) == max(begun)


@pytest.mark.parametrize(
    ("stop", "pieces", "out", "matched"),
    [
        pytest.param([], ["a", "", "b"], "ab", None, id="no stop string"),
        pytest.param(["\n\n"], ["one\n", "\ntwo"], "one", "\n\n", id="over two pieces"),
        pytest.param(["\n\n"], ["one\n", "two\n"], "one\ntwo\n", None, id="only begun"),
        pytest.param(["END"], ["END"], "", "END", id="nothing before it"),
        pytest.param(["aab"], ["a", "a", "a", "b", "c"], "a", "aab", id="overlaps with itself"),
        pytest.param(["abc", "bcd"], ["a", "b", "c", "d"], "", "abc", id="overlaps with another"),
        pytest.param(["ab", "abc"], ["abc"], "", "ab", id="beginning of another"),
        pytest.param(["abcd", "bc"], ["abcd"], "a", "bc", id="inside another"),
        pytest.param(["bc", "abc"], ["xabc"], "x", "abc", id="end of another"),
        pytest.param(["x", "y"], ["1y2x"], "1", "y", id="the first in the text, not in the list"),
        pytest.param(["👍"], ["ok 👍 more"], "ok ", "👍", id="not ASCII"),
        pytest.param([".*"], ["abc.*"], "abc", ".*", id="no pattern"),
    ],
)
def test_cases(stop: list[str], pieces: list[str], out: str, matched: str | None) -> None:
    assert run(stop, pieces) == (out, matched)


def test_many_stop_strings() -> None:
    stop = [f"<{number}>" for number in range(500)]
    assert run(stop, ["text <4", "9", "9", "> more"]) == ("text ", "<499>")


def test_nothing_comes_after_the_stop() -> None:
    filter_ = StopStrings(["STOP"])
    assert filter_.add("before STOP after") == "before "
    assert filter_.add("later") == ""
    assert filter_.finish() == ""
    assert filter_.matched == "STOP"
