from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from specdec.cache.blocks import BLOCK_SIZE
from specdec.runner.attention import AttentionOptions
from specdec.runner.exact_attention import ExactAttention
from tests.runner.attention_cases import NUM_BLOCKS, make_sequences, naive, run

HEADS = [(4, 4), (4, 2), (4, 1), (3, 1), (1, 1)]
LENGTHS = [1, 130, 64, 5, 65]
OPTIONS = {
    "plain": AttentionOptions(0.25, None, None),
    "window": AttentionOptions(0.25, 24, None),
    "wide window": AttentionOptions(0.25, 64, None),
    "window over several blocks": AttentionOptions(0.25, 150, None),
    "window of one": AttentionOptions(0.25, 1, None),
    "softcap": AttentionOptions(0.25, None, 3.0),
    "window and softcap": AttentionOptions(0.4, 70, 3.0),
}

with_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
with_heads = pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)


KERNEL = ExactAttention()


@with_options
@with_heads
def test_equals_textbook_attention(options: AttentionOptions, num_heads: int, num_kv_heads: int) -> None:
    sequences = make_sequences(LENGTHS, num_heads=num_heads, num_kv_heads=num_kv_heads, scattered=True)
    outputs = run(KERNEL, [(s, 0, s.length) for s in sequences], options)
    for sequence, output in zip(sequences, outputs, strict=True):
        torch.testing.assert_close(output.double(), naive(sequence, options), rtol=1e-4, atol=1e-5)


def test_the_comparison_sees_a_wrong_window() -> None:
    (sequence,) = make_sequences([130], num_heads=4, num_kv_heads=2, scattered=False)
    (output,) = run(KERNEL, [(sequence, 0, 130)], AttentionOptions(0.25, 24, None))
    assert not torch.allclose(output.double(), naive(sequence, AttentionOptions(0.25, 25, None)), rtol=1e-4, atol=1e-5)


ALONE = (0, 1, 2, 22, 23, 24, 63, 64, 65, 66, 127, 128, 149, 200, 290, 329)


@with_options
@with_heads
def test_a_query_has_the_same_bits_alone_in_chunks_and_in_a_batch(
    options: AttentionOptions, num_heads: int, num_kv_heads: int
) -> None:
    attention = KERNEL
    lengths = [3, 330, 67]
    sequences = make_sequences(lengths, num_heads=num_heads, num_kv_heads=num_kv_heads, scattered=False)
    expected = run(attention, [(s, 0, s.length) for s in sequences], options)
    for sequence, outputs in zip(sequences, expected, strict=True):
        for position in (p for p in ALONE if p < sequence.length):
            (alone,) = run(attention, [(sequence, position, position + 1)], options)
            assert torch.equal(alone[0], outputs[position])
    chunks = random.Random(0)
    for _ in range(8):
        parts = []
        for sequence in chunks.sample(sequences, chunks.randint(1, 3)):
            start = chunks.randrange(sequence.length)
            parts.append((sequence, start, chunks.randint(start + 1, sequence.length)))
        outputs = run(attention, parts, options, garbage=chunks.choice([0.0, -50.0]))
        for (sequence, start, end), output in zip(parts, outputs, strict=True):
            index = next(i for i, other in enumerate(sequences) if other is sequence)
            assert torch.equal(output, expected[index][start:end])


@with_options
@with_heads
def test_the_bits_do_not_depend_on_where_the_blocks_are(
    options: AttentionOptions, num_heads: int, num_kv_heads: int
) -> None:
    attention = KERNEL
    (sequence,) = make_sequences([330], num_heads=num_heads, num_kv_heads=num_kv_heads, scattered=False)
    tables = [
        [0, 1, 2, 3, 4, 5],
        [9, 8, 7, 6, 5, 4],
        [3, 4, 9, 10, 11, 1],
        [14, 2, 12, 13, 7, 8],
        [10, 11, 12, 13, 5, 6],
    ]
    for start, end in [(0, 330), (329, 330), (250, 256), (100, 170)]:
        outputs = [run(attention, [(sequence.moved(table), start, end)], options)[0] for table in tables]
        assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_other_orders_of_summation_do_differ() -> None:
    # The checks above can fail: attention in one product over the whole context has other bits in other company.
    (sequence,) = make_sequences([150], num_heads=4, num_kv_heads=4, scattered=False)
    queries, keys, values = (t.transpose(0, 1) for t in (sequence.queries, sequence.keys, sequence.values))

    def last_query(num_queries: int, num_keys: int) -> Tensor:
        scores = queries[:, 150 - num_queries :] @ keys.transpose(1, 2)
        scores = torch.nn.functional.pad(scores, (0, num_keys - 150), value=float("-inf"))
        padded = torch.nn.functional.pad(values, (0, 0, 0, num_keys - 150))
        return (scores.softmax(-1) @ padded)[:, -1]

    variants = [last_query(n, k) for n, k in itertools.product((1, 2, 5, 12, 64), (150, 160, 192))]
    assert any(not torch.equal(variant, variants[0]) for variant in variants)


@pytest.mark.parametrize("garbage", [1e30, -1e30])
def test_what_a_query_may_not_see_has_no_influence(garbage: float) -> None:
    (sequence,) = make_sequences([70], num_heads=4, num_kv_heads=2, scattered=False)
    options = AttentionOptions(0.25, None, None)
    clean = run(KERNEL, [(sequence, 60, 70)], options, garbage=0.0)[0]
    assert torch.equal(run(KERNEL, [(sequence, 60, 70)], options, garbage=garbage)[0], clean)


def test_the_cases_span_several_blocks_and_fit_the_pool() -> None:
    assert max(LENGTHS) > 2 * BLOCK_SIZE
    assert sum(-(-length // BLOCK_SIZE) for length in LENGTHS) <= NUM_BLOCKS
