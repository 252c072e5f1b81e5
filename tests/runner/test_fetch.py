from __future__ import annotations

import logging
from pathlib import Path

import pytest

from specdec.runner.fetch import main


def test_the_folder_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with caplog.at_level(logging.INFO):
        assert main([str(tmp_path)]) == 0
    assert f"is in {tmp_path}" in caplog.text


def test_a_wrong_source_is_told_and_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main([str(tmp_path / "absent")]) == 1
    assert "does not exist" in caplog.text
