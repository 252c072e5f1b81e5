from __future__ import annotations

from pathlib import Path

import pytest

from specdec.config import DEMO_TARGET
from specdec.runner.sources import resolve_source


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The real demo target, from the user's model cache; downloaded and converted where it is not there yet."""
    return resolve_source(DEMO_TARGET)
