"""What a request asks of the choice of its tokens, and of speculation, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdec.errors import InvalidRequestError

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_BIAS = 100.0
MAX_PENALTY = 2.0

# Far beyond any use, and near enough to 1 that no logit of any model becomes infinite.
MIN_REPETITION_PENALTY = 1e-6
MAX_REPETITION_PENALTY = 1e6


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's own token is chosen at every position.

    The token at position ``i`` is ``argmax_v [log p_i(v) + G(seed, i, v)]`` where ``p_i`` is the
    model's distribution after all of the below, in the order `specdec.sampling.processors` names, and ``G`` is
    Gumbel noise, a pure function of its arguments. With temperature 0 it is the argmax of the logits after bias,
    masks and penalties. "Generated" tokens are those after the prompt: committed ones and, at a drafted position,
    the draft tokens before it.

    Attributes:
        temperature: >= 0; 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all. Ties with the k-th are kept.
        top_p: keep the smallest set of most likely tokens whose mass reaches this; in (0, 1].
        seed: in [0, 2**63 - 1]; the whole randomness of the request.
        min_p: keep tokens at least this times as likely as the likeliest; in [0, 1], 0 keeps all.
        presence_penalty: subtracted from the logit of every token that was generated; in [-2, 2].
        frequency_penalty: subtracted once for every time a token was generated; in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or generated;
            in [1e-6, 1e6], 1 changes nothing.
        logit_bias: (token id, bias) pairs, added to logits; each id once, biases in [-100, 100].
        min_tokens: ``end_token_ids`` are not chosen before this many tokens were generated, and no stop string is
            looked for in the text of these.
        end_token_ids: what would end the generation. The engine fills it in where ``min_tokens`` needs it: the
            model's end tokens, unless ignored, and the request's ``stop_token_ids``.
        bad_words: sequences of token ids of which the last is not chosen after the others. Only generated tokens
            count as the others.
        grammar: only texts of this grammar, in words the workers' mask factory understands (see
            `specdec.sampling.mask`); None allows everything.
        logprobs: tell the log-probability of every emitted token and of this many most likely alternatives; None
            tells nothing. It changes no token.

    Raises:
        InvalidRequestError: a value is out of range; ``param`` names it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise InvalidRequestError(
                f"temperature must be a finite number >= 0, not {self.temperature}", param="temperature"
            )
        if self.top_k < 0:
            raise InvalidRequestError(f"top_k must be >= 0 (0 keeps all), not {self.top_k}", param="top_k")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequestError(f"top_p must be in (0, 1], not {self.top_p}", param="top_p")
        if not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequestError(f"seed must be in [0, 2**63 - 1], not {self.seed}", param="seed")
        _require_within("min_p", self.min_p, 0.0, 1.0)
        _require_within("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _require_within("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _require_within("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        if self.min_tokens < 0:
            raise InvalidRequestError(f"min_tokens must be >= 0, not {self.min_tokens}", param="min_tokens")
        if self.logprobs is not None:
            _require_within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._check_tokens()

    def _check_tokens(self) -> None:
        for token, bias in self.logit_bias:
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise InvalidRequestError(
                    f"logit_bias of token {token} must be in [-100, 100], not {bias}", param="logit_bias"
                )
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise InvalidRequestError("logit_bias names a token id twice", param="logit_bias")
        if not all(self.bad_words):
            raise InvalidRequestError("a bad word is empty; remove it", param="bad_words")

    @property
    def edits_logits(self) -> bool:
        """Whether anything happens to the logits before temperature."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.min_tokens
            or self.bad_words
            or self.grammar is not None
        )

    @property
    def named_token_ids(self) -> set[int]:
        """All token ids in these parameters."""
        words = {token for word in self.bad_words for token in word}
        return words | {token for token, _ in self.logit_bias} | set(self.end_token_ids)


@dataclass(frozen=True, slots=True)
class SpeculativeParams:
    """What one request asks of speculation. It can change the speed of an answer, never its text.

    Attributes:
        enabled: False decodes this request with the target alone.
        num_draft_tokens: draft tokens per step; None leaves it to the server.
    """

    enabled: bool = True
    num_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.num_draft_tokens is not None and self.num_draft_tokens < 0:
            raise InvalidRequestError(
                f"num_draft_tokens must be >= 0, not {self.num_draft_tokens}",
                param="speculative.num_draft_tokens",
            )


def _require_within(name: str, value: float, low: float, high: float) -> None:
    """Refuse what is outside of [low, high], NaN included."""
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be in [{low:g}, {high:g}], not {value}", param=name)
