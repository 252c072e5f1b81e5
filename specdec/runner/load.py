"""Loading a model so that it is exactly the one everything is compared with.

A model is rounded once, embedding and norms included, to the precision it is served in. `load_reference` gives that
rounded model as plain transformers code; `load_model` gives it our attention
function, for the runner.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from specdec.config import DType, ModelSettings, WorkerSettings
from specdec.errors import ConfigError, UnsupportedModelError
from specdec.runner.attention import ATTENTION_NAME
from specdec.runner.cut import cut_layers
from specdec.runner.sources import resolve_source
from specdec.runner.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_LAYER_TYPES = {"full_attention", "sliding_attention"}

# It turns every token of a forward by one of two tables, chosen by the longest sequence in it. (The "dynamic" type
# changes, too, but only beyond the positions the model was made for, where nothing is served.)
_VARYING_ROPE_TYPE = "longrope"

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for the runner.

    Attributes:
        model: in eval mode, on ``device``, with the paged attention function.
        dtype: its weights are rounded to.
        vocab_size: of the logits; ids from ``tokenizer_vocab_size`` on are padding and must never come out.
        max_model_len: positions the model was trained for.
        fingerprint: SHA-256 hex over what decides its logits.
    """

    model: PreTrainedModel
    dtype: DType
    device: torch.device
    vocab_size: int
    tokenizer_vocab_size: int
    max_model_len: int
    fingerprint: str


def resolve_device(device: str) -> torch.device:
    """The device of a setting; 'auto' is CUDA where there is one.

    Raises:
        ConfigError: CUDA asked for where there is none.
    """
    available = torch.cuda.is_available()
    if device == "auto":
        return torch.device("cuda" if available else "cpu")
    if device.startswith("cuda") and not available:
        raise ConfigError(f"device: {device} was asked for, but PyTorch sees no CUDA device; use device: cpu or auto")
    return torch.device(device)


def read_model_config(folder: Path) -> PreTrainedConfig:
    """A model's config, checked to be one this engine can decode.

    Raises:
        UnsupportedModelError: encoder-decoder, recurrent, or otherwise without a cache that can be cropped.
        ConfigError: unreadable.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read the model config in {folder}: {error}") from error
    kind = config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{kind} is an encoder-decoder model; only decoder-only models can be served")
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is None:
        raise UnsupportedModelError(f"{kind} is not a causal language model; only those can be served")
    other_layers = set(getattr(config, "layer_types", None) or []) - _LAYER_TYPES
    if getattr(model_class, "_is_stateful", False) or other_layers:
        raise UnsupportedModelError(
            f"{kind} keeps a state other than keys and values{f' ({other_layers})' if other_layers else ''}, which "
            "cannot be taken back when a draft is rejected; choose a model with full or sliding-window attention"
        )
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModelError(f"{kind} does not use transformers' attention interface, which the engine needs")
    if _VARYING_ROPE_TYPE in _rope_types(config):
        raise UnsupportedModelError(
            f"{kind} with {_VARYING_ROPE_TYPE} rotary embeddings turns all tokens of a batch by the length of the "
            "longest sequence in it, so that its output would depend on other requests; choose a model without them"
        )
    return config


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """The kinds of rotary embedding in a model; some have one per layer type."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    each = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(entry["rope_type"]) for entry in each if "rope_type" in entry}


def _check_layers(model: PreTrainedModel) -> None:
    """
    Raises:
        UnsupportedModelError: the model's attention looks ahead.
    """
    kind = model.config.model_type
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        raise UnsupportedModelError(f"{kind} has attention that looks ahead; only causal language models can be served")


