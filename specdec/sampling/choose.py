"""Choosing a token, and verifying a draft with it.

The target's token at position i is ``argmax_v [log p_i(v) + G(seed, i, v)]``: by the Gumbel-max trick an exact
sample of ``p_i``. A draft model proposes with the same formula, its own distribution and the same noise.
Verification needs no probabilities: a draft token is right if it equals the target's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.sampling.history import RowContext
from specdec.sampling.noise import gumbel_noise, noise_key
from specdec.sampling.processors import edited_logits, process_logits
from specdec.types import SamplingParams


@dataclass(frozen=True, slots=True)
class RowToChoose:
    """One row of logits that a token is to be chosen from.

    Attributes:
        params: of its request.
        position: absolute position of the token to choose.
        context: what stands before the position; needed where ``params.edits_logits``.
        num_logprobs: alternatives to tell log-probabilities of, beside the token's own; None tells nothing.
    """

    params: SamplingParams
    position: int
    context: RowContext | None = None
    num_logprobs: int | None = None


def choose_tokens(logits: Tensor, rows: Sequence[RowToChoose]) -> list[int]:
    """Choose one token for every row.

    Args:
        logits: float [n, vocab]; tokens that must never come out have -inf.
        rows: n of them.

    Returns:
        n token ids. Of equal scores the lowest id wins.
    """
    greedy = [i for i, row in enumerate(rows) if row.params.temperature == 0.0 and not row.params.edits_logits]
    # One transfer from the device for the whole batch, not one per row.
    choices = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    if len(greedy) == len(rows):
        choices = torch.argmax(logits, dim=-1)
    elif greedy:
        where = torch.tensor(greedy, device=logits.device)
        choices[where] = torch.argmax(logits[where], dim=-1)
    for index, row in enumerate(rows):
        if row.params.temperature > 0.0:
            choices[index] = _sample(logits[index], row)
        elif row.params.edits_logits:
            choices[index] = torch.argmax(edited_logits(logits[index], row.params, row.context))
    chosen: list[int] = choices.tolist()
    return chosen


def _sample(logits: Tensor, row: RowToChoose) -> Tensor:
    """The Gumbel-max sample of one row: int64 []."""
    candidates = process_logits(logits, row.params, row.context)
    key = noise_key(row.params.seed, row.position)
    if candidates.token_ids is None:
        token_ids = torch.arange(candidates.scores.numel(), device=logits.device)
        return torch.argmax(candidates.scores + gumbel_noise(key, token_ids))
    return candidates.token_ids[torch.argmax(candidates.scores + gumbel_noise(key, candidates.token_ids))]


def accept_draft(draft: Sequence[int], target_tokens: Sequence[int]) -> int:
    """How many leading draft tokens equal the target's own.

    Args:
        draft: k guessed tokens.
        target_tokens: k + 1 tokens, the target's own after the committed tokens and each draft prefix.

    Returns:
        n in [0, k]; the step emits ``target_tokens[: n + 1]``.
    """
    for index, token in enumerate(draft):
        if token != target_tokens[index]:
            return index
    return len(draft)
