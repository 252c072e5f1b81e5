"""The folder on disk that keeps converted models from one start to the next.

An entry is a model folder. It is built in a hidden sibling, a manifest of its files is written last, and it is
renamed into place while a lock is held. So an entry that agrees with its manifest is whole, however many
processes started at once and whatever was interrupted.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import ValidationError

from specdec.config import Settings
from specdec.errors import ConfigError

logger = logging.getLogger(__name__)

MANIFEST_NAME = "specdec_manifest.json"


class Manifest(Settings):
    """What a whole entry holds.

    Attributes:
        version: of the code that built it; another version is built anew.
        files: size in bytes by file name.
    """

    version: int
    files: dict[str, int]


def cache_root() -> Path:
    """Where converted models are kept: ``$SPECDEC_CACHE``, else ``specdec`` in the user's cache folder.

    Raises:
        ConfigError: neither is set, and the user has no home folder.
    """
    if chosen := os.environ.get("SPECDEC_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():
        return base / "specdec"
    try:
        return Path.home() / ".cache" / "specdec"
    except RuntimeError as error:
        raise ConfigError("no home folder to keep models in; set SPECDEC_CACHE to a folder") from error


def is_complete(entry: Path, version: int) -> bool:
    """Whether ``entry`` was built to its end by this ``version``, and has lost nothing since."""
    try:
        manifest = Manifest.model_validate_json((entry / MANIFEST_NAME).read_bytes())
        sizes_match = all((entry / name).stat().st_size == size for name, size in manifest.files.items())
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return False
    return manifest.version == version and sizes_match


def build_once(entry: Path, version: int, build: Callable[[Path], None]) -> Path:
    """Return ``entry``, built by ``build`` if it is not whole yet.

    Processes that ask for the same entry at once wait for the first; it is built once.

    Args:
        entry: its folder, made with its parents.
        version: of the conversion; see `Manifest`.
        build: fills the empty folder it is given. What it raises passes through, and nothing is kept.

    Raises:
        ConfigError: the cache folder cannot be written.
    """
    if is_complete(entry, version):
        return entry
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(entry):
            if not is_complete(entry, version):
                _build(entry, version, build)
    except OSError as error:
        raise ConfigError(
            f"cannot keep a model in {entry.parent}: {error}; set SPECDEC_CACHE to a writable folder with room"
        ) from error
    return entry


@contextmanager
def _exclusive(entry: Path) -> Iterator[None]:
    """Hold the lock on ``entry``. The system drops it when its process dies, so it never goes stale."""
    lock = FileLock(entry.with_name(f"{entry.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("another process is preparing %s; waiting for it", entry.name)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(entry: Path, version: int, build: Callable[[Path], None]) -> None:
    prefix = f".{entry.name}-"
    for leftover in entry.parent.glob(f"{prefix}*"):  # of a process that was killed; we hold its lock
        shutil.rmtree(leftover)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=entry.parent))
    try:
        build(folder)
        files = {path.name: path.stat().st_size for path in folder.iterdir()}
        for name in files:
            (folder / name).chmod(0o644)  # safetensors and mkdtemp make theirs private; the cache may be shared
        (folder / MANIFEST_NAME).write_text(Manifest(version=version, files=files).model_dump_json(indent=2))
        folder.chmod(0o755)
        if entry.exists():
            shutil.rmtree(entry)
        folder.rename(entry)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
