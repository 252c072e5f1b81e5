"""What the HTTP API takes: OpenAI's request bodies, and this server's own fields beside them.

The models check types only, strictly (``true`` is no number, ``1.5`` no integer, ``NaN`` no float). Ranges and
whatever needs the model (its context, its vocabulary) are checked in `specdec.api.convert`. A field OpenAI knows
and this server does not is refused by name, unless its value asks for nothing (``n: 1``).
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from specdec.params import MAX_BIAS


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _one_prompt(value: object) -> object:
    """The prompt itself: OpenAI also allows a list of prompts, of which exactly one is served."""
    if isinstance(value, str) or _is_token_ids(value):
        return value
    if isinstance(value, list) and all(isinstance(prompt, str) or _is_token_ids(prompt) for prompt in value):
        if len(value) == 1:
            return value[0]
        raise PydanticCustomError("several_prompts", "Send one prompt per request; this one has several")
    raise PydanticCustomError("prompt_type", "Input should be a string or a list of token ids")


def _stop_strings(value: object) -> object:
    if isinstance(value, str):
        return [value]
    if value is None or (isinstance(value, list) and all(isinstance(text, str) for text in value)):
        return value
    raise PydanticCustomError("stop_type", "Input should be a string or a list of strings")


def _token_ids(value: object) -> object:
    if value is None or _is_token_ids(value):
        return value
    raise PydanticCustomError("token_ids_type", "Input should be a list of integers")


def _logit_bias(value: object) -> object:
    """Token ids are the keys of a JSON object, so they come as strings."""
    if value is None:
        return None
    if not isinstance(value, dict) or not all(type(bias) in (int, float) for bias in value.values()):
        raise PydanticCustomError("logit_bias_type", "Input should be an object of numbers by token id")
    if not all(-MAX_BIAS <= bias <= MAX_BIAS for bias in value.values()):
        raise PydanticCustomError("logit_bias_range", "Every bias should be in [-100, 100]")
    if not all(isinstance(key, str) and re.fullmatch("[0-9]{1,9}", key) for key in value):
        raise PydanticCustomError("logit_bias_key", "Every key should be a token id in decimal digits")
    biases = {int(key): float(bias) for key, bias in value.items()}
    if len(biases) < len(value):
        raise PydanticCustomError("logit_bias_twice", "A token id is there twice")
    return biases


def _strings(value: object) -> object:
    if value is None or (isinstance(value, list) and all(isinstance(text, str) for text in value)):
        return value
    raise PydanticCustomError("strings_type", "Input should be a list of strings")


def _part_text(part: object) -> str:
    text = part.get("text") if isinstance(part, dict) and part.keys() == {"type", "text"} else None
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(text, str):
        return text
    raise PydanticCustomError(
        "content_part", 'Every content part should be {"type": "text", "text": "..."}; this server takes text only'
    )


def _message_text(value: object) -> object:
    """Plain text of a message. Parts are joined by line breaks, as vLLM does for templates that take text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        return "\n".join(_part_text(part) for part in value)
    raise PydanticCustomError("content_type", "Input should be a string or a non-empty list of text parts")


def _only(neutral: int | bool) -> BeforeValidator:
    """Refuse every value of a field but the one that asks for nothing."""

    def check(value: object) -> object:
        if value is None or (value == neutral and isinstance(value, bool) == isinstance(neutral, bool)):
            return value
        shown = str(neutral).lower()
        raise PydanticCustomError("unsupported_value", "This server supports only {shown} here", {"shown": shown})

    return BeforeValidator(check)


