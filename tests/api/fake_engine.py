"""A `GenerationEngine` that plays a script, and remembers what was asked of it and what became of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.orchestrator.base import Readiness
from specdec.runner.tokenizer import Tokenizer
from specdec.types import (
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    SpeculativeStats,
    TokenLogprobs,
    TokenOrigin,
)

MODEL_NAME = "org/tiny"
MAX_MODEL_LEN = 64
CHAT_TEMPLATE = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('a user speaks first') }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}>{{ m.content }}{% endfor %}<assistant>"
)


def make_tokenizer() -> Tokenizer:
    """One token per byte of UTF-8, and an end token: lengths are easy to tell."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")
    wrapped.chat_template = CHAT_TEMPLATE
    return Tokenizer(wrapped, eos_token_ids=frozenset({wrapped.eos_token_id}))


@dataclass(frozen=True, slots=True)
class Hold:
    """A step of a script that never comes."""


Step = GenerationChunk | Exception | Hold


def chunk(
    text: str,
    num_tokens: int,
    *,
    finish: FinishReason | None = None,
    stop_reason: str | int | None = None,
    stats: SpeculativeStats | None = None,
    num_cached_tokens: int = 0,
) -> GenerationChunk:
    return GenerationChunk(
        text=text,
        token_ids=tuple(range(num_tokens)),
        origins=(TokenOrigin.PLAIN,) * num_tokens,
        finish_reason=finish,
        stop_reason=stop_reason,
        stats=stats or SpeculativeStats(),
        num_cached_tokens=num_cached_tokens,
    )


def with_logprobs(plain: GenerationChunk) -> GenerationChunk:
    """Token t has log-probability -t/8, and the alternatives 65 and 66."""
    entries = (TokenLogprobs(-token / 8, ((65, -0.125), (66, float("-inf")))) for token in plain.token_ids)
    return replace(plain, logprobs=tuple(entries))


STATS = SpeculativeStats(num_steps=3, num_draft_tokens=8, num_accepted_tokens=4)
STORY_CACHED_TOKENS = 2
STORY: tuple[Step, ...] = (
    chunk("Héllo", 3, num_cached_tokens=STORY_CACHED_TOKENS),
    chunk("", 1),
    chunk(" wörld\n\u2028.", 2, finish=FinishReason.STOP, stats=STATS),
)
STORY_TEXT = "Héllo wörld\n\u2028."
STORY_TOKENS = 6


class FakeEngine:
    def __init__(self) -> None:
        self.model_name = MODEL_NAME
        self.tokenizer = make_tokenizer()
        self.max_model_len = MAX_MODEL_LEN
        self.max_num_draft_tokens = 8
        self.play(*STORY)

    def play(self, *script: Step) -> None:
        """Forget what happened; play ``script`` to every request from now on."""
        self.script = script
        self.requests: list[GenerationRequest] = []
        self.held = threading.Event()
        self.cleaned_up = threading.Event()
        self.state: Readiness | Exception = Readiness(target=True, draft=True)

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        self.requests.append(request)
        return self._play()

    async def _play(self) -> AsyncIterator[GenerationChunk]:
        first_task = asyncio.current_task()
        try:
            for step in self.script:
                assert asyncio.current_task() is first_task, "a generation must run in one task"
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, Hold):
                    self.held.set()
                    await asyncio.Event().wait()
                else:
                    yield step
        finally:
            for _ in range(50):  # freeing a sequence takes calls to workers: it must be let to finish
                await asyncio.sleep(0)
            self.cleaned_up.set()

    async def readiness(self) -> Readiness:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state
