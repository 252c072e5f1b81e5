from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specdec.errors import ConfigError
from specdec.runner.model_cache import build_once, cache_root, is_complete


class Builder:
    """Writes two files, counts its calls, and can be made to fail between the two."""

    def __init__(self, fault: BaseException | None = None) -> None:
        self.num_calls = 0
        self.fault = fault

    def __call__(self, folder: Path) -> None:
        self.num_calls += 1
        (folder / "first").write_text("1")
        if self.fault is not None:
            raise self.fault
        (folder / "second").write_text("22")


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "model"


def visible(entry: Path) -> list[str]:
    """What lies beside the entry, the lock file aside."""
    return sorted(path.name for path in entry.parent.iterdir() if path.suffix != ".lock")


def test_builds_once_and_then_only_looks(entry: Path) -> None:
    builder = Builder()
    assert build_once(entry, 1, builder) == build_once(entry, 1, builder) == entry
    assert builder.num_calls == 1
    assert {"first", "second"} < {path.name for path in entry.iterdir()}
    assert visible(entry) == ["model"]


@pytest.mark.parametrize("fault", [RuntimeError("broken"), KeyboardInterrupt()])
def test_an_interrupted_build_leaves_nothing_and_can_be_repeated(entry: Path, fault: BaseException) -> None:
    with pytest.raises(type(fault)):
        build_once(entry, 1, Builder(fault))
    assert visible(entry) == []
    build_once(entry, 1, Builder())
    assert is_complete(entry, 1)


def test_the_leftovers_of_a_killed_process_are_removed(entry: Path) -> None:
    leftover = entry.parent / ".model-abcdef"
    leftover.mkdir(parents=True)
    (leftover / "first").write_text("1")
    build_once(entry, 1, Builder())
    assert visible(entry) == ["model"]


def test_a_folder_without_a_manifest_is_not_taken_for_whole(entry: Path) -> None:
    entry.mkdir(parents=True)
    (entry / "first").write_text("1")
    assert not is_complete(entry, 1)
    build_once(entry, 1, Builder())
    assert is_complete(entry, 1)


@pytest.mark.parametrize("damage", ["shortened", "removed", "manifest"])
def test_a_damaged_entry_is_built_anew(entry: Path, damage: str) -> None:
    build_once(entry, 1, Builder())
    if damage == "shortened":
        (entry / "second").write_text("2")
    elif damage == "removed":
        (entry / "second").unlink()
    else:
        (entry / "specdec_manifest.json").write_text('{"version": 1')
    assert not is_complete(entry, 1)
    build_once(entry, 1, Builder())
    assert is_complete(entry, 1)
    assert (entry / "second").read_text() == "22"


def test_another_version_is_built_anew(entry: Path) -> None:
    builder = Builder()
    build_once(entry, 1, builder)
    build_once(entry, 2, builder)
    assert builder.num_calls == 2
    assert is_complete(entry, 2)
    assert not is_complete(entry, 1)


def test_many_at_once_build_it_once_and_all_get_it(entry: Path) -> None:
    builder = Builder()
    at_once = threading.Barrier(4)

    def resolve() -> bool:
        at_once.wait()
        return is_complete(build_once(entry, 1, builder), 1)

    with ThreadPoolExecutor(4) as pool:
        assert all(future.result() for future in [pool.submit(resolve) for _ in range(4)])
    assert builder.num_calls == 1


def test_one_that_waits_for_a_builder_that_fails_builds_itself(entry: Path) -> None:
    building, fail = threading.Event(), threading.Event()

    def failing(_folder: Path) -> None:
        building.set()
        fail.wait()
        raise RuntimeError("broken")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(build_once, entry, 1, failing)
        building.wait()
        builder = Builder()
        second = pool.submit(build_once, entry, 1, builder)
        fail.set()
        with pytest.raises(RuntimeError, match="broken"):
            first.result()
        assert is_complete(second.result(), 1)
    assert builder.num_calls == 1


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.*SPECDEC_CACHE"):
        build_once(tmp_path / "file" / "model", 1, Builder())


def test_cache_root_by_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SPECDEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / ".cache" / "specdec"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the XDG specification
    assert cache_root() == tmp_path / ".cache" / "specdec"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "specdec"
    monkeypatch.setenv("SPECDEC_CACHE", "~/models")
    assert cache_root() == tmp_path / "models"
