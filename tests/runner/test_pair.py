from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.config import EngineConfig
from specdec.errors import ConfigError
from specdec.runner.pair import Finding, check_pair, require_sound_pair
from tests.models import make_tiny_llama, make_tiny_model

KV = {"kv_cache_bytes": 1 << 20}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("pair") / "target")


def config(source: Path, draft: dict[str, Any] | None, **changes: Any) -> EngineConfig:
    settings = {
        "target": {"source": str(source), "device": "cpu"},
        "draft": draft,
        "target_worker": KV,
        "draft_worker": KV,
        **changes,
    }
    return EngineConfig.model_validate(settings)


def findings(*args: Any, **changes: Any) -> list[tuple[str, bool]]:
    return [(finding.setting, finding.fatal) for finding in check_pair(config(*args, **changes))]


def test_a_sound_pair_has_no_findings(target: Path, tmp_path: Path) -> None:
    draft = make_tiny_llama(tmp_path, num_layers=1, vocab_size=320)  # padded otherwise: no matter
    for origin in ({"cut_layers": [0]}, {"source": str(draft)}, None):
        assert check_pair(config(target, origin)) == []
        require_sound_pair(config(target, origin))


def test_a_source_that_is_not_there(target: Path, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    (finding,) = check_pair(config(target, {"source": missing}))
    assert (finding.setting, finding.fatal) == ("draft.source", True)
    assert missing in finding.message
    assert "does not exist" in finding.message
    assert str(finding).startswith("draft.source: ")
    assert str(finding).count("draft.source") == 1
    assert ("target.source", True) in findings(Path(missing), {"source": str(target)})
    # Nothing can be cut from nothing, but one message about it is enough.
    assert findings(Path(missing), {"cut_layers": [0]}) == [("target.source", True)]


def test_an_unsupported_model(target: Path, tiny_model_path: Callable[[str], Path]) -> None:
    (finding,) = check_pair(config(tiny_model_path("stablelm"), None))
    assert (finding.setting, finding.fatal) == ("target.source", True)
    assert "attention interface" in finding.message


def test_a_device_that_is_not_there(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert findings(target, {"cut_layers": [0], "device": "cuda"}) == [("draft.device", True)]
    changed = {"target": {"source": str(target), "device": "cuda:3"}}
    assert findings(target, {"cut_layers": [0]}, **changed) == [("target.device", True)]


@pytest.mark.parametrize("layers", [[0, 2], [-1]])
def test_layers_that_are_not_in_the_target(target: Path, layers: list[int]) -> None:
    assert findings(target, {"cut_layers": layers}) == [("draft.cut_layers", True)]


def test_a_layer_named_twice(target: Path) -> None:
    assert findings(target, {"cut_layers": [1, 1]}) == [("draft.cut_layers", True)]


def test_a_draft_with_another_tokenizer(target: Path, tmp_path: Path) -> None:
    draft = make_tiny_llama(tmp_path, extra_tokens=["<|other|>"])
    (finding,) = check_pair(config(target, {"source": str(draft)}))
    assert (finding.setting, finding.fatal) == ("draft.source", True)
    assert "tokenizer (259 tokens) is not the target's (258 tokens)" in finding.message


def test_another_tokenizer_of_the_same_size(tmp_path: Path) -> None:
    first = make_tiny_llama(tmp_path / "a", extra_tokens=["<|one|>"])
    second = make_tiny_llama(tmp_path / "b", extra_tokens=["<|two|>"])
    assert findings(first, {"source": str(second)}) == [("draft.source", True)]


def test_another_architecture_with_the_same_tokenizer_is_no_fault(target: Path, tmp_path: Path) -> None:
    draft = make_tiny_model("gpt2", tmp_path / "gpt2")
    assert findings(target, {"source": str(draft)}) == []


def test_a_tokenizer_larger_than_the_embedding_is_worth_knowing(target: Path, tmp_path: Path) -> None:
    draft = make_tiny_llama(tmp_path, vocab_size=200)
    assert findings(target, {"source": str(draft)}) == [("draft.source", False)]
    require_sound_pair(config(target, {"source": str(draft)}))


def test_a_draft_with_a_shorter_context_is_worth_knowing(target: Path, tmp_path: Path) -> None:
    draft = make_tiny_llama(tmp_path, max_position_embeddings=256)
    assert findings(target, {"source": str(draft)}) == [("draft_worker.max_model_len", False)]
    worker = {"target_worker": {**KV, "max_model_len": 256}}
    assert findings(target, {"source": str(draft)}, **worker) == []


def test_a_context_longer_than_the_model_allows(target: Path) -> None:
    worker = {"target_worker": {**KV, "max_model_len": 513}}
    assert ("target_worker.max_model_len", True) in findings(target, None, **worker)
    worker = {"draft_worker": {**KV, "max_model_len": 513}}
    assert findings(target, {"cut_layers": [0]}, **worker) == [("draft_worker.max_model_len", True)]


def test_more_memory_than_the_machine_has(target: Path) -> None:
    worker = {"target_worker": {"kv_cache_bytes": 1 << 50}}
    assert findings(target, None, **worker) == [("target_worker.kv_cache_bytes", False)]


def test_all_fatal_faults_are_listed_at_once(target: Path) -> None:
    changes = {"target_worker": {**KV, "max_model_len": 1000}, "draft_worker": {**KV, "max_model_len": 600}}
    with pytest.raises(ConfigError) as raised:
        require_sound_pair(config(target, {"cut_layers": [9]}, **changes))
    lines = str(raised.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "target_worker.max_model_len",
        "draft.cut_layers",
        "draft_worker.max_model_len",
    ]


def test_a_finding_reads_as_setting_and_message() -> None:
    assert str(Finding("draft.source", "is wrong", fatal=True)) == "draft.source: is wrong"
