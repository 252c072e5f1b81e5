"""Exact speculative decoding: the target's own output, faster."""

from specdec.config import EngineConfig
from specdec.engine import Completion, Engine
from specdec.errors import SpecdecError
from specdec.types import GenerationChunk, SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "GenerationChunk", "SamplingParams", "SpecdecError"]
