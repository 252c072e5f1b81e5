"""The engine: admission, lanes, and the stream of one request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from specdec.config import EngineConfig
from specdec.drafting.length import FixedDraftLength
from specdec.errors import (
    ContextLengthError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    WorkerError,
    WorkerUnavailableError,
)
from specdec.orchestrator.base import DraftClient, Readiness, TargetClient, WorkerClient
from specdec.orchestrator.lane import Lane
from specdec.orchestrator.retry import answer_within
from specdec.orchestrator.sequence import Sequence
from specdec.runner.tokenizer import Tokenizer
from specdec.types import GenerationChunk, GenerationRequest

logger = logging.getLogger(__name__)

_READINESS_TIMEOUT_S = 5.0


class SpeculationEngine:
    """Decodes requests on pools of target and draft workers; a `GenerationEngine`.

    All its coroutines run on one event loop.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        target: TargetClient,
        draft: DraftClient | None,
        *,
        max_model_len: int,
    ) -> None:
        """
        Args:
            draft: None decodes with the target alone.
            max_model_len: of the target workers.
        """
        self.model_name = config.served_model_name
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.max_num_draft_tokens = config.speculation.max_num_draft_tokens
        self._settings = config.loop
        self._target = target
        self._draft = draft if config.speculation.enabled else None
        self._draft_length = FixedDraftLength(
            config.speculation.num_draft_tokens, config.speculation.max_num_draft_tokens
        )
        self._lanes: dict[str, Lane] = {}
        self._places = asyncio.Semaphore(config.loop.max_num_sequences)
        self._num_waiting = 0
        self._closed = False
        self._draft_was_ready = False

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        """See `GenerationEngine.generate`."""
        self._check(request)
        loop = asyncio.get_running_loop()
        timeout_s = request.timeout_s or self._settings.request_timeout_s
        deadline = loop.time() + timeout_s
        late = DeadlineExceededError(f"the request did not finish within {timeout_s:g} s")
        sequence = Sequence(request, self.tokenizer, deadline)
        await self._take_place(deadline, late)
        lane: Lane | None = None
        try:
            lane = self._choose_lane()
            lane.add(sequence)
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        event = await sequence.events.get()
                except TimeoutError as error:
                    raise late from error
                if isinstance(event, Exception):
                    raise event
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            if lane is not None:
                lane.discard(sequence)
            self._places.release()

    async def readiness(self) -> Readiness:
        """See `GenerationEngine.readiness`."""
        target, draft = await asyncio.gather(
            _answers(self._target), _answers(self._draft) if self._draft is not None else _no_fault()
        )
        faults = {"target": target, "draft": draft}
        # Once warm, a draft may come and go: requests are answered all the while, and a probe that took this server out
        # of service for it would make things worse.
        self._draft_was_ready = self._draft_was_ready or draft is None
        return Readiness(
            target=target is None,
            draft=None if self._draft is None else self._draft_was_ready,
            detail="; ".join(f"{name}: {fault}" for name, fault in faults.items() if fault is not None),
        )

    async def close(self) -> None:
        """End all requests, those that wait too, and stop all lanes. Later requests fail."""
        self._closed = True
        await asyncio.gather(*(lane.close() for lane in self._lanes.values()))
        self._lanes.clear()

    def _check(self, request: GenerationRequest) -> None:
        wrong = [token for token in request.prompt_token_ids if not 0 <= token < self.tokenizer.vocab_size]
        if wrong:
            raise InvalidRequestError(
                f"token id {wrong[0]} is not in [0, {self.tokenizer.vocab_size}), the model's vocabulary",
                param="prompt",
            )
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens + request.max_tokens > self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {request.max_tokens}, together more than "
                f"the context of {self.max_model_len} tokens; shorten the prompt or lower max_tokens",
                param="max_tokens" if num_prompt_tokens < self.max_model_len else "prompt",
            )

    async def _take_place(self, deadline: float, late: DeadlineExceededError) -> None:
        """Wait for one of the places; refuse at once when too many wait already."""
        if self._places.locked() and self._num_waiting >= self._settings.max_queued_requests:
            raise OverloadedError(
                f"{self._settings.max_num_sequences} requests are running and {self._num_waiting} waiting; try later"
            )
        self._num_waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self._places.acquire()
        except TimeoutError as error:
            raise late from error
        finally:
            self._num_waiting -= 1

    def _choose_lane(self) -> Lane:
        """The emptiest of the lanes the target pool offers now. Lanes it no longer offers are closed once empty."""
        if self._closed:
            raise WorkerUnavailableError("the server is shutting down")
        offered = self._target.lanes()
        for name in [name for name, lane in self._lanes.items() if name not in offered and not len(lane)]:
            logger.info("lane %s is gone", name)
            self._lanes.pop(name).stop()
        for name in offered:
            if name not in self._lanes:
                self._lanes[name] = Lane(name, self._target, self._draft, self._draft_length, self._settings)
        return min((self._lanes[name] for name in offered), key=len)


async def _answers(client: WorkerClient) -> str | None:
    """None if a worker of the pool answers, else why not."""
    try:
        await answer_within(client.info(), _READINESS_TIMEOUT_S)
    except TimeoutError:
        return f"no answer within {_READINESS_TIMEOUT_S:g} s"
    except WorkerError as error:
        return str(error)
    return None


async def _no_fault() -> None:
    return None
