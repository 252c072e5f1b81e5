"""The law of the output, by counting: every noise there is, exact fractions, no statistics.

The noise of a position is drawn from a few equally likely Gumbel vectors, so all noise there can be is a finite
table. Over all of it, the speculative loop must give every text as often as plain decoding does; and more than
that, the same text for the same noise.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch

from specdec.sampling import choose
from specdec.sampling.choose import RowToChoose, accept_draft, choose_tokens
from specdec.types import SamplingParams

DEPTH = 3
PARAMS = SamplingParams(temperature=1.0)

Text = tuple[int, ...]
Draft = Callable[[Sequence[int], int], list[int]]


@dataclass(frozen=True)
class Chain:
    """A model whose distribution of a token is decided by the one before."""

    logits: list[list[float]]

    @property
    def vocab_size(self) -> int:
        return len(self.logits)


def random_chain(vocab_size: int, seed: int, *, near: Chain | None = None) -> Chain:
    draw = random.Random(seed)
    rows = [[draw.gauss(0.0, 1.2) for _ in range(vocab_size)] for _ in range(vocab_size)]
    if near is not None:
        rows = [[a + 0.4 * b for a, b in zip(*pair, strict=True)] for pair in zip(near.logits, rows, strict=True)]
    return Chain(rows)


class NoiseTable:
    """Gumbel noise that is one of a few vectors at each position; which one is decided by ``assignment``."""

    def __init__(self, vocab_size: int, num_vectors: int) -> None:
        generator = torch.Generator().manual_seed(vocab_size)
        uniform = torch.rand(num_vectors, vocab_size, dtype=torch.float64, generator=generator)
        self.vectors = -torch.log(-torch.log(uniform))
        self.assignment: Sequence[int] = ()

    def key(self, seed: int, position: int) -> int:
        return self.assignment[position - 1]

    def gumbel(self, key: int, token_ids: torch.Tensor) -> torch.Tensor:
        return self.vectors[key][token_ids]


@pytest.fixture
def noise_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], NoiseTable]:
    """Puts a finite table in the place of the noise."""

    def make(vocab_size: int) -> NoiseTable:
        table = NoiseTable(vocab_size, num_vectors=5)
        monkeypatch.setattr(choose, "noise_key", table.key)
        monkeypatch.setattr(choose, "gumbel_noise", table.gumbel)
        return table

    return make


def pick(model: Chain, previous: Sequence[int], positions: Sequence[int]) -> list[int]:
    """One token after each of ``previous``, by the contract's formula."""
    logits = torch.tensor([model.logits[token] for token in previous], dtype=torch.float64)
    return choose_tokens(logits, [RowToChoose(PARAMS, position) for position in positions])


def plain(target: Chain) -> Text:
    text = [0]
    while len(text) <= DEPTH:
        text += pick(target, text[-1:], [len(text)])
    return tuple(text[1:])


@dataclass(frozen=True)
class Loop:
    """The speculative loop, with places where it can be broken.

    Attributes:
        shift: added to the positions of the noise when verifying.
        bonus: the model of the token after a fully accepted draft; None for the target.
        trusting: the first draft token is accepted without a look.
        reuse: every row of a verify uses the noise of its first.
    """

    target: Chain
    drafter: Draft
    k: int
    shift: int = 0
    bonus: Chain | None = None
    trusting: bool = False
    reuse: bool = False

    def run(self) -> Text:
        text = [0]
        while len(text) <= DEPTH:
            draft = self.drafter(text, min(self.k, DEPTH - len(text)))
            positions = [len(text) + self.shift + (0 if self.reuse else n) for n in range(len(draft) + 1)]
            positions = [(position - 1) % DEPTH + 1 for position in positions]
            own = pick(self.target, [text[-1], *draft], positions)
            if self.trusting and draft:
                own[0] = draft[0]
            accepted = accept_draft(draft, own)
            if self.bonus is not None and accepted == len(draft):
                own[-1] = pick(self.bonus, [([text[-1], *draft])[-1]], positions[-1:])[0]
            text += own[: accepted + 1]
        return tuple(text[1 : DEPTH + 1])


def coupled(model: Chain) -> Draft:
    """A draft model that proposes by the target's formula and noise."""

    def draft(text: Sequence[int], count: int) -> list[int]:
        tokens = list(text)
        for _ in range(count):
            tokens += pick(model, tokens[-1:], [len(tokens)])
        return tokens[len(text) :]

    return draft


def garbage(vocab_size: int) -> Draft:
    return lambda text, count: [(7 * len(text) + n + sum(text)) % vocab_size for n in range(count)]


