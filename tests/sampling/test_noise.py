from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.sampling.noise import gumbel_noise, noise_key, uniform_noise
from specdec.types import MAX_SEED
from tests.oracles import SplitMix64, chi_square, chi_square_limit, uniform

SEEDS = st.integers(0, MAX_SEED)
POSITIONS = st.integers(0, 2**31)
TOKENS = st.lists(st.integers(0, 300_000), min_size=1, max_size=40)


def test_the_oracle_is_the_published_generator() -> None:
    generator = SplitMix64(1234567)
    assert [generator.next() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(SEEDS, POSITIONS, TOKENS)
def test_equals_the_oracle(seed: int, position: int, tokens: list[int]) -> None:
    noise = uniform_noise(noise_key(seed, position), torch.tensor(tokens))
    assert noise.dtype == torch.float64
    assert noise.tolist() == [uniform(seed, position, token) for token in tokens]


@pytest.mark.parametrize("seed", [0, 1, MAX_SEED])
@pytest.mark.parametrize("position", [0, 1, 131_071])
def test_equals_the_oracle_at_the_ends(seed: int, position: int) -> None:
    tokens = [0, 1, 2**31 - 1]
    noise = uniform_noise(noise_key(seed, position), torch.tensor(tokens))
    assert noise.tolist() == [uniform(seed, position, token) for token in tokens]


@given(SEEDS, POSITIONS, TOKENS, st.randoms(use_true_random=False))
def test_the_bits_do_not_depend_on_company_shape_or_order(
    seed: int, position: int, tokens: list[int], shuffler: random.Random
) -> None:
    key = noise_key(seed, position)
    together = gumbel_noise(key, torch.tensor(tokens)).tolist()
    order = shuffler.sample(range(len(tokens)), len(tokens))
    shuffled = gumbel_noise(key, torch.tensor([tokens[i] for i in order])).tolist()
    columns = gumbel_noise(key, torch.tensor(tokens).unsqueeze(1).expand(-1, 3))
    assert [gumbel_noise(key, torch.tensor(token)).item() for token in tokens] == together
    assert shuffled == [together[i] for i in order]
    assert columns[:, 1].tolist() == together


def test_a_whole_vocabulary_equals_its_tokens_alone() -> None:
    key = noise_key(7, 11)
    whole = gumbel_noise(key, torch.arange(50_001))
    for token in (0, 1, 7, 8, 31, 32, 33, 49_999, 50_000):
        assert gumbel_noise(key, torch.tensor([token])).item() == whole[token].item()


def test_is_finite_and_never_zero_nor_one() -> None:
    noise = uniform_noise(noise_key(5, 0), torch.arange(200_000))
    assert noise.min() > 0.0
    assert noise.max() < 1.0
    assert (noise * 2**53 % 2 == 1).all()
    assert gumbel_noise(noise_key(5, 0), torch.arange(200_000)).isfinite().all()


def test_gumbel_is_the_double_logarithm() -> None:
    key = noise_key(3, 4)
    expected = [-math.log(-math.log(uniform(3, 4, token))) for token in range(100)]
    assert gumbel_noise(key, torch.arange(100)).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def histogram(noise: list[float], bins: int = 64) -> list[int]:
    counts = [0] * bins
    for value in noise:
        counts[int(value * bins)] += 1
    return counts


@pytest.mark.parametrize("varying", ["token", "position", "seed"])
def test_is_uniform_along_every_argument(varying: str) -> None:
    if varying == "token":
        noise = uniform_noise(noise_key(1, 2), torch.arange(20_000)).tolist()
    else:
        keys = (noise_key(1, n) if varying == "position" else noise_key(n, 2) for n in range(20_000))
        noise = [uniform_noise(key, torch.tensor(3)).item() for key in keys]
    assert chi_square(histogram(noise), [1 / 64] * 64) < chi_square_limit(63)


def test_the_uniformity_check_can_fail() -> None:
    squared = (uniform_noise(noise_key(1, 2), torch.arange(20_000)) ** 1.1).tolist()
    assert chi_square(histogram(squared), [1 / 64] * 64) > chi_square_limit(63)


@pytest.mark.parametrize("neighbour", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, -1, 0), (0, 1, -1)])
def test_neighbours_are_independent(neighbour: tuple[int, int, int]) -> None:
    seed_step, position_step, token_step = neighbour
    counts = [0] * 64
    for index in range(100):
        seed, position, tokens = 10 + 3 * index, 20 + 7 * index, torch.arange(100) + 5
        here = uniform_noise(noise_key(seed, position), tokens)
        there = uniform_noise(noise_key(seed + seed_step, position + position_step), tokens + token_step)
        for cell in ((here * 8).long() * 8 + (there * 8).long()).tolist():
            counts[cell] += 1
    assert chi_square(counts, [1 / 64] * 64) < chi_square_limit(63)


def test_the_independence_check_can_fail() -> None:
    counts = [0] * 64
    here = uniform_noise(noise_key(1, 1), torch.arange(10_000))
    there = (here + 0.9 * uniform_noise(noise_key(1, 2), torch.arange(10_000))) % 1.0
    for cell in ((here * 8).long() * 8 + (there * 8).long()).tolist():
        counts[cell] += 1
    assert chi_square(counts, [1 / 64] * 64) > chi_square_limit(63)


def winners(probabilities: list[float], num_samples: int) -> list[int]:
    scores = torch.tensor(probabilities, dtype=torch.float64).log()
    tokens = torch.arange(len(probabilities))
    counts = [0] * len(probabilities)
    for sample in range(num_samples):
        counts[int(torch.argmax(scores + gumbel_noise(noise_key(sample, 9), tokens)))] += 1
    return counts


def test_the_largest_perturbed_score_follows_the_distribution() -> None:
    probabilities = [0.5, 0.25, 0.15, 0.07, 0.03]
    counts = winners(probabilities, 8000)
    assert chi_square(counts, probabilities) < chi_square_limit(4)
    slightly_wrong = [0.47, 0.28, 0.15, 0.07, 0.03]
    assert chi_square(counts, slightly_wrong) > chi_square_limit(4)
