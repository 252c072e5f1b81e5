"""An engine over fake pools, a byte tokenizer, and what a generation ought to be."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from specdec.config import EngineConfig, LoopSettings, ModelSettings, RetrySettings, SpeculationSettings
from specdec.orchestrator.engine import SpeculationEngine
from specdec.runner.tokenizer import Tokenizer
from specdec.types import (
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    SamplingParams,
    SpeculativeParams,
    SpeculativeStats,
    TokenOrigin,
)
from tests.orchestrator.fakes import FakeDraft, FakeTarget, NextToken

EOS = 256
PROMPT = b"Once upon"
PATIENCE_S = 20.0
QUICK_RETRY = RetrySettings(initial_backoff_s=0.001, max_backoff_s=0.002)


def byte_tokenizer() -> Tokenizer:
    """Token ids 0 to 255 are bytes, 256 is the end token."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable}
    vocabulary |= {chr(256 + index): byte for index, byte in enumerate(others)}
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")
    assert wrapped.eos_token_id == EOS
    return Tokenizer(wrapped, frozenset({EOS}))


TOKENIZER = byte_tokenizer()
_names = (f"r{number}" for number in itertools.count())


def request(
    request_id: str | None = None,
    *,
    prompt: Iterable[int] = PROMPT,
    max_tokens: int = 12,
    seed: int = 1,
    k: int | None = None,
    enabled: bool = True,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    timeout_s: float | None = None,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id or next(_names),
        prompt_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        sampling=SamplingParams(seed=seed),
        speculative=SpeculativeParams(enabled, k),
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        timeout_s=timeout_s,
    )


def loop_settings(**changes: float) -> LoopSettings:
    """Timeouts that only a test about them can reach; retries without delay."""
    return LoopSettings.model_validate(
        {"draft_timeout_s": 60.0, "target_retry": QUICK_RETRY, "draft_retry": QUICK_RETRY} | changes
    )


@asynccontextmanager
async def running(
    target: FakeTarget,
    draft: FakeDraft | None,
    *,
    k: int = 4,
    speculation: bool = True,
    settings: LoopSettings | None = None,
    max_model_len: int = 1000,
) -> AsyncIterator[SpeculationEngine]:
    config = EngineConfig(
        target=ModelSettings(source="org/tiny"),
        speculation=SpeculationSettings(enabled=speculation, num_draft_tokens=k),
        loop=settings or loop_settings(),
    )
    engine = SpeculationEngine(config, TOKENIZER, target, draft, max_model_len=max_model_len)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield engine
    finally:
        await engine.close()


@dataclass(slots=True)
class Outcome:
    """A generation as its reader saw it."""

    chunks: list[GenerationChunk] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def origins(self) -> list[TokenOrigin]:
        return [origin for chunk in self.chunks for origin in chunk.origins]

    @property
    def end(self) -> tuple[FinishReason | None, str | int | None]:
        return self.chunks[-1].finish_reason, self.chunks[-1].stop_reason

    @property
    def stats(self) -> SpeculativeStats:
        return self.chunks[-1].stats

    @property
    def said(self) -> tuple[str, list[int], tuple[FinishReason | None, str | int | None]]:
        """What the output contract covers."""
        return self.text, self.token_ids, self.end


async def collect(engine: SpeculationEngine, generation: GenerationRequest) -> Outcome:
    """Read a generation to its end."""
    outcome = Outcome()
    async with aclosing(engine.generate(generation)) as chunks:
        async for chunk in chunks:
            assert not outcome.chunks or outcome.chunks[-1].finish_reason is None, "a chunk after the last"
            assert len(chunk.token_ids) == len(chunk.origins) > 0
            outcome.chunks.append(chunk)
    assert outcome.end[0] is not None
    return outcome


def expected(
    generation: GenerationRequest, next_token: NextToken
) -> tuple[str, list[int], tuple[FinishReason, str | int | None]]:
    """The output contract, token by token with the target alone. Takes ASCII tokens and the end token only."""
    ids: list[int] = []
    text = ""
    while True:
        token = next_token([*generation.prompt_token_ids, *ids], generation.sampling.seed)
        ids.append(token)
        if token == EOS and not generation.ignore_eos:
            return text, ids, (FinishReason.STOP, None)
        if token in generation.stop_token_ids:
            return text, ids, (FinishReason.STOP, token)
        text += chr(token) if token != EOS else ""
        ended = [stop for stop in generation.stop if text.endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: -len(longest)], ids, (FinishReason.STOP, longest)
        if len(ids) == generation.max_tokens:
            return text, ids, (FinishReason.LENGTH, None)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until ``condition`` holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def settle() -> None:
    """Let everything run that can run without time passing."""
    for _ in range(50):
        await asyncio.sleep(0)
