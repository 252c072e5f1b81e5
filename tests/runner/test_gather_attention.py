from __future__ import annotations

import pytest
import torch

from specdec.errors import UnsupportedModelError
from specdec.runner.attention import AttentionOptions
from specdec.runner.exact_attention import ExactAttention
from specdec.runner.gather_attention import GatherAttention
from tests.runner.attention_cases import make_sequences, naive, run


@pytest.mark.parametrize("window", [None, 1, 24, 64, 100])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("scattered", [False, True])
def test_agrees_with_textbook_and_exact_attention(
    window: int | None, num_heads: int, num_kv_heads: int, scattered: bool
) -> None:
    options = AttentionOptions(0.25, window, None)
    lengths = [1, 130, 64, 65]
    sequences = make_sequences(lengths, num_heads=num_heads, num_kv_heads=num_kv_heads, scattered=scattered)
    spans = [(0, 1), (100, 130), (63, 64), (0, 65)]
    parts = [(sequence, *span) for sequence, span in zip(sequences, spans, strict=True)]
    gathered = run(GatherAttention(torch.device("cpu")), parts, options)
    exact = run(ExactAttention(), parts, options)
    for (sequence, start, end), output, other in zip(parts, gathered, exact, strict=True):
        torch.testing.assert_close(output, other, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(output.double(), naive(sequence, options)[start:end], rtol=1e-4, atol=1e-5)


def test_soft_capped_scores_are_refused() -> None:
    (sequence,) = make_sequences([5], num_heads=4, num_kv_heads=2, scattered=False)
    with pytest.raises(UnsupportedModelError, match="device: cpu"):
        run(GatherAttention(torch.device("cpu")), [(sequence, 0, 5)], AttentionOptions(0.25, None, 3.0))
