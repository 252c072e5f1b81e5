"""Settings, as pydantic models: unknown keys are refused, units are in the names.

`EngineConfig` describes one draft/target pair, how it is decoded and how it is served. It is the argument of
the Serve builder; the command line and `specdec.Engine` read the same file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from specdec.errors import ConfigError

DType = Literal["float16", "bfloat16", "float32"]


def _known_device(value: str) -> str:
    kind, _, index = value.partition(":")
    if value in ("auto", "cpu", "cuda") or (kind == "cuda" and index.isdigit()):
        return value
    raise ValueError(f"must be 'auto', 'cpu', 'cuda' or 'cuda:N', not {value!r}")


Device = Annotated[str, AfterValidator(_known_device)]

DEMO_TARGET = "demo:smollm2-135m-instruct"


class Settings(BaseModel):
    """Base of all settings: immutable, and a key that does not exist is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelSettings(Settings):
    """A model and the precision it is served in.

    Every weight, the embedding included, is rounded to ``dtype`` once at load, and that rounded model is the
    reference its output is compared with. On CPU, arithmetic is fp32 whatever ``dtype`` says.
    """

    source: str = Field(
        description="A Hub id, a folder of safetensors, a .gguf file, or 'demo:smollm2-135m-instruct'.",
        min_length=1,
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a Hub id.")
    dtype: DType = Field("float16", description="Precision every weight is rounded to at load.")
    device: Device = Field("auto", description="'auto', 'cpu', 'cuda' or 'cuda:N'.")


class DraftSettings(Settings):
    """Where the draft model comes from: a model of its own, or layers cut from the target."""

    source: str | None = Field(None, description="As target.source. Leave out to cut the draft from the target.")
    revision: str | None = Field(None, description="Branch, tag or commit of a Hub id.")
    cut_layers: list[int] | None = Field(
        None,
        description="Indices of the target's layers that make up the draft; it shares embedding and head.",
        min_length=1,
    )
    dtype: DType = Field("float16", description="Precision every weight is rounded to at load.")
    device: Device = Field("auto", description="'auto', 'cpu', 'cuda' or 'cuda:N'.")

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.source is None) == (self.cut_layers is None):
            raise ValueError("give exactly one of 'source' and 'cut_layers'")
        return self


class WorkerSettings(Settings):
    """Memory and batching of one model worker."""

    max_model_len: int | None = Field(
        None, ge=2, description="Longest sequence, in tokens; default: what the model was trained for."
    )
    kv_cache_bytes: int = Field(
        1 << 30, ge=1 << 16, description="Bytes of KV cache. One sequence of max_model_len must fit."
    )
    max_tokens_per_step: int | None = Field(
        None,
        ge=8,
        description="Tokens in one forward; a longer prompt takes several. Default: 512 on CPU, 2048 on CUDA.",
    )
    max_prefill_tokens_beside_decode: int | None = Field(
        None,
        ge=1,
        description="Prompt tokens in one forward while other sequences decode, so that these do not wait long. "
        "Default: 32 on CPU, 512 on CUDA.",
    )
    prefix_cache: bool = Field(
        True,
        description="Keep the KV of ended sequences while there is room, and share it with those that begin alike.",
    )
    idle_sequence_timeout_s: float = Field(
        120.0, gt=0, description="KV of a sequence nobody asked for in this time is freed."
    )


class SpeculationSettings(Settings):
    """How many tokens to draft."""

    enabled: bool = Field(True, description="False decodes with the target alone.")
    num_draft_tokens: int = Field(4, ge=0, description="Draft tokens per step where a request does not say.")
    max_num_draft_tokens: int = Field(16, ge=0, description="The most a request may ask for.")

    @model_validator(mode="after")
    def _default_within_limit(self) -> Self:
        if self.num_draft_tokens > self.max_num_draft_tokens:
            raise ValueError(
                f"num_draft_tokens is {self.num_draft_tokens}, above max_num_draft_tokens {self.max_num_draft_tokens}"
            )
        return self


class RetrySettings(Settings):
    """Exponential backoff with full jitter: the n-th wait is uniform in [0, min(max, initial * 2**n)] seconds."""

    initial_backoff_s: float = Field(0.05, gt=0)
    max_backoff_s: float = Field(2.0, gt=0)


class LoopSettings(Settings):
    """The verification loop: deadlines, retries, admission."""

    target_timeout_s: float = Field(60.0, gt=0, description="Deadline of one verify call; then it is retried.")
    draft_timeout_s: float = Field(2.0, gt=0, description="Deadline of one propose call; then the round is plain.")
    prefill_timeout_s: float = Field(300.0, gt=0, description="Deadline of one call that computes a whole prompt.")
    request_timeout_s: float = Field(600.0, gt=0, description="Deadline of a request where it does not say.")
    max_num_sequences: int = Field(64, ge=1, description="Requests decoded at once; further ones wait.")
    max_queued_requests: int = Field(256, ge=0, description="Requests that may wait; further ones get HTTP 429.")
    target_retry: RetrySettings = RetrySettings()
    draft_retry: RetrySettings = RetrySettings(initial_backoff_s=0.2, max_backoff_s=10.0)


class ApiSettings(Settings):
    """Limits of the HTTP API."""

    max_body_bytes: int = Field(1 << 20, ge=1024, description="Largest request body; beyond it HTTP 413.")
    max_num_stop: int = Field(16, ge=0, description="Stop strings in one request, at most.")


class EngineConfig(Settings):
    """One target, one draft, and how they decode together."""

    target: ModelSettings = ModelSettings(source=DEMO_TARGET)
    draft: DraftSettings | None = Field(
        DraftSettings(cut_layers=[0, 1, 11, 16]), description="null decodes with the target alone."
    )
    target_worker: WorkerSettings = WorkerSettings()
    draft_worker: WorkerSettings = WorkerSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    loop: LoopSettings = LoopSettings()
    api: ApiSettings = ApiSettings()
    model_name: str | None = Field(None, min_length=1, description="Name in the API; default: target.source.")

    @property
    def draft_model(self) -> ModelSettings | None:
        """Where the draft's weights are: its own source, or the target it is cut from; None without a draft."""
        if self.draft is None:
            return None
        return ModelSettings(
            source=self.draft.source or self.target.source,
            revision=self.draft.revision if self.draft.source else self.target.revision,
            dtype=self.draft.dtype,
            device=self.draft.device,
        )

    @property
    def served_model_name(self) -> str:
        """The model's name in the API."""
        return self.model_name or self.target.source.removeprefix("demo:")


def describe_validation_error(error: ValidationError) -> str:
    """One line per fault: the setting's path and what is wrong with it."""
    lines = []
    for fault in error.errors(include_url=False):
        path = ".".join(str(part) for part in fault["loc"]) or "(top level)"
        message = "unknown setting; check its spelling" if fault["type"] == "extra_forbidden" else fault["msg"]
        lines.append(f"{path}: {message}")
    return "\n".join(lines)


def load_engine_config(path: Path) -> EngineConfig:
    """Read an engine's settings from YAML: either the settings themselves, or a Serve config whose first
    application carries them as ``args``.

    Raises:
        ConfigError: the file is missing, is no YAML mapping, or has a wrong setting.
    """
    try:
        document: Any = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold a mapping of settings")
    if "applications" in document:
        try:
            document = document["applications"][0].get("args", {})
        except (LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: 'applications' must be a list of applications with 'args'") from error
    try:
        return EngineConfig.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{path} has wrong settings:\n{describe_validation_error(error)}") from error
