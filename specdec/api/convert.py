"""From a request body to a `GenerationRequest`: defaults, ranges, and what depends on the model."""

from __future__ import annotations

import secrets

from specdec.api.errors import ApiError
from specdec.api.schema import ChatCompletionRequest, ChatMessage, CompletionRequest, GenerationFields
from specdec.config import ApiSettings
from specdec.errors import ContextLengthError, InvalidRequestError
from specdec.orchestrator.base import GenerationEngine
from specdec.params import MAX_LOGPROBS
from specdec.runner.tokenizer import Message
from specdec.types import GenerationRequest, SamplingParams, SpeculativeParams

DEFAULT_COMPLETION_TOKENS = 16

MAX_NUM_BIASES = 300
MAX_NUM_BAD_WORDS = 300

NUM_DRAWN_SEEDS = 1 << 53
"""A seed we draw stays below this, so that readers whose numbers are doubles (JavaScript, jq) can send it back."""


def completion_to_generation(
    body: CompletionRequest, engine: GenerationEngine, settings: ApiSettings, response_id: str
) -> GenerationRequest:
    """What ``POST /v1/completions`` asks of the engine.

    ``response_id`` is shown to the client; the id the engine gets starts with it and is unique even where a
    client uses one id twice.

    Raises:
        ApiError: another model is asked for (404).
        InvalidRequestError: a value is out of range, or the prompt is empty.
        ContextLengthError: prompt and ``max_tokens`` do not fit the context.
    """
    check_model_name(body.model, engine)
    sampling, speculative = _check_fields(body, engine, settings, body.logprobs)
    token_ids = _prompt_token_ids(body.prompt, engine)
    room = _room(len(token_ids), engine, body.max_tokens, "max_tokens", prompt_param="prompt")
    max_tokens = min(DEFAULT_COMPLETION_TOKENS, room) if body.max_tokens is None else body.max_tokens
    return _generation(body, response_id, token_ids, max_tokens, sampling, speculative)


def chat_to_generation(
    body: ChatCompletionRequest, engine: GenerationEngine, settings: ApiSettings, response_id: str
) -> GenerationRequest:
    """What ``POST /v1/chat/completions`` asks of the engine; as `completion_to_generation`."""
    check_model_name(body.model, engine)
    sampling, speculative = _check_fields(body, engine, settings, _chat_logprobs(body))
    asked, param = _asked_chat_tokens(body)
    token_ids = engine.tokenizer.encode_chat([_message(message) for message in body.messages])
    room = _room(len(token_ids), engine, asked, param, prompt_param="messages")
    return _generation(body, response_id, token_ids, room if asked is None else asked, sampling, speculative)


def check_model_name(name: str, engine: GenerationEngine) -> None:
    """Refuse every model but the served one.

    Raises:
        ApiError: 404, with the name that is served.
    """
    if name != engine.model_name:
        message = f"there is no model of that name here; this server has {engine.model_name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _check_fields(
    body: GenerationFields, engine: GenerationEngine, settings: ApiSettings, logprobs: int | None
) -> tuple[SamplingParams, SpeculativeParams]:
    if len(body.stop or ()) > settings.max_num_stop:
        raise InvalidRequestError(f"stop: at most {settings.max_num_stop} strings", param="stop")
    _check_vocabulary(body.stop_token_ids or [], engine, param="stop_token_ids")
    biases, bad_words = body.logit_bias or {}, body.bad_words or []
    _check_number("logit_bias", len(biases), MAX_NUM_BIASES)
    _check_vocabulary(list(biases), engine, param="logit_bias")
    _check_number("bad_words", len(bad_words), MAX_NUM_BAD_WORDS)
    sampling = SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=0 if body.top_k in (None, -1) else body.top_k,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=secrets.randbelow(NUM_DRAWN_SEEDS) if body.seed is None else body.seed,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=tuple(biases.items()),
        min_tokens=body.min_tokens or 0,
        bad_words=engine.tokenizer.encode_bad_words(bad_words),
        logprobs=logprobs,
    )
    return sampling, _speculative(body, engine)


