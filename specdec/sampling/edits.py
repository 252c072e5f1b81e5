"""What happens to logits before temperature: bias, masks, penalties.

In this order, which is vLLM's (its masks come before its bias, but a masked token stays masked whatever is added
to it, so the two commute; its penalties come last, so a repetition penalty scales a biased logit):

1. ``logit_bias`` is added, as OpenAI defines it.
2. Masks: what the grammar does not allow; end tokens before ``min_tokens``; the last token of a bad word after the
   others. A mask that would leave no token at all is left out.
3. ``repetition_penalty`` over prompt and generated tokens, as Hugging Face and vLLM have it from CTRL (Keskar et
   al., arXiv 1909.05858): a positive logit is divided by it, a negative one multiplied.
4. ``frequency_penalty`` times the count, then ``presence_penalty``, over generated tokens only, as OpenAI defines
   them: ``logit[v] -= frequency * count[v] + presence * (count[v] > 0)``.

Work is by the tokens concerned, never by the length of the context times the vocabulary, and all on one row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from specdec.params import SamplingParams
from specdec.sampling.history import RowContext


def edit_logits(logits: Tensor, params: SamplingParams, context: RowContext) -> Tensor:
    """Bias, mask and penalise one row.

    Args:
        logits: float [vocab]; not changed.
        params: all token ids in them are in the vocabulary.
        context: what stands before the position.

    Returns:
        float64 [vocab].
    """
    scores = logits.to(torch.float64, copy=True)
    if params.logit_bias:
        scores[_ids([token for token, _ in params.logit_bias], scores)] += _values(
            [bias for _, bias in params.logit_bias], scores
        )
    if (allowed := context.allowed()) is not None:
        scores = _only(scores, allowed)
    if params.end_token_ids and context.num_generated < params.min_tokens:
        scores = _without(scores, params.end_token_ids)
    if params.bad_words:
        scores = _without(scores, _completions(params.bad_words, context))
    _penalise(scores, params, context)
    return scores


def _penalise(scores: Tensor, params: SamplingParams, context: RowContext) -> None:
    """All penalties, in place."""
    if params.repetition_penalty != 1.0 and (seen := context.seen()):
        ids = _ids(seen, scores)
        before, penalty = scores[ids], params.repetition_penalty
        scores[ids] = torch.where(before < 0, before * penalty, before / penalty)
    if (params.frequency_penalty or params.presence_penalty) and (counts := context.generated_counts()):
        ids = _ids(counts, scores)
        amounts = params.frequency_penalty * _values(counts.values(), scores) + params.presence_penalty
        scores[ids] -= amounts


def _completions(bad_words: Sequence[tuple[int, ...]], context: RowContext) -> set[int]:
    """The tokens that would complete a bad word here."""
    tail = context.generated_tail(max(len(word) for word in bad_words) - 1)
    completed = set()
    for *others, last in bad_words:
        if others and (len(others) > len(tail) or others[-1] != tail[-1]):
            continue
        if tail[len(tail) - len(others) :] == tuple(others):
            completed.add(last)
    return completed


def _only(scores: Tensor, allowed: Collection[int]) -> Tensor:
    """The scores with all other tokens made impossible, unless nothing would be left."""
    ids = _ids(allowed, scores)
    masked = torch.full_like(scores, float("-inf"))
    masked[ids] = scores[ids]
    return masked if bool(masked.max() > float("-inf")) else scores


def _without(scores: Tensor, forbidden: Collection[int]) -> Tensor:
    """The scores with some tokens made impossible, unless nothing would be left."""
    if not forbidden:
        return scores
    masked = scores.clone()
    masked[_ids(forbidden, scores)] = float("-inf")
    return masked if bool(masked.max() > float("-inf")) else scores


def _ids(tokens: Collection[int], like: Tensor) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64, device=like.device)


def _values(values: Collection[float], like: Tensor) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64, device=like.device)
