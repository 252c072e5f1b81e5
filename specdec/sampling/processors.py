"""From logits to the tokens that may be chosen, and their scores.

The one path from a model's logits to the distribution a token is drawn from, for draft and target alike.
Everything works on one row: the same operations on the same shapes whatever the batch, so the same bits.

The order is vLLM's, which most servers and their clients have come to expect: bias, masks and penalties
(`specdec.sampling.edits`), temperature, min-p, top-k, top-p. So penalties act on the model's own logits, not on
tempered ones, and min-p looks at the tempered distribution. (Hugging Face has min-p after top-p; what survives is
nearly always the same.) Greedy rows go through the first three only: the rest never changes what is likeliest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.sampling.edits import edit_logits
from specdec.sampling.history import RowContext
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


def edited_logits(logits: Tensor, params: SamplingParams, context: RowContext | None) -> Tensor:
    """The logits after bias, masks and penalties: themselves where a request has none of these.

    Args:
        logits: float [vocab], of one position.
        context: what stands before the position; needed where ``params.edits_logits``.
    """
    if not params.edits_logits:
        return logits
    if context is None:
        raise ValueError("these parameters depend on the tokens before, and none are given")
    return edit_logits(logits, params, context)


def process_logits(logits: Tensor, params: SamplingParams, context: RowContext | None = None) -> Candidates:
    """Apply every processor, in the order of this module's description.

    Ties with the last token kept are kept too, so the result does not depend on how a sort orders equals.

    Args:
        logits: float [vocab], of one position.
        params: temperature > 0 (greedy rows need no candidates).
        context: as for `edited_logits`.
    """
    scores = edited_logits(logits, params, context).to(torch.float64)
    # The best score becomes 0, so that no temperature, however small, makes an infinite one.
    scores = (scores - scores.max()) / params.temperature
    threshold = None
    if 0 < params.top_k < scores.numel():
        threshold = torch.topk(scores, params.top_k).values[-1]
    if params.min_p > 0.0:
        # The likeliest has score 0. Of what both keep, it does not matter which came first.
        least = scores.new_tensor(math.log(params.min_p))
        threshold = least if threshold is None else torch.maximum(threshold, least)
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
