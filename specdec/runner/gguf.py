"""GGUF files, turned into the folder of safetensors that everything else reads."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from specdec.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

CONVERSION_VERSION = 1
"""Goes up when the same file would convert to other bytes; cached conversions are then made anew."""

_MAGIC = b"GGUF"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert_gguf(file: Path, folder: Path, *, dtype: Literal["float16", "float32"]) -> None:
    """Write the model and tokenizer of a GGUF file to ``folder`` in Hugging Face's layout.

    Quantized weights are expanded to fp32 and stored as ``dtype``: fp32 keeps every bit, fp16 halves the size and
    rounds once (a later load as fp16 then changes nothing).

    Raises:
        ConfigError: the file is not GGUF, is damaged or lacks weights, transformers cannot read its architecture,
            or the ``gguf`` extra is not installed.
    """
    with file.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise ConfigError(f"{file} is not a GGUF file; give a .gguf file or a folder of safetensors")
    if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("accelerate") is None:
        raise ConfigError("reading GGUF files needs the 'gguf' extra: pip install 'specdec[gguf]'")
    # Imported here: a start that finds its model converted need not pay seconds for these.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logger.info("converting %s to safetensors (%s)", file.name, dtype)
    start_s = time.monotonic()
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
        )
        model, loading = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, LookupError, NotImplementedError, struct.error) as error:
        raise ConfigError(
            f"{file} cannot be read: {error}; it is damaged or its architecture is not supported: "
            "fetch it again, or use the model's safetensors"
        ) from error
    if loading["missing_keys"]:  # transformers fills these with random numbers and goes on
        raise ConfigError(f"{file} lacks weights: {', '.join(sorted(loading['missing_keys']))}; get a whole file")
    # save_pretrained refuses a model that is marked as quantized; its weights no longer are.
    vars(model).pop("hf_quantizer", None)
    vars(model.config).pop("quantization_config", None)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    logger.info("converted %s in %.0f s", file.name, time.monotonic() - start_s)