def load_reference(
    folder: Path, dtype: DType, layers: list[int] | None = None, *, held_in: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The model rounded to ``dtype``, with transformers' own attention: the reference.

    Args:
        layers: keep only these layers (see `cut_layers`).
        held_in: dtype of the tensors and of the arithmetic.
    """
    config = read_model_config(folder)
    try:
        loaded: tuple[PreTrainedModel, dict[str, set[str]]] = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=held_in, output_loading_info=True
        )  # type: ignore[assignment]  # the pair is not in its signature
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"cannot load the model in {folder}: {error}") from error
    model, missing = loaded[0], sorted(loaded[1]["missing_keys"])
    if missing:
        # transformers would go on with random numbers in their place.
        raise ConfigError(f"the model in {folder} lacks weights: {', '.join(missing)}")
    if layers is not None:
        cut_layers(model, layers)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(tensor.to(TORCH_DTYPES[dtype]))
            tensor.requires_grad_(False)
    model.train(False)
    return model


def load_model(settings: ModelSettings, layers: list[int] | None = None) -> LoadedModel:
    """Load a model for the runner.

    Args:
        layers: keep only these layers (see `cut_layers`).

    Raises:
        ConfigError: the source or a setting is wrong, or the model is not supported.
    """
    started = time.monotonic()
    disable_progress_bar()  # our own log tells; a bar has no place in a server's
    device = resolve_device(settings.device)
    folder = resolve_source(settings.source, settings.revision)
    held_in = torch.float32 if device.type == "cpu" else TORCH_DTYPES[settings.dtype]
    model = load_reference(folder, settings.dtype, layers, held_in=held_in)
    _check_layers(model)
    tokenizer = load_hf_tokenizer(folder)
    model.to(device)  # type: ignore[arg-type]  # transformers' wrapper hides the method's signature
    model.set_attn_implementation(ATTENTION_NAME)
    config = model.config.get_text_config()
    loaded = LoadedModel(
        model=model,
        dtype=settings.dtype,
        device=device,
        vocab_size=config.vocab_size,
        tokenizer_vocab_size=min(len(tokenizer), config.vocab_size),
        max_model_len=_num_positions(config),
        fingerprint=_fingerprint(folder, settings.dtype, layers),
    )
    logger.info("loaded %s on %s in %.1f s", settings.source, device, time.monotonic() - started)
    return loaded


def max_model_len(settings: ModelSettings, worker: WorkerSettings) -> int:
    """The longest sequence a worker with these settings will hold, in tokens; reads the model's config only."""
    if worker.max_model_len is not None:
        return worker.max_model_len
    return _num_positions(read_model_config(resolve_source(settings.source, settings.revision)).get_text_config())


def _num_positions(config: PreTrainedConfig) -> int:
    return int(config.max_position_embeddings)


def load_hf_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The Hugging Face tokenizer in a model folder.

    Raises:
        ConfigError: there is none.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a tokenizer from {folder}: {error}") from error
    return tokenizer


def load_tokenizer(settings: ModelSettings) -> Tokenizer:
    """The tokenizer of a model source, with the model's end tokens."""
    folder = resolve_source(settings.source, settings.revision)
    hf_tokenizer = load_hf_tokenizer(folder)
    end_tokens = {hf_tokenizer.eos_token_id}
    if (folder / "generation_config.json").is_file():
        configured = GenerationConfig.from_pretrained(folder).eos_token_id
        end_tokens |= set(configured) if isinstance(configured, list) else {configured}
    return Tokenizer(hf_tokenizer, frozenset(token for token in end_tokens if token is not None))


def _fingerprint(folder: Path, dtype: DType, layers: list[int] | None) -> str:
    """SHA-256 over config, precision, layers, and the name and content hash of the weight files' headers and sizes.

    A safetensors header lists every tensor's name, shape and place; with the sizes, and samples all over the file, it
    tells models apart without reading gigabytes. It does not detect tampering.
    """
    digest = hashlib.sha256(json.dumps({"dtype": dtype, "layers": layers}, sort_keys=True).encode())
    digest.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for position in range(0, size, max(1 << 16, size // 256)):
                file.seek(position)
                digest.update(file.read(1 << 12))
    return digest.hexdigest()
