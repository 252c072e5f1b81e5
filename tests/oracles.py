"""Naive re-implementations in plain Python, written from the contract, and the statistics to judge samples by."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec.types import SamplingParams

_GOLDEN = 0x9E3779B97F4A7C15


class SplitMix64:
    """The generator as its authors publish it: a counter that advances by the golden ratio, and a mixer."""

    def __init__(self, state: int) -> None:
        self.state = state

    def next(self) -> int:
        self.state = (self.state + _GOLDEN) % 2**64
        return mix64(self.state)


def mix64(value: int) -> int:
    """The finalizer of SplitMix64."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def uniform(seed: int, position: int, token: int) -> float:
    """Uniform noise: the generator of (seed, position), advanced to ``token``."""
    first = SplitMix64(seed).next()
    stream = SplitMix64(mix64((first + position * _GOLDEN) % 2**64))
    stream.state = (stream.state + token * _GOLDEN) % 2**64
    return ((stream.next() >> 12) + 0.5) / 2**52


def gumbel(seed: int, position: int, token: int) -> float:
    return -math.log(-math.log(uniform(seed, position, token)))


def candidates(logits: Sequence[float], params: SamplingParams) -> list[int]:
    """Ids that survive temperature, top-k and top-p, ascending."""
    scores = [logit / params.temperature for logit in logits]
    kept = list(range(len(scores)))
    if params.top_k:
        kept = [v for v in kept if sum(other > scores[v] for other in scores) < params.top_k]
    if params.top_p < 1.0:
        top = max(scores)
        mass = {v: math.exp(scores[v] - top) for v in kept}
        total = math.fsum(mass.values())
        # A token is in the nucleus while those strictly more likely do not reach top_p by themselves.
        kept = [v for v in kept if math.fsum(m for m in mass.values() if m > mass[v]) < params.top_p * total]
    return kept


def choose(logits: Sequence[float], params: SamplingParams, position: int) -> int:
    """The token the contract names for this position; of equals the lowest."""
    if params.temperature == 0.0:
        return max(range(len(logits)), key=lambda v: (logits[v], -v))
    scores = {v: logits[v] / params.temperature + gumbel(params.seed, position, v) for v in candidates(logits, params)}
    return max(scores, key=lambda v: (scores[v], -v))


def chi_square(observed: Sequence[int], probabilities: Sequence[float]) -> float:
    """Pearson's statistic; every probability is positive and they sum to one."""
    total = sum(observed)
    return sum((o - total * p) ** 2 / (total * p) for o, p in zip(observed, probabilities, strict=True))


def chi_square_limit(degrees: int, sigmas: float = 4.0) -> float:
    """The value a chi-square variable exceeds as rarely as a normal one exceeds ``sigmas`` (Wilson and Hilferty)."""
    spread = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - spread + sigmas * math.sqrt(spread)) ** 3
