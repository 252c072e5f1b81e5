"""What a user sees: tokens per second of the whole engine in one process, plain and speculative."""

from __future__ import annotations

import statistics
import time

from specdec.config import EngineConfig
from specdec.engine import Engine

PROMPTS = [
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "List five facts about the moon.",
    "Write a Python function that reverses a string.",
]
MAX_TOKENS = 64


def run(config: EngineConfig, num_draft_tokens: list[int], temperature: float, repeats: int) -> dict[str, float]:
    """Median tokens per second and acceptance length for each number of draft tokens, the settings in turn."""
    rates: dict[int, list[float]] = {k: [] for k in num_draft_tokens}
    lengths: dict[int, list[float]] = {k: [] for k in num_draft_tokens}
    with Engine(config) as engine:
        engine.generate(PROMPTS[0], chat=True, max_tokens=8)
        for repeat in range(repeats):
            for prompt in PROMPTS:
                texts = set()
                for k in num_draft_tokens:
                    started = time.perf_counter()
                    answer = engine.generate(
                        prompt,
                        chat=True,
                        max_tokens=MAX_TOKENS,
                        temperature=temperature,
                        seed=repeat,
                        num_draft_tokens=k,
                    )
                    rates[k].append(len(answer.token_ids) / (time.perf_counter() - started))
                    lengths[k].append(answer.stats.acceptance_length)
                    texts.add(answer.token_ids)
                if len(texts) != 1:
                    raise AssertionError(f"{prompt!r}: the text depends on the number of draft tokens")
    figures = {f"tokens_per_s_k{k}": statistics.median(values) for k, values in rates.items()}
    figures |= {f"acceptance_length_k{k}": statistics.mean(values) for k, values in lengths.items()}
    plain = figures.get("tokens_per_s_k0")
    if plain:
        figures |= {f"speedup_k{k}": figures[f"tokens_per_s_k{k}"] / plain for k in num_draft_tokens}
    return figures
