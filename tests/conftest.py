from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdec.config import DEMO_TARGET
from specdec.runner.sources import resolve_source
from tests.models import make_tiny_model

# As in the workers: many small products on several threads wait for each other, and longest on a busy machine.
torch.set_num_threads(1)

# Read by Ray when it is first imported. It listens on all interfaces: the token keeps others out.
os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"})


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The real demo target, from the user's model cache; downloaded and converted where it is not there yet."""
    return resolve_source(DEMO_TARGET)


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of `tests.models.TINY_CONFIGS`, by name; made once. Not to be changed."""
    root = tmp_path_factory.mktemp("tiny-models")

    def path(name: str) -> Path:
        return root / name if (root / name).exists() else make_tiny_model(name, root / name)

    return path
