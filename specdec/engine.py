"""The whole system in one process, without Ray: the same workers, the same loop.

from specdec import Engine

with Engine() as engine:
for chunk in engine.stream("The capital of France is", max_tokens=32, temperature=0.0):
...
"""

from __future__ import annotations

import asyncio
import queue
import secrets
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypedDict, Unpack

from specdec.config import EngineConfig
from specdec.errors import WorkerUnavailableError
from specdec.orchestrator.engine import SpeculationEngine
from specdec.orchestrator.local import LocalDraft, LocalTarget
from specdec.runner.load import load_tokenizer
from specdec.runner.pair import require_sound_pair
from specdec.types import (
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    SamplingParams,
    SpeculativeParams,
    SpeculativeStats,
    TokenLogprobs,
    TokenOrigin,
)
from specdec.worker.build import build_draft_worker, build_target_worker
from specdec.worker.worker import DraftWorker, TargetWorker


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation.

    Attributes:
        token_ids: the generated tokens, the end token included.
        origins: where each came from.
        seed: with the same parameters, it gives the same text again.
        num_cached_tokens: prompt tokens whose KV was in the target worker's cache.
        logprobs: one per token where they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    finish_reason: FinishReason
    stats: SpeculativeStats
    seed: int
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


class SamplingOptions(TypedDict, total=False):
    """Sampling parameters by their names in `SamplingParams`, which describes them."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    min_tokens: int
    logprobs: int | None


class Engine:
    """A target, a draft and the verification loop in this process.

    Methods block and may be called from any number of threads; concurrent generations share forwards.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        """Load the models; seconds for the demo pair, once it has been fetched.

        Args:
            config: default: the demo pair.

        Raises:
            ConfigError: a setting is wrong or a model cannot be served.
        """
        self.config = config or EngineConfig()
        require_sound_pair(self.config)
        self.tokenizer = load_tokenizer(self.config.target)
        self._workers: list[TargetWorker | DraftWorker] = []
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="specdec-loop", daemon=True)
        self._thread.start()
        try:
            self._engine = self._build()
        except BaseException:
            self._stop()
            raise

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Completion:
        """Generate and wait for the end; arguments as for `request`."""
        request = self.request(prompt, **options)
        chunks = list(self.stream_request(request))
        last = chunks[-1]
        if last.finish_reason is None:
            raise RuntimeError("the generation ended without a reason")
        return Completion(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            origins=tuple(origin for chunk in chunks for origin in chunk.origins),
            finish_reason=last.finish_reason,
            stats=last.stats,
            seed=request.sampling.seed,
            num_cached_tokens=sum(chunk.num_cached_tokens for chunk in chunks),
            logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        )

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[GenerationChunk]:
        """Generate and yield what every verify step adds; arguments as for `request`. Closing the iterator ends
        the generation.
        """
        return self.stream_request(self.request(prompt, **options))

    def request(
        self,
        prompt: str | Sequence[int],
        *,
        chat: bool = False,
        max_tokens: int = 128,
        seed: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        logit_bias: Mapping[int, float] | None = None,
        bad_words: Sequence[str] = (),
        num_draft_tokens: int | None = None,
        speculative: bool = True,
        cache_salt: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> GenerationRequest:
        """A request as this engine takes it.

        Args:
            prompt: text or token ids.
            chat: the text is a user's message; it is put into the model's chat template.
            max_tokens: tokens to generate at most.
            seed: default: a random one.
            cache_salt: share cached KV only with requests of the same salt.
            logit_bias: biases by token id.
            bad_words: texts that are not to be generated.
            sampling: see `SamplingParams`.

        Raises:
            InvalidRequestError: an argument is out of range.
        """
        if not isinstance(prompt, str):
            token_ids = list(prompt)
        elif chat:
            token_ids = self.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        else:
            token_ids = self.tokenizer.encode(prompt)
        return GenerationRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=tuple(token_ids),
            max_tokens=max_tokens,
            sampling=SamplingParams(
                seed=secrets.randbits(63) if seed is None else seed,
                logit_bias=tuple((logit_bias or {}).items()),
                bad_words=self.tokenizer.encode_bad_words(bad_words),
                **sampling,
            ),
            speculative=SpeculativeParams(speculative, num_draft_tokens),
            stop=tuple(stop),
            stop_token_ids=tuple(stop_token_ids),
            ignore_eos=ignore_eos,
            cache_salt=cache_salt,
        )

    def stream_request(self, request: GenerationRequest) -> Iterator[GenerationChunk]:
        """Generate for a request; see `stream`."""
        chunks: queue.SimpleQueue[GenerationChunk | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async for chunk in self._engine.generate(request):
                    chunks.put(chunk)
            finally:
                chunks.put(None)

        with self._lock:
            if self._closed:
                raise WorkerUnavailableError("the engine is closed")
            running = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (chunk := chunks.get()) is not None:
                yield chunk
            running.result()  # raises what the generation raised
        finally:
            running.cancel()

    def close(self) -> None:
        """End all generations with `WorkerUnavailableError` and stop the workers. Later generations fail likewise."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._end_generations(), self._loop).result()
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _build(self) -> SpeculationEngine:
        target = build_target_worker(self.config)
        self._workers.append(target)
        draft: DraftWorker | None = None
        if self.config.draft is not None and self.config.speculation.enabled:
            draft = build_draft_worker(self.config)
            self._workers.append(draft)
        return SpeculationEngine(
            self.config,
            self.tokenizer,
            LocalTarget(target),
            None if draft is None else LocalDraft(draft),
            max_model_len=target.info().max_model_len,
        )

    async def _end_generations(self) -> None:
        """End all generations, and wait until their readers have been told."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await self._engine.close()
        await asyncio.gather(*others, return_exceptions=True)

    def _stop(self) -> None:
        for worker in self._workers:
            worker.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