class RequestModel(BaseModel):
    """Base of all request bodies: strict types, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class SpeculativeOptions(RequestModel):
    """How to speculate for this request. It changes the speed of the answer, never the answer."""

    enabled: bool = Field(True, description="False decodes with the target alone.")
    num_draft_tokens: int | None = Field(None, description="Draft tokens per step; default: the server's choice.")


class StreamOptions(RequestModel):
    """What a stream carries beside the text."""

    include_usage: bool | None = Field(None, description="Send a last chunk with the token counts.")


class GenerationFields(RequestModel):
    """What completions and chat completions have in common. ``null`` means the default everywhere."""

    model: str = Field(description="The served model's name; see /v1/models.")
    max_tokens: int | None = Field(None, description="Tokens to generate at most; >= 1.")
    temperature: float | None = Field(None, description=">= 0; 0 is greedy. Default 1.")
    top_p: float | None = Field(None, description="Mass of the most likely tokens to keep, in (0, 1]. Default 1.")
    top_k: int | None = Field(None, description="Number of most likely tokens to keep; 0 or -1 keeps all (default).")
    min_p: float | None = Field(
        None, description="Keep tokens at least this times as likely as the likeliest, in [0, 1]. Default 0: all."
    )
    presence_penalty: float | None = Field(
        None, description="Subtracted from the logits of tokens generated so far, in [-2, 2]. Default 0."
    )
    frequency_penalty: float | None = Field(
        None, description="Subtracted once for every time a token was generated, in [-2, 2]. Default 0."
    )
    repetition_penalty: float | None = Field(
        None, description="Makes tokens of prompt and answer less likely where > 1, more where < 1. Default 1."
    )
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_logit_bias)] = Field(
        None, description="Added to logits: an object of biases in [-100, 100] by token id, at most 300."
    )
    min_tokens: int | None = Field(None, description="No end token and no stop before this many. Default 0.")
    bad_words: Annotated[list[str] | None, BeforeValidator(_strings)] = Field(
        None, description="Words that are not to be generated, at most 300."
    )
    seed: int | None = Field(None, description="In [0, 2**63 - 1]. Default: a random one; the response names it.")
    stop: Annotated[list[str] | None, BeforeValidator(_stop_strings, json_schema_input_type=str | list[str] | None)] = (
        Field(None, description="Texts that end the generation; the text is cut before them.")
    )
    stop_token_ids: Annotated[list[int] | None, BeforeValidator(_token_ids)] = Field(
        None, description="Token ids that end the generation, beside the model's own."
    )
    ignore_eos: bool | None = Field(None, description="Go on past the model's end token (benchmarks).")
    speculative: SpeculativeOptions | None = None
    stream: bool | None = Field(None, description="Answer in server-sent events, one per verify step.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream: true.")
    return_token_ids: bool | None = Field(None, description="Send the generated token ids, as choices[].token_ids.")
    cache_salt: str | None = Field(
        None, description="Not empty. Share cached prompts only with requests of the same salt (a secret)."
    )
    n: Annotated[int | None, _only(1)] = Field(None, description="Only 1.")
    user: str | None = Field(None, description="Accepted, and not used.")

    @field_validator("stream_options")
    @classmethod
    def _options_need_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and info.data.get("stream") is not True:
            raise PydanticCustomError("stream_options", "Allowed only together with stream: true")
        return value

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends in a chunk with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage is True


class CompletionRequest(GenerationFields):
    """The body of ``POST /v1/completions``. ``max_tokens`` defaults to 16, or what is left of the context."""

    prompt: Annotated[
        str | list[int],
        BeforeValidator(_one_prompt, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
    ] = Field(description="A text or its token ids; a list of exactly one of these will do.")
    logprobs: int | None = Field(
        None, description="Tell the log-probability of every token and of this many alternatives, 0 to 20."
    )


class ChatMessage(RequestModel):
    """One turn of a conversation.

    The last five fields are those the OpenAI client adds, empty, when it sends an answer of the assistant back.
    """

    role: Literal["system", "user", "assistant"]
    content: Annotated[
        str, BeforeValidator(_message_text, json_schema_input_type=str | list[dict[Literal["type", "text"], str]])
    ] = Field(description='The text, or a list of {"type": "text", "text": ...} parts.')
    name: str | None = Field(None, description="Given to the chat template, which may use it.")
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None


class ChatCompletionRequest(GenerationFields):
    """The body of ``POST /v1/chat/completions``. ``max_tokens`` defaults to what is left of the context."""

    messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, description="OpenAI's newer name of max_tokens.")
    logprobs: bool | None = Field(None, description="Tell the log-probability of every token.")
    top_logprobs: int | None = Field(
        None, description="And of this many alternatives, 0 to 20. Only with logprobs: true."
    )
