"""From what a person writes as a model's source to a folder of config, weights and tokenizer."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from specdec.errors import ConfigError
from specdec.runner.demo import DEMO_PREFIX, resolve_demo
from specdec.runner.gguf import CONVERSION_VERSION, convert_gguf, file_sha256
from specdec.runner.model_cache import build_once, cache_root

logger = logging.getLogger(__name__)

_GGUF_SUFFIX = ".gguf"
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
_PATH_STARTS = ("/", "./", "../", "~")

# Top-level files of these kinds only: other folders and formats repeat the same weights.
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_FILES_NOT = ["*/*", "consolidated*"]


def resolve_source(source: str, revision: str | None = None, *, setting: str = "target.source") -> Path:
    """A local folder with the model that ``source`` names, fetched or converted if need be.

    In this order, ``source`` is a demo model (``demo:...``), an existing folder, an existing ``.gguf`` file
    (converted once, into the model cache), or a Hub id (kept in the Hub's own cache).

    Args:
        source: as in `specdec.config.ModelSettings`.
        revision: branch, tag or commit of a Hub id.
        setting: what the error messages call ``source``.

    Raises:
        ConfigError: there is no such model, it is incomplete, or it cannot be fetched. Names the setting and the fix.
    """
    local = _resolve_local(source, setting)
    if local is None:
        return _download_from_hub(source, revision, setting)
    if revision is not None:
        raise ConfigError(
            f"{setting} {source!r} is not a Hub id, so it has no revision {revision!r}; remove the revision"
        )
    return local


def _resolve_local(source: str, setting: str) -> Path | None:
    """The folder of a source that is not on the Hub; None for a Hub id."""
    if source.startswith(DEMO_PREFIX):
        return resolve_demo(source.removeprefix(DEMO_PREFIX))
    path = Path(source).expanduser() if source.startswith("~") else Path(source)
    if path.is_dir():
        return _checked(path, f"{setting} {source!r}")
    if path.is_file() and path.suffix == _GGUF_SUFFIX:
        return _convert_once(path)
    if path.is_file():
        raise ConfigError(f"{setting} {source!r} is a file but not {_GGUF_SUFFIX}; give the model's folder")
    if source.startswith(_PATH_STARTS) or path.suffix == _GGUF_SUFFIX:
        raise ConfigError(f"{setting} {source!r} does not exist (looked in {path.absolute()}); correct the path")
    if _HUB_ID.fullmatch(source) is None:
        raise ConfigError(
            f"{setting} {source!r} is neither an existing folder or {_GGUF_SUFFIX} file, nor a Hub id "
            "('organization/model'); correct it"
        )
    return None


def _checked(folder: Path, what: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{what} has no config.json; give a folder with a Hugging Face model")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{what} has no *.safetensors; save its weights in that format")
    return folder


def _convert_once(file: Path) -> Path:
    """The converted form of a user's GGUF file, found again by content.

    Kept as fp32, unlike the demo: nobody knows beforehand that this model's weights fit fp16.
    """
    logger.info("reading %s to look it up in the model cache", file)
    entry = cache_root() / "gguf" / file_sha256(file)
    return build_once(entry, CONVERSION_VERSION, lambda folder: convert_gguf(file, folder, dtype="float32"))


def _download_from_hub(source: str, revision: str | None, setting: str) -> Path:
    # Imported here: local models need neither the network nor the time this takes.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    named = f"{setting} {source!r}"
    try:
        folder = snapshot_download(source, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_FILES_NOT)
    except GatedRepoError as error:
        raise ConfigError(f"{named} is gated on the Hub; accept its terms there and set HF_TOKEN") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"{named} is neither a local folder nor a model on the Hub; correct it, or set HF_TOKEN if it is private"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{named} has no revision {revision!r} on the Hub; correct the revision") from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{named} is no local folder, is not in the Hub's cache, and the Hub cannot be reached; "
            "check the network, or give a local folder"
        ) from error
    except OSError as error:  # HTTP faults and a full disk are OSErrors, too
        raise ConfigError(f"{named} cannot be fetched from the Hub: {error}; try again later") from error
    return _checked(Path(folder), named)
