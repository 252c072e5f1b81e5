from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from specdec.config import DEMO_TARGET
from specdec.errors import ConfigError
from specdec.runner import sources
from specdec.runner.sources import resolve_source
from tests.runner.tiny_gguf import write_tiny_gguf


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def raise_from_hub(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    def snapshot_download(*_args: object, **_kwargs: object) -> str:
        raise fault

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def hub_fault(kind: type[HfHubHTTPError]) -> HfHubHTTPError:
    return kind("refused", response=SimpleNamespace(headers={}, request=None, status_code=404))


def test_an_existing_folder_is_itself(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_source(str(model_folder)) == model_folder
    monkeypatch.setenv("HOME", str(model_folder.parent))
    assert resolve_source("~/model") == model_folder


def test_an_existing_relative_folder_wins_over_a_hub_id(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raise_from_hub(monkeypatch, AssertionError("the Hub was asked"))
    monkeypatch.chdir(model_folder.parent)
    assert resolve_source("model").resolve() == model_folder.resolve()


def test_the_demo_is_resolved_by_name(demo_model_path: Path) -> None:
    assert resolve_source(DEMO_TARGET) == demo_model_path


def test_an_unknown_demo_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=DEMO_TARGET):
        resolve_source("demo:gpt-9")


@pytest.mark.parametrize("lacking", ["config.json", "model.safetensors"])
def test_an_incomplete_folder_is_refused(model_folder: Path, lacking: str) -> None:
    (model_folder / lacking).unlink()
    with pytest.raises(ConfigError, match=rf"draft\.source '.*model' has no .*{Path(lacking).suffix}"):
        resolve_source(str(model_folder), setting="draft.source")


@pytest.mark.parametrize("source", ["/no/such/model", "./model", "../no-such-model", "~/no-such-model", "a/b.gguf"])
def test_a_path_that_does_not_exist_is_refused(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raise_from_hub(monkeypatch, AssertionError("the Hub was asked"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=rf"target\.source '{source}' does not exist.*correct the path"):
        resolve_source(source)


@pytest.mark.parametrize("source", ["", "a/b/c", "a b", "-model", "a/", "модель"])
def test_what_can_be_no_source_is_refused(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raise_from_hub(monkeypatch, AssertionError("the Hub was asked"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"target\.source '{source}'"):
        resolve_source(source)


def test_a_file_of_another_kind_is_refused(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a file but not \.gguf; give the model's folder"):
        resolve_source(str(model_folder / "model.safetensors"))


def test_a_revision_of_what_is_not_on_the_hub_is_refused(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="no revision 'v2'; remove the revision"):
        resolve_source(str(model_folder), "v2")


def test_a_gguf_file_is_converted_once_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    folder = resolve_source(str(write_tiny_gguf(tmp_path / "tiny.gguf")))
    assert (folder / "model.safetensors").is_file()

    (tmp_path / "tiny.gguf").rename(tmp_path / "renamed.gguf")
    monkeypatch.setattr(sources, "convert_gguf", None)  # a second conversion would fail
    assert resolve_source(str(tmp_path / "renamed.gguf")) == folder


def test_a_hub_model_is_fetched_without_other_formats(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, *, revision: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert (repo_id, revision) == ("organization/model-1.5", "main")
        offered = ["config.json", "model.safetensors", "tokenizer.json", "pytorch_model.bin", "onnx/config.json"]
        chosen = huggingface_hub.utils.filter_repo_objects(
            offered, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        assert list(chosen) == ["config.json", "model.safetensors", "tokenizer.json"]
        return str(model_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_source("organization/model-1.5", "main") == model_folder


def test_a_hub_that_cannot_be_reached_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"target\.source 'no-such/model'.*the Hub cannot be reached"):
        resolve_source("no-such/model")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (RepositoryNotFoundError, "is neither a local folder nor a model on the Hub"),
        (GatedRepoError, "is gated on the Hub.*HF_TOKEN"),
        (RevisionNotFoundError, "has no revision 'v2'"),
        (HfHubHTTPError, "cannot be fetched from the Hub: refused"),
    ],
)
def test_what_the_hub_refuses_is_explained(
    kind: type[HfHubHTTPError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_from_hub(monkeypatch, hub_fault(kind))
    with pytest.raises(ConfigError, match=f"target\\.source 'organization/model' {words}"):
        resolve_source("organization/model", "v2")
