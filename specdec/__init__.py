"""Exact speculative decoding: the target's own output, faster."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.config import EngineConfig
    from specdec.engine import Completion, Engine
    from specdec.errors import SpecdecError
    from specdec.types import GenerationChunk, SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "GenerationChunk", "SamplingParams", "SpecdecError"]

_HOMES = {
    "Completion": "specdec.engine",
    "Engine": "specdec.engine",
    "EngineConfig": "specdec.config",
    "GenerationChunk": "specdec.types",
    "SamplingParams": "specdec.types",
    "SpecdecError": "specdec.errors",
}


def __getattr__(name: str) -> object:
    """Import what is asked for. The engine brings torch and transformers, seconds that a config check need not wait."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
