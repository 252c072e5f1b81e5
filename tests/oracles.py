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


def edited(
    logits: Sequence[float], params: SamplingParams, before: Sequence[int] = (), num_prompt: int = 0
) -> list[float]:
    """Logits after bias, masks and penalties, at the position after ``before``."""
    scores = [float(logit) for logit in logits]
    generated = list(before[num_prompt:])
    for token, bias in params.logit_bias:
        scores[token] += bias
    if len(before) - num_prompt < params.min_tokens:
        scores = _unless_nothing_is_left(scores, set(params.end_token_ids))
    completed = {word[-1] for word in params.bad_words if f",{_listed(generated)}".endswith(f",{_listed(word[:-1])}")}
    scores = _unless_nothing_is_left(scores, completed)
    for token in set(before):
        worse = scores[token] * params.repetition_penalty
        scores[token] = worse if scores[token] < 0 else scores[token] / params.repetition_penalty
    for token in set(generated):
        scores[token] -= params.frequency_penalty * generated.count(token) + params.presence_penalty
    return scores


def _listed(tokens: Sequence[int]) -> str:
    return "".join(f"{token}," for token in tokens)


def _unless_nothing_is_left(scores: list[float], forbidden: set[int]) -> list[float]:
    masked = [-math.inf if token in forbidden else score for token, score in enumerate(scores)]
    return masked if max(masked) > -math.inf else scores


def candidates(logits: Sequence[float], params: SamplingParams) -> list[int]:
    """Ids that survive temperature, min-p, top-k and top-p, ascending."""
    scores = [logit / params.temperature for logit in logits]
    top = max(scores)
    kept = [v for v, score in enumerate(scores) if math.exp(score - top) >= params.min_p]
    if params.top_k:
        kept = [v for v in kept if sum(other > scores[v] for other in scores) < params.top_k]
    if params.top_p < 1.0:
        mass = {v: math.exp(scores[v] - top) for v in kept}
        total = math.fsum(mass.values())
        # A token is in the nucleus while those strictly more likely do not reach top_p by themselves.
        kept = [v for v in kept if math.fsum(m for m in mass.values() if m > mass[v]) < params.top_p * total]
    return kept


def choose(
    logits: Sequence[float],
    params: SamplingParams,
    position: int,
    before: Sequence[int] = (),
    num_prompt: int = 0,
) -> int:
    """The token the contract names for this position; of equals the lowest.

    ``before`` are the tokens before the position, of which the first ``num_prompt`` are the prompt.
    """
    logits = edited(logits, params, before, num_prompt)
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
