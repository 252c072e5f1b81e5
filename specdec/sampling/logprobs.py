"""Log-probabilities of emitted tokens, as OpenAI means them: those of the model, before any processing.

That is what vLLM calls ``raw_logprobs``, its default. Penalties and temperature are the request's doing; a reader of
log-probabilities asks what the model holds. Ids the tokenizer does not know have no part in the distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.sampling.choose import RowToChoose
from specdec.types import TokenLogprobs


def logprobs_of(logits: Tensor, rows: Sequence[RowToChoose], tokens: Sequence[int]) -> list[TokenLogprobs | None]:
    """Log-probabilities of the chosen tokens, for the rows that ask for them.

    Args:
        logits: float [n, vocab], as the model gave them.
        rows: n of them.
        tokens: n token ids, chosen from the rows.

    Returns:
        n entries; None for a row that does not ask. Each row is computed alone, so the batch changes no bit.
    """
    return [
        None if row.num_logprobs is None else _of_row(logits[index], tokens[index], row.num_logprobs)
        for index, row in enumerate(rows)
    ]


def _of_row(logits: Tensor, token: int, num_top: int) -> TokenLogprobs:
    logprobs = torch.log_softmax(logits.to(torch.float64), 0)
    own = float(logprobs[token])
    if not num_top:
        return TokenLogprobs(own)
    least = torch.topk(logprobs, min(num_top, logprobs.numel())).values[-1]
    # All ties with the last are looked at, so that it is the ids that decide between them.
    ids = torch.nonzero((logprobs >= least) & (logprobs > float("-inf"))).squeeze(1)
    pairs = sorted(zip(ids.tolist(), logprobs[ids].tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(own, tuple(pairs[:num_top]))
