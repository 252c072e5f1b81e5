"""How often a draft token is accepted, by three rules, over temperatures, on a real pair.

- coupled: draft and target choose with the same noise, a guess is accepted if both chose the same (what specdec does);
- rejection: the draft samples from q, a guess x is accepted with probability min(1, p(x) / q(x)), so with probability
  sum(min(p, q)) (Leviathan et al., arXiv 2211.17192): the most any rule can accept;
- greedy draft: the draft proposes its most likely token, accepted with the target's probability of it (what engines do
  that draft greedily whatever the temperature).

The texts are the target's own, sampled at the temperature in question; both models score every position of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.decode import PROMPTS
from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.runner.load import load_reference
from specdec.runner.sources import resolve_source
from specdec.sampling.noise import gumbel_noise, noise_key

TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
MAX_TOKENS = 64
NUM_DRAWS = 32


def run(config: EngineConfig, out: Path | None) -> dict[str, float]:
    """Acceptance of a single draft token by rule and temperature; a plot and the figures go to ``out``."""
    texts = _texts(config)
    target_folder = resolve_source(config.target.source, config.target.revision)
    if config.draft is None or config.draft_model is None:
        raise SystemExit("the config has no draft to study")
    target = load_reference(target_folder, config.target.dtype)
    draft_folder = resolve_source(config.draft_model.source, config.draft_model.revision)
    draft = load_reference(draft_folder, config.draft.dtype, config.draft.cut_layers)
    curves: dict[str, list[float]] = {"coupled": [], "rejection": [], "greedy draft": []}
    for temperature in TEMPERATURES:
        rates = [_rates(target, draft, ids, start, temperature) for ids, start in texts[temperature]]
        for name in curves:
            curves[name].append(sum(rate[name] for rate in rates) / len(rates))
    if out is not None:
        _plot(curves, out)
    return {
        f"{name.replace(' ', '_')}_T{temperature}": rate
        for name, values in curves.items()
        for temperature, rate in zip(TEMPERATURES, values, strict=True)
    }


def _texts(config: EngineConfig) -> dict[float, list[tuple[list[int], int]]]:
    """The target's own texts by temperature: token ids, and where the answer starts."""
    texts: dict[float, list[tuple[list[int], int]]] = {temperature: [] for temperature in TEMPERATURES}
    with Engine(config) as engine:
        for temperature in TEMPERATURES:
            for seed, prompt in enumerate(PROMPTS):
                request = engine.request(
                    prompt, chat=True, max_tokens=MAX_TOKENS, temperature=temperature, seed=seed, speculative=False
                )
                answer = [token for chunk in engine.stream_request(request) for token in chunk.token_ids]
                texts[temperature].append(([*request.prompt_token_ids, *answer], len(request.prompt_token_ids)))
    return texts


@torch.inference_mode()
def _rates(
    target: PreTrainedModel, draft: PreTrainedModel, ids: list[int], start: int, temperature: float
) -> dict[str, float]:
    """Mean acceptance over the positions of one answer."""
    log_p, log_q = (_log_probabilities(model, ids, start, temperature) for model in (target, draft))
    p, q = log_p.exp(), log_q.exp()
    return {
        "coupled": sum(_coupled(log_p[i], log_q[i], start + i) for i in range(len(p))) / len(p),
        "rejection": float(torch.minimum(p, q).sum(-1).mean()),
        "greedy draft": float(p.gather(1, q.argmax(-1, keepdim=True)).mean()),
    }


def _log_probabilities(model: PreTrainedModel, ids: list[int], start: int, temperature: float) -> Tensor:
    """Of every token of the answer: float64 [positions, vocab]."""
    logits = model(torch.tensor([ids])).logits[0, start - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, dim=-1)


def _coupled(log_p: Tensor, log_q: Tensor, position: int) -> float:
    """Share of noise draws with which both models choose the same token."""
    token_ids = torch.arange(len(log_p))
    same = 0
    for seed in range(NUM_DRAWS):
        noise = gumbel_noise(noise_key(seed, position), token_ids)
        same += int(torch.argmax(log_p + noise) == torch.argmax(log_q + noise))
    return same / NUM_DRAWS


def _plot(curves: dict[str, list[float]], out: Path) -> None:
    """Write ``acceptance.json`` and ``acceptance.png``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    out.mkdir(parents=True, exist_ok=True)
    (out / "acceptance.json").write_text(json.dumps({"temperatures": TEMPERATURES, **curves}, indent=1))
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, values in curves.items():
        axes.plot(TEMPERATURES, values, marker="o", label=name)
    axes.set_xlabel("temperature")
    axes.set_ylabel("share of draft tokens accepted")
    axes.set_ylim(0, 1)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out / "acceptance.png", dpi=120)
