"""How long a running stream waits while a long prompt is admitted: its worst gap between tokens, over its usual one."""

from __future__ import annotations

import statistics
import threading
import time

from specdec.config import EngineConfig
from specdec.engine import Engine

PROMPT_TOKENS = 4000
USUAL_TOKENS = 40


def run(config: EngineConfig) -> dict[str, float]:
    """Milliseconds between the chunks of a plain greedy stream, alone and beside a prompt of `PROMPT_TOKENS`."""
    with Engine(config) as engine:
        filler = engine.tokenizer.encode("All work and no play makes a dull story. " * PROMPT_TOKENS)[:PROMPT_TOKENS]
        prefill = threading.Thread(
            target=lambda: engine.generate(filler, max_tokens=1, temperature=0.0, speculative=False)
        )
        gaps: list[float] = []
        last = None
        for _ in engine.stream(
            "Once upon a time", max_tokens=4000, temperature=0.0, ignore_eos=True, speculative=False
        ):
            now = time.perf_counter()
            if last is not None:
                gaps.append((now - last) * 1e3)
            last = now
            if len(gaps) == USUAL_TOKENS:
                prefill.start()
            if len(gaps) > USUAL_TOKENS and not prefill.is_alive():
                break
    usual = statistics.median(gaps[:USUAL_TOKENS])
    beside = sorted(gaps[USUAL_TOKENS:])
    return {
        "usual_gap_ms": usual,
        "median_gap_beside_prefill_ms": statistics.median(beside),
        "worst_gap_beside_prefill_ms": beside[-1],
        "worst_over_usual": beside[-1] / usual,
        "p99_over_usual": beside[int(0.99 * len(beside))] / usual,
        "steps_beside_prefill": float(len(beside)),
    }
