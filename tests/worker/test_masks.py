"""The hook for grammars, with a toy: the sum of the generated tokens must keep to a pattern of remainders."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable

import pytest

from specdec.errors import InvalidRequestError
from specdec.sampling.history import RowContext, TokenHistory
from specdec.types import ProposeItem, SamplingParams, VerifyItem
from specdec.worker import jobs
from specdec.worker.calls import Call
from tests import oracles
from tests.worker.prefix_runner import VOCAB_SIZE, PrefixRunner, hashed_logits, make_scheduler, step

PROMPT = [3, 1, 4, 1, 5]
NUM_TOKENS = 20
PARAMS = [SamplingParams(0.0, grammar="3"), SamplingParams(1.2, seed=3, grammar="3", frequency_penalty=0.3)]


class Remainders:
    """After n tokens their sum has the remainder of n * n modulo a number."""

    def __init__(self, grammar: str) -> None:
        if not grammar.isdigit():
            raise InvalidRequestError(f"{grammar!r} is no number")
        self.modulus = int(grammar)

    def start(self) -> Hashable:
        return (0, 0)

    def advance(self, state: Hashable, token: int) -> Hashable:
        assert isinstance(state, tuple)
        return ((state[0] + token) % self.modulus, state[1] + 1)

    def allowed(self, state: Hashable) -> Collection[int]:
        assert isinstance(state, tuple)
        return [v for v in range(VOCAB_SIZE) if (state[0] + v - (state[1] + 1) ** 2) % self.modulus == 0]


def masked_plain_tokens(params: SamplingParams, count: int) -> list[int]:
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + count:
        logits = hashed_logits(tokens)
        total, wanted = sum(tokens[len(PROMPT) :]), len(tokens) - len(PROMPT) + 1
        masked = [x if (total + v) % 3 == wanted**2 % 3 else float("-inf") for v, x in enumerate(logits)]
        tokens.append(oracles.choose(masked, params, len(tokens), tokens, len(PROMPT)))
    return tokens[len(PROMPT) :]


def decode(params: SamplingParams, draft: Callable[[list[int], int], list[int]], k: int) -> list[int]:
    runner = PrefixRunner()
    scheduler, tokens, base = make_scheduler(runner, make_mask=Remainders), list(PROMPT), 0
    while len(tokens) < len(PROMPT) + NUM_TOKENS:
        guesses = draft(tokens, k) if k else []
        item = VerifyItem("s", base, tokens[base:], guesses, None if base else params, len(PROMPT))
        call = Call([item])
        scheduler.add(call)
        while step(scheduler, runner):
            pass
        (result,) = call.future.result()
        assert result.error is None
        base = len(tokens) + result.num_accepted
        tokens += result.output
    return tokens[len(PROMPT) :][:NUM_TOKENS]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_every_token_is_allowed_whatever_was_drafted(params: SamplingParams, k: int) -> None:
    expected = masked_plain_tokens(params, NUM_TOKENS + 8)

    def right(tokens: list[int], k: int) -> list[int]:
        return expected[len(tokens) - len(PROMPT) :][:k]

    def half_right(tokens: list[int], k: int) -> list[int]:
        return [*right(tokens, k)[: k // 2], *(7 for _ in range(k - k // 2))]

    for draft in (right, half_right, lambda tokens, k: [2] * k):
        assert decode(params, draft, k) == expected[:NUM_TOKENS]
    for n in range(NUM_TOKENS + 1):
        assert sum(expected[:n]) % 3 == n * n % 3


def test_a_worker_that_ignores_the_draft_in_its_masks_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "RowContext", lambda history, ahead: RowContext(history))
    expected = masked_plain_tokens(PARAMS[0], NUM_TOKENS + 8)
    assert decode(PARAMS[0], lambda tokens, k: expected[len(tokens) - len(PROMPT) :][:k], 4) != expected[:NUM_TOKENS]


def test_a_draft_worker_drafts_what_is_allowed() -> None:
    runner = PrefixRunner()
    scheduler = make_scheduler(runner, make_mask=Remainders)
    call = Call([ProposeItem("s", 0, PROMPT, 6, PARAMS[0], len(PROMPT))])
    scheduler.add(call)
    while step(scheduler, runner):
        pass
    (result,) = call.future.result()
    assert result.draft == masked_plain_tokens(PARAMS[0], 6)


def test_states_are_rolled_back_with_the_tokens() -> None:
    mask = Remainders("5")
    history = TokenHistory(2, mask)
    history.extend([9, 9, 1, 3])
    assert history.mask_state(mask) == (4, 2)
    history.crop(3)
    assert history.mask_state(mask) == (1, 1)
    history.extend([2, 2])
    assert RowContext(history, [4]).allowed() == mask.allowed((4, 4))
    assert history.mask_state(mask) == (0, 3)
    history.crop(0)
    history.extend([8, 8])
    assert history.mask_state(mask) == (0, 0)


@pytest.mark.parametrize(("make_mask", "grammar"), [(None, "3"), (Remainders, "x")])
def test_a_grammar_that_cannot_be_served_is_refused(make_mask: type[Remainders] | None, grammar: str) -> None:
    scheduler, call = (
        make_scheduler(PrefixRunner(), make_mask=make_mask),
        Call([VerifyItem("s", 0, [1], [], SamplingParams(grammar=grammar))]),
    )
    scheduler.add(call)
    (result,) = call.future.result()
    assert "grammar" in (result.error or "")
