"""What a forward costs: rows, context, batch and prefill, against transformers on the same rounded weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import DynamicCache, PreTrainedModel

from bench.timing import median_ms
from specdec.cache.blocks import num_blocks_for
from specdec.config import ModelSettings, WorkerSettings
from specdec.runner.batch import SequenceRows
from specdec.runner.linears import PackedLinear
from specdec.runner.load import load_model, load_reference
from specdec.runner.model import ModelRunner
from specdec.runner.sources import resolve_source

CONTEXT = 256
LONG_CONTEXT = 4096
ROWS = (1, 3, 5, 8, 16)


def run(source: str, repeats: int) -> dict[str, float]:
    """Milliseconds by case, and their ratios; one thread."""
    torch.set_num_threads(1)
    settings = ModelSettings(source=source, device="cpu")
    loaded = load_model(settings)
    runner = ModelRunner(loaded, WorkerSettings(max_model_len=LONG_CONTEXT + 64))
    reference = load_reference(resolve_source(source), settings.dtype)
    tokens = torch.randint(
        5, runner.vocab_size, (LONG_CONTEXT + 64,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    blocks = list(range(num_blocks_for(LONG_CONTEXT + 64)))
    for start in range(0, LONG_CONTEXT, runner.max_tokens):
        runner.forward([SequenceRows(tokens[start : start + runner.max_tokens], start, blocks, 0)])

    def rows(count: int, context: int = CONTEXT) -> Callable[[], object]:
        return lambda: runner.forward([SequenceRows(tokens[context : context + count], context, blocks, count)])

    def batch(num_sequences: int, count: int) -> Callable[[], object]:
        # All read the same blocks: what they cost is the same.
        sequence = SequenceRows(tokens[CONTEXT : CONTEXT + count], CONTEXT, blocks, count)
        return lambda: runner.forward([sequence] * num_sequences)

    def prefill() -> None:
        for start in range(0, 512, runner.max_tokens):
            chunk = tokens[start : min(start + runner.max_tokens, 512)]
            runner.forward([SequenceRows(chunk, start, blocks, 1)])

    figures = median_ms(
        {
            **{f"rows_{count}": rows(count) for count in ROWS},
            "rows_1_context_4096": rows(1, LONG_CONTEXT),
            "rows_5_context_4096": rows(5, LONG_CONTEXT),
            "batch_8_rows_5": batch(8, 5),
            **{f"linears_rows_{count}": linears(loaded.model, count) for count in (1, 5)},
            "transformers_rows_1": reference_step(reference, tokens, 1),
            "transformers_rows_5": reference_step(reference, tokens, 5),
        },
        repeats,
    )
    figures |= median_ms(
        {"prefill_512": prefill, "transformers_prefill_512": reference_prefill(reference, tokens)}, max(3, repeats // 5)
    )
    return figures | {
        "ratio_rows_5_over_1": figures["rows_5"] / figures["rows_1"],
        "ratio_rows_8_over_1": figures["rows_8"] / figures["rows_1"],
        "ratio_transformers_rows_5_over_1": figures["transformers_rows_5"] / figures["transformers_rows_1"],
        "share_not_linears_rows_1": 1.0 - figures["linears_rows_1"] / figures["rows_1"],
        "speedup_over_transformers_rows_1": figures["transformers_rows_1"] / figures["rows_1"],
        "speedup_over_transformers_prefill_512": figures["transformers_prefill_512"] / figures["prefill_512"],
        "throughput_batch_8_rows_5_over_rows_5": 8 * figures["rows_5"] / figures["batch_8_rows_5"],
    }


def linears(model: PreTrainedModel, count: int) -> Callable[[], object]:
    """All linear layers of a model, one after another, and nothing else."""
    work = [(m, torch.randn(count, m.in_features)) for m in model.modules() if isinstance(m, PackedLinear)]

    def multiply() -> None:
        with torch.inference_mode():
            for linear, inputs in work:
                linear(inputs)

    return multiply


@torch.inference_mode()
def reference_step(model: PreTrainedModel, tokens: list[int], count: int) -> Callable[[], object]:
    """A step of ``count`` tokens at context `CONTEXT` with transformers' own cache, cropped after each."""
    cache = DynamicCache(config=model.config)
    model(torch.tensor([tokens[:CONTEXT]]), cache=cache, logits_to_keep=1)
    ids = torch.tensor([tokens[CONTEXT : CONTEXT + count]])

    def step() -> None:
        with torch.inference_mode():
            model(ids, cache=cache)
            cache.crop(-count)

    return step


def reference_prefill(model: PreTrainedModel, tokens: list[int]) -> Callable[[], object]:
    """A prompt of 512 tokens with transformers, in one piece."""
    ids = torch.tensor([tokens[:512]])

    def prefill() -> None:
        with torch.inference_mode():
            model(ids, cache=DynamicCache(config=model.config), logits_to_keep=1)

    return prefill
