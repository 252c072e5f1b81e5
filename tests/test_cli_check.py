"""What the command says of configs, wrong ones and sound ones."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

from specdec.cli import main
from tests.cli_config import KV, write_config
from tests.models import make_tiny_llama, make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def config_path(folder: Path, tmp_path: Path) -> Path:
    return write_config(tmp_path, folder)


@pytest.mark.parametrize("command", [["generate", "x"], ["check"]], ids=["generate", "check"])
@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"speculation": {"num_draft_token": 3}}, "speculation.num_draft_token"),
        ({"loop": {"max_num_sequences": 0}}, "loop.max_num_sequences"),
        ({"target": {"source": "./no/such/model"}, "draft": None}, "target.source"),
        ({"draft": {"source": "./no/such/draft"}}, "draft.source"),
        ({"draft": {"cut_layers": [7]}}, "draft.cut_layers"),
        ({"target_worker": KV | {"max_model_len": 100_000}}, "target_worker.max_model_len"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_config_fails_with_the_setting_named(
    folder: Path,
    tmp_path: Path,
    changes: dict[str, object],
    names: str,
    command: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_config(tmp_path, folder, **changes)
    assert main([*command, "--config", str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error:" in captured.err
    assert f"{names}: " in captured.err
    assert "ready" not in captured.err


@pytest.mark.parametrize("arguments", [[], ["bogus"], ["generate"], ["generate", "x", "--max-tokens", "many"]], ids=str)
def test_a_wrong_command_line_shows_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: specdec" in capsys.readouterr().err


def test_check_says_when_all_is_well(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", str(config_path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == "tiny: ready to serve\n"


def test_check_names_every_fault_of_the_pair(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_tiny_llama(tmp_path / "other", extra_tokens=["hello"])
    path = write_config(
        tmp_path,
        folder,
        draft={"source": str(other), "device": "cpu"},
        target_worker=KV | {"max_model_len": 100_000},
    )
    assert main(["check", "--config", str(path)]) == 1
    err = capsys.readouterr().err
    assert "error: draft.source" in err
    assert "tokenizer" in err
    assert "error: target_worker.max_model_len" in err


def test_a_warning_is_told_and_serves(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path, folder, draft_worker=KV | {"max_model_len": 64})
    assert main(["check", "--config", str(path)]) == 0
    err = capsys.readouterr().err
    assert "warning: draft_worker.max_model_len" in err
    assert "ready to serve" in err


def test_check_refuses_a_model_it_cannot_decode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_model("stablelm", tmp_path / "model")
    assert main(["check", "--config", str(write_config(tmp_path, folder, draft=None))]) == 1
    assert "error: target.source" in capsys.readouterr().err


def test_check_needs_no_weights_in_memory(
    config_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_args: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("specdec.runner.load.load_reference", refuse)
    monkeypatch.setattr("specdec.runner.load.load_model", refuse)
    assert main(["check", "--config", str(config_path)]) == 0


def test_the_command_is_the_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"specdec": "specdec.cli:main"}
    module, _, function = project["scripts"]["specdec"].partition(":")
    with pytest.raises(SystemExit) as caught:
        getattr(importlib.import_module(module), function)(["--help"])
    assert caught.value.code == 0
    assert {"generate", "check"} <= set(re.findall(r"\w+", capsys.readouterr().out))
