from __future__ import annotations

import pytest

from specdec.drafting.length import FixedDraftLength
from specdec.types import SpeculativeParams


@pytest.mark.parametrize(
    ("wanted", "remaining", "expected"),
    [
        (None, 100, 4),
        (0, 100, 0),
        (2, 100, 2),
        (9, 100, 8),
        (8, 100, 8),
        (None, 5, 4),
        (None, 4, 3),
        (8, 2, 1),
        (8, 1, 0),
    ],
)
def test_the_draft_is_what_was_asked_for_within_the_limits(wanted: int | None, remaining: int, expected: int) -> None:
    length = FixedDraftLength(default=4, limit=8)
    assert length.num_draft_tokens(SpeculativeParams(num_draft_tokens=wanted), remaining) == expected


def test_a_request_can_turn_it_off() -> None:
    params = SpeculativeParams(enabled=False, num_draft_tokens=5)
    assert FixedDraftLength(default=4, limit=8).num_draft_tokens(params, 100) == 0


def test_a_server_can_turn_it_off() -> None:
    assert FixedDraftLength(default=0, limit=8).num_draft_tokens(SpeculativeParams(), 100) == 0
    assert FixedDraftLength(default=0, limit=0).num_draft_tokens(SpeculativeParams(num_draft_tokens=3), 100) == 0