def _check_number(param: str, number: int, limit: int) -> None:
    if number > limit:
        raise InvalidRequestError(f"{param}: at most {limit} entries, not {number}", param=param)


def _chat_logprobs(body: ChatCompletionRequest) -> int | None:
    """Alternatives to tell log-probabilities of; None for none at all."""
    if body.top_logprobs is None or (body.top_logprobs == 0 and not body.logprobs):
        return 0 if body.logprobs else None
    if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise InvalidRequestError(
            f"top_logprobs must be in [0, {MAX_LOGPROBS}], not {body.top_logprobs}", param="top_logprobs"
        )
    if not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return body.top_logprobs


def _speculative(body: GenerationFields, engine: GenerationEngine) -> SpeculativeParams:
    if body.speculative is None:
        return SpeculativeParams()
    num_draft_tokens = body.speculative.num_draft_tokens
    if num_draft_tokens is not None and num_draft_tokens > engine.max_num_draft_tokens:
        raise InvalidRequestError(
            f"num_draft_tokens must be <= {engine.max_num_draft_tokens} on this server, not {num_draft_tokens}",
            param="speculative.num_draft_tokens",
        )
    return SpeculativeParams(enabled=body.speculative.enabled, num_draft_tokens=num_draft_tokens)


def _check_vocabulary(token_ids: list[int], engine: GenerationEngine, *, param: str) -> None:
    vocab_size = engine.tokenizer.vocab_size
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(f"{param}: token id {token} is not in [0, {vocab_size})", param=param)


def _prompt_token_ids(prompt: str | list[int], engine: GenerationEngine) -> list[int]:
    if not prompt:  # a tokenizer may put a begin token there, and the model would answer to nothing
        raise InvalidRequestError("the prompt is empty; give at least one token", param="prompt")
    if isinstance(prompt, str):
        return engine.tokenizer.encode(prompt)
    _check_vocabulary(prompt, engine, param="prompt")
    return prompt


def _message(message: ChatMessage) -> Message:
    plain: Message = {"role": message.role, "content": message.content}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _asked_chat_tokens(body: ChatCompletionRequest) -> tuple[int | None, str]:
    """``max_tokens`` under the name the client gave it."""
    if body.max_completion_tokens is None:
        return body.max_tokens, "max_tokens"
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequestError("max_tokens and max_completion_tokens differ; give one", param="max_tokens")
    return body.max_completion_tokens, "max_completion_tokens"


def _room(num_prompt_tokens: int, engine: GenerationEngine, asked: int | None, param: str, *, prompt_param: str) -> int:
    """Tokens that may follow the prompt; at least one, and at least ``asked``."""
    if asked is not None and asked < 1:
        raise InvalidRequestError(f"{param} must be >= 1, not {asked}", param=param)
    limit = engine.max_model_len
    room = limit - num_prompt_tokens
    if room >= (asked or 1):
        return room
    wish = f"no {param} is given" if asked is None else f"{param} is {asked}"
    advice = "shorten the prompt" if room < 1 else f"ask for at most {room} tokens or shorten the prompt"
    raise ContextLengthError(
        f"the context is limited to {limit} tokens; the prompt has {num_prompt_tokens} and {wish}: {advice}",
        param=prompt_param if room < 1 else param,
    )


def _generation(
    body: GenerationFields,
    response_id: str,
    token_ids: list[int],
    max_tokens: int,
    sampling: SamplingParams,
    speculative: SpeculativeParams,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{response_id}-{secrets.token_hex(8)}",
        prompt_token_ids=tuple(token_ids),
        max_tokens=max_tokens,
        sampling=sampling,
        speculative=speculative,
        stop=tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos is True,
        cache_salt=body.cache_salt,
    )
