"""From logits to the tokens that may be chosen, and their scores.

The one path from a model's logits to the distribution a token is drawn from, for draft and target alike.
Everything works on one row: the same operations on the same shapes whatever the batch, so the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.types import SamplingParams

# Most nuclei are small. Looking among this many most likely tokens first avoids sorting the vocabulary.
_NUCLEUS_GUESS = 512


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that survive the processors.

    Attributes:
        token_ids: int64 [n], ascending; None when every token survives.
        scores: float64 [n], log-probabilities up to a constant, after temperature.
    """

    token_ids: Tensor | None
    scores: Tensor


def process_logits(logits: Tensor, params: SamplingParams) -> Candidates:
    """Apply temperature, top-k and top-p, in this order.

    Ties with the last token kept are kept too, so the result does not depend on how a sort orders equals.

    Args:
        logits: float [vocab], of one position.
        params: temperature > 0 (greedy rows need no candidates).
    """
    scores = logits.to(torch.float64)
    # The best score becomes 0, so that no temperature, however small, makes an infinite one.
    scores = (scores - scores.max()) / params.temperature
    threshold = None
    if 0 < params.top_k < scores.numel():
        threshold = torch.topk(scores, params.top_k).values[-1]
    if params.top_p < 1.0:
        kept = scores if threshold is None else scores[scores >= threshold]
        threshold = _nucleus_threshold(kept, params.top_p)
    if threshold is None:
        return Candidates(None, scores)
    token_ids = torch.nonzero(scores >= threshold).squeeze(1)
    return Candidates(token_ids, scores[token_ids])


def _nucleus_threshold(scores: Tensor, top_p: float) -> Tensor:
    """The smallest score of the smallest set of most likely tokens whose mass is at least ``top_p``.

    Args:
        scores: float64 [n], log-probabilities up to a constant.
    """
    total = torch.logsumexp(scores, 0)
    for width in (min(_NUCLEUS_GUESS, scores.numel()), scores.numel()):
        descending = torch.topk(scores, width).values
        mass = torch.exp(descending - total).cumsum(0)
        if bool(mass[-1] >= top_p):
            return descending[torch.searchsorted(mass, top_p)]
    # Rounding left the whole mass a little below top_p: everything survives.
    return descending[-1]