def over_all_noise(table: NoiseTable, decode: Callable[[], Text]) -> list[Text]:
    texts = []
    for assignment in itertools.product(range(len(table.vectors)), repeat=DEPTH):
        table.assignment = assignment
        texts.append(decode())
    return texts


def law(texts: Sequence[Text]) -> dict[Text, Fraction]:
    return {text: Fraction(count, len(texts)) for text, count in Counter(texts).items()}


@pytest.mark.parametrize("vocab_size", [3, 4])
@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("drafter", ["itself", "near", "far", "garbage"])
def test_the_law_is_that_of_plain_decoding(
    noise_of: Callable[[int], NoiseTable], vocab_size: int, k: int, drafter: str
) -> None:
    target = random_chain(vocab_size, 1)
    drafters = {
        "itself": coupled(target),
        "near": coupled(random_chain(vocab_size, 2, near=target)),
        "far": coupled(random_chain(vocab_size, 3)),
        "garbage": garbage(vocab_size),
    }
    table = noise_of(vocab_size)
    expected = over_all_noise(table, lambda: plain(target))
    actual = over_all_noise(table, Loop(target, drafters[drafter], k).run)
    assert actual == expected  # the same text for the same noise
    assert law(actual) == law(expected)
    assert sum(law(actual).values()) == 1
    assert len(law(expected)) > vocab_size


def test_every_kind_of_step_occurs(noise_of: Callable[[int], NoiseTable]) -> None:
    target = random_chain(3, 1)
    draft, table = coupled(random_chain(3, 2, near=target)), noise_of(3)
    texts = over_all_noise(table, lambda: (*plain(target), *draft([0], 2)))
    assert {accept_draft(text[DEPTH:], text[:DEPTH]) for text in texts} == {0, 1, 2}


def mutants(target: Chain, model: Chain) -> dict[str, Loop]:
    draft = coupled(model)
    return {
        "bonus from the draft": Loop(target, draft, 2, bonus=model),
        "accepted without a look": Loop(target, draft, 2, trusting=True),
        "one noise for all rows": Loop(target, draft, 2, reuse=True),
    }


@pytest.mark.parametrize("name", ["bonus from the draft", "accepted without a look", "one noise for all rows"])
def test_a_broken_loop_has_another_law(noise_of: Callable[[int], NoiseTable], name: str) -> None:
    target = random_chain(3, 1)
    loop, table = mutants(target, random_chain(3, 2, near=target))[name], noise_of(3)
    assert law(over_all_noise(table, loop.run)) != law(over_all_noise(table, lambda: plain(target)))


@pytest.mark.parametrize("shift", [1, -1])
def test_another_noise_in_verification_has_the_law_but_not_the_text(
    noise_of: Callable[[int], NoiseTable], shift: int
) -> None:
    # All noise is equally likely, so the law alone cannot see it: that is why texts are compared, too.
    target, table = random_chain(3, 1), noise_of(3)
    expected = over_all_noise(table, lambda: plain(target))
    actual = over_all_noise(table, Loop(target, coupled(target), 2, shift=shift).run)
    assert actual != expected
    assert law(actual) == law(expected)


def exact_rejection(p: list[Fraction], q: list[Fraction]) -> list[Fraction]:
    """Law of a token by rejection sampling (Leviathan et al. 2022) with noise of its own for the test."""
    n = len(p)
    accepted = [q[v] * min(Fraction(1), p[v] / q[v]) for v in range(n)]
    rest = [max(Fraction(0), p[v] - q[v]) for v in range(n)]
    total = sum(rest)
    return [accepted[v] + (1 - sum(accepted)) * rest[v] / total for v in range(n)]


def shared_rejection(p: list[Fraction], q: list[Fraction], grid: int) -> list[Fraction]:
    """The same, where the draft token and the test share one uniform number, as an engine has done.

    The draft token is the inverse of q's distribution function at u; it is accepted when u < p/q.
    """
    n = len(p)
    counts = [Fraction(0)] * n
    rest = [max(Fraction(0), p[v] - q[v]) for v in range(n)]
    for step in range(grid):
        u = Fraction(2 * step + 1, 2 * grid)
        token = next(v for v in range(n) if sum(q[: v + 1]) > u)
        if u * q[token] < p[token]:
            counts[token] += Fraction(1, grid)
        else:
            for v in range(n):
                counts[v] += Fraction(1, grid) * rest[v] / sum(rest)
    return counts


def test_rejection_sampling_is_exact_only_with_noise_of_its_own() -> None:
    p, q = [Fraction(n, 10) for n in (5, 3, 2)], [Fraction(n, 10) for n in (2, 3, 5)]
    assert exact_rejection(p, q) == p
    assert shared_rejection(p, q, grid=100) != p
