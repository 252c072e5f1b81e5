"""The words of the system as plain data: requests, emitted tokens, and the worker wire format.

Everything here is a slots dataclass of built-in types, so that it pickles small and knows no tensor,
no model and no transport. Token ids are ints; lengths and positions count tokens.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from specdec.errors import InvalidRequestError
from specdec.params import MAX_SEED as MAX_SEED
from specdec.params import SamplingParams as SamplingParams
from specdec.params import SpeculativeParams as SpeculativeParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to be continued.

    Attributes:
        request_id: unique among the requests in flight; also the sequence id on the workers.
        prompt_token_ids: at least one token.
        max_tokens: tokens to generate at most; >= 1, and >= ``sampling.min_tokens``.
        stop: strings that end the text; the text is cut before the first of them to appear.
        stop_token_ids: token ids that end the generation, beside the model's own end tokens.
        ignore_eos: go on past the model's end tokens (benchmarks).
        timeout_s: seconds from admission to the last token; None takes the server's default.
        cache_salt: requests with different salts share no cached KV, so that none can find out by its speed what
            another has sent; None shares with all that have none.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculative: SpeculativeParams = field(default_factory=SpeculativeParams)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    timeout_s: float | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty; give at least one token", param="prompt")
        if self.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be >= 1, not {self.max_tokens}", param="max_tokens")
        if any(not text for text in self.stop):
            raise InvalidRequestError("a stop string is empty; remove it", param="stop")
        if self.cache_salt == "":
            raise InvalidRequestError("cache_salt is empty; remove it, or give a secret text", param="cache_salt")
        if self.sampling.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.sampling.min_tokens}, more than max_tokens {self.max_tokens}", param="min_tokens"
            )


class TokenOrigin(enum.StrEnum):
    """Where an emitted token came from. Every one of them is the target's own choice."""

    ACCEPTED = "accepted"  # the draft had guessed it
    RECOVERED = "recovered"  # the target's token at the first wrong guess
    BONUS = "bonus"  # the target's token after a draft that was right to its end
    PLAIN = "plain"  # decoded without a draft


class FinishReason(enum.StrEnum):
    """Why a generation ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(slots=True)
class SpeculativeStats:
    """Counters of one generation.

    Attributes:
        num_steps: verify steps (target forwards) taken.
        num_draft_tokens: draft tokens the target checked.
        num_accepted_tokens: draft tokens that equalled the target's own.
    """

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verify step, before any cut at a stop; from 1 to k + 1 (0 before the first step)."""
        return 1.0 + self.num_accepted_tokens / self.num_steps if self.num_steps else 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the target held an emitted token and its alternatives.

    Natural logarithms of the probabilities of the model itself: softmax of its logits before bias, masks,
    penalties, temperature and everything after.

    Attributes:
        logprob: of the emitted token.
        top: (token id, logprob) of the most likely tokens, descending; of equals the lowest id first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """What one verify step added to a generation.

    Attributes:
        text: new text, always whole code points; joined over all chunks it is the whole text. It may
            lag behind the tokens while a code point or a possible stop string is incomplete.
        token_ids: the tokens this step emitted, the end token included, nothing after a stop.
        origins: one per token.
        finish_reason: set on the last chunk only.
        stop_reason: the stop string or stop token id that ended it; None for the model's own end token.
        stats: the generation's counters so far (a copy).
        num_cached_tokens: prompt tokens that were not computed, since the target worker had their KV from another
            request; said once, by the first chunk.
        logprobs: one per token where the request has ``logprobs``, else empty.
    """

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    stats: SpeculativeStats = field(default_factory=SpeculativeStats)
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


# --- the worker wire format -------------------------------------------------------------------------
#
# A worker holds KV for a prefix of each sequence it knows. Every item says how much of that prefix the
# caller counts on (`base_length`) and what follows it (`tokens`). A worker that holds more crops; one that
# holds less answers `need_from` and does nothing. So a call may be repeated, come late, or go elsewhere.


@dataclass(slots=True)
class VerifyItem:
    """Check a draft for one sequence on a target worker, in one forward.

    Attributes:
        base_length: committed tokens whose KV the caller counts on.
        tokens: the committed tokens from position ``base_length`` on; at least one.
        draft: guessed tokens after them; empty decodes one token plainly.
        sampling: needed on first contact (``base_length`` 0), and not looked at later.
        cache_salt: on first contact; see `GenerationRequest`.
        num_prompt_tokens: of the sequence's tokens the first ones, which were not generated; goes with ``sampling``.
    """

    sequence_id: str
    base_length: int
    tokens: list[int]
    draft: list[int]
    sampling: SamplingParams | None = None
    num_prompt_tokens: int = 0
    cache_salt: str | None = None


@dataclass(slots=True)
class VerifyResult:
    """The answer to one `VerifyItem`; exactly one of ``output``, ``need_from`` and ``error`` counts.

    Attributes:
        output: the accepted draft tokens, then the target's own next token.
        num_accepted: how many of ``output`` are draft tokens.
        need_from: the worker holds only this many tokens: send again from there.
        error: the worker refuses this item; repeating it cannot help.
        num_cached_tokens: of an item sent whole, the tokens whose KV was found in the worker's cache.
        logprobs: one per token of ``output`` where ``sampling`` asks for them, else empty.
    """

    sequence_id: str
    output: list[int] = field(default_factory=list)
    num_accepted: int = 0
    need_from: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class ProposeItem:
    """Guess the next tokens of one sequence on a draft worker.

    Attributes:
        base_length, tokens, sampling, cache_salt, num_prompt_tokens: as in `VerifyItem`.
        num_draft_tokens: how many tokens to guess; 0 only brings the worker's KV up to date.
    """

    sequence_id: str
    base_length: int
    tokens: list[int]
    num_draft_tokens: int
    sampling: SamplingParams | None = None
    num_prompt_tokens: int = 0
    cache_salt: str | None = None


@dataclass(slots=True)
class ProposeResult:
    """The answer to one `ProposeItem`; fields as in `VerifyResult`."""

    sequence_id: str
    draft: list[int] = field(default_factory=list)
    need_from: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says of itself when asked.

    Attributes:
        role: ``"target"`` or ``"draft"``.
        model_fingerprint: SHA-256 hex of what decides the logits (config, weights' identity, dtype, layout).
        max_model_len: tokens of context it can hold for one sequence.
        num_sequences: sequences it holds KV for.
        num_blocks: of its KV pool.
        num_free_blocks: those no sequence uses, cached or not.
        busy_share: share of the last seconds spent in forwards, 0 to 1.
        num_tokens_per_step: mean rows of its recent forwards.
        num_cached_blocks: free blocks whose KV can still be found by later sequences.
        num_prefix_hits, num_prefix_misses: tokens of all items sent whole so far, with KV in the cache and without.
    """

    role: str
    model_fingerprint: str
    max_model_len: int
    num_sequences: int
    num_blocks: int
    num_free_blocks: int
    busy_share: float
    num_tokens_per_step: float
    num_cached_blocks: int = 0
    num_prefix_hits: int = 0
    num_prefix_misses: int = 0
