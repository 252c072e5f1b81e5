"""A model worker: a model, its KV, and a thread that steps.

Calls are queued; the thread takes what is queued when a step ends, forms one ragged batch, runs one forward, and
answers whatever that completed. So concurrent calls share forwards without waiting for each other.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from specdec.errors import WorkerUnavailableError
from specdec.runner.model import ModelRunner
from specdec.sampling.choose import choose_tokens
from specdec.sampling.logprobs import logprobs_of
from specdec.sampling.mask import MaskFactory
from specdec.types import ProposeItem, ProposeResult, SamplingParams, VerifyItem, VerifyResult, WorkerInfo
from specdec.worker.calls import Call, Result
from specdec.worker.scheduler import Scheduler
from specdec.worker.sequences import SequenceTable

logger = logging.getLogger(__name__)

_SWEEP_INTERVAL_S = 1.0
_POLL_S = 0.002
_WARM_UP_ID = "warm-up"


@dataclass(slots=True)
class _Load:
    """Smoothed figures of the step loop, over about the last ten seconds of its life."""

    busy_share: float = 0.0
    tokens_per_step: float = 0.0
    updated: float = field(default_factory=time.monotonic)

    def add(self, busy_s: float, num_tokens: int) -> None:
        """Count a step that ended now."""
        now = time.monotonic()
        weight = min(1.0, max(now - self.updated, 1e-6) / 10.0)
        share = min(1.0, busy_s / max(now - self.updated, 1e-6))
        self.busy_share += weight * (share - self.busy_share)
        self.tokens_per_step += 0.1 * (num_tokens - self.tokens_per_step)
        self.updated = now

    def current_busy_share(self) -> float:
        """The busy share, counting the time since the last step as idle."""
        idle_s = time.monotonic() - self.updated
        return self.busy_share * max(0.0, 1.0 - idle_s / 10.0)


class ModelWorker:
    """Common to target and draft workers; see `TargetWorker` and `DraftWorker`."""

    role = "model"

    def __init__(
        self,
        runner: ModelRunner,
        idle_sequence_timeout_s: float,
        make_mask: MaskFactory | None = None,
        *,
        prefix_cache: bool = True,
    ) -> None:
        """
        Args:
            idle_sequence_timeout_s, prefix_cache: see `specdec.config.WorkerSettings`.
            make_mask: for sequences with a grammar; None refuses them.
        """
        self._runner = runner
        table = SequenceTable(
            runner.num_blocks,
            idle_sequence_timeout_s,
            identity=runner.kv_identity if prefix_cache else None,
            copy_block=runner.copy_block,
        )
        self._scheduler = Scheduler(
            table,
            vocab_size=runner.vocab_size,
            max_model_len=runner.max_model_len,
            max_tokens=runner.max_tokens,
            max_prefill_beside_decode=runner.max_prefill_beside_decode,
            make_mask=make_mask,
        )
        self._inbox: queue.SimpleQueue[Call | list[str] | None] = queue.SimpleQueue()
        self._load = _Load()
        self._step_started: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{self.role}-steps", daemon=True)
        self._thread.start()

    async def release(self, sequence_ids: Iterable[str]) -> None:
        """Forget sequences and free their KV. Unknown ones are ignored."""
        self._inbox.put(list(sequence_ids))

    def info(self) -> WorkerInfo:
        """Figures for autoscaling, routing and people."""
        table = self._scheduler.table
        return WorkerInfo(
            role=self.role,
            model_fingerprint=self._runner.fingerprint,
            max_model_len=self._runner.max_model_len,
            num_sequences=len(table),
            num_blocks=table.pool.num_blocks,
            num_free_blocks=table.pool.num_free,
            busy_share=self._load.current_busy_share(),
            num_tokens_per_step=self._load.tokens_per_step,
            num_cached_blocks=table.pool.num_cached,
            num_prefix_hits=table.num_prefix_hits,
            num_prefix_misses=table.num_prefix_misses,
        )

    def check_health(self, max_step_s: float) -> None:
        """
        Raises:
            WorkerUnavailableError: the step thread is dead, or one step has taken more than ``max_step_s`` seconds.
        """
        if not self._thread.is_alive():
            raise WorkerUnavailableError(f"the {self.role} worker's step thread has ended")
        started = self._step_started
        if started is not None and time.monotonic() - started > max_step_s:
            raise WorkerUnavailableError(f"a step of the {self.role} worker has not ended in {max_step_s} s")

    def close(self) -> None:
        """Stop the thread; calls in flight fail with `WorkerUnavailableError`."""
        self._closed.set()
        self._inbox.put(None)
        self._thread.join()

    def _submit(self, items: Sequence[VerifyItem] | Sequence[ProposeItem]) -> Future[list[Result]]:
        """Queue a call; cancelling the future cancels it."""
        if self._closed.is_set():
            raise WorkerUnavailableError(f"the {self.role} worker is closed")
        call = Call(items)
        if items:
            self._inbox.put(call)
        else:
            call.future.set_result([])
        if self._closed.is_set():
            # It may have been closed in between, and the thread have taken its last look at the inbox.
            call.fail(WorkerUnavailableError(f"the {self.role} worker is closed"))
        return call.future

    def _run(self) -> None:
        """The step thread."""
        torch.set_num_threads(1)
        stepped = True
        while not self._closed.is_set():
            try:
                # Work that cannot be stepped now waits for time or a message: for blocks that others hold, or a round.
                self._drain(0.0 if stepped else _POLL_S if self._scheduler.has_work else _SWEEP_INTERVAL_S)
                self._scheduler.table.sweep()
                stepped = self._step()
            except Exception as error:
                # Whatever a forward dies of, the calls in it must hear of it, and the worker must go on or be
                # found dead by its health check; nobody may be left waiting.
                logger.exception("a step of the %s worker failed", self.role)
                self._scheduler.fail_all(WorkerUnavailableError(f"a step of the {self.role} worker failed: {error}"))
            self._step_started = None
        self._drain(0.0)
        self._scheduler.fail_all(WorkerUnavailableError(f"the {self.role} worker was closed"))

    def _drain(self, wait_s: float) -> None:
        """Take in all that is queued, after waiting up to ``wait_s`` seconds for something."""
        while True:
            try:
                message = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, Call):
                self._scheduler.add(message)
            elif message is not None:
                self._scheduler.release(message)
            wait_s = 0.0

    def _step(self) -> bool:
        """One forward; False if there is nothing to compute now."""
        batch = self._scheduler.next_batch()
        if not batch:
            return False
        started = self._step_started = time.monotonic()
        logits = self._runner.forward([rows.rows for _, rows in batch])
        choices = [choice for _, rows in batch for choice in rows.choices]
        tokens = choose_tokens(logits, choices)
        logprobs = logprobs_of(logits, choices, tokens)
        first = 0
        for pending, rows in batch:
            last = first + len(rows.choices)
            self._scheduler.advance(pending, rows, tokens[first:last], logprobs[first:last])
            first = last
        num_tokens = sum(len(rows.rows.token_ids) for _, rows in batch)
        self._scheduler.end_batch()
        self._load.add(time.monotonic() - started, num_tokens)
        return True


class TargetWorker(ModelWorker):
    """Verifies drafts with the target model."""

    role = "target"

    async def verify(self, items: list[VerifyItem]) -> list[VerifyResult]:
        """Verify some sequences' drafts, each in one forward, shared with whatever else is being computed.

        Raises:
            WorkerUnavailableError: the forward failed or the worker is closed.
        """
        results = await asyncio.wrap_future(self._submit(items))
        return [result for result in results if isinstance(result, VerifyResult)]

    def warm_up(self) -> None:
        """Answer one call, so that the first real one finds everything loaded. Blocks."""
        self._submit([VerifyItem(_WARM_UP_ID, 0, [0], [0], SamplingParams(temperature=0.0))]).result()
        self._inbox.put([_WARM_UP_ID])


class DraftWorker(ModelWorker):
    """Drafts with the draft model."""

    role = "draft"

    async def propose(self, items: list[ProposeItem]) -> list[ProposeResult]:
        """Draft for some sequences, one forward per token for all of them together.

        Raises:
            WorkerUnavailableError: as for `TargetWorker.verify`.
        """
        results = await asyncio.wrap_future(self._submit(items))
        return [result for result in results if isinstance(result, ProposeResult)]

    def warm_up(self) -> None:
        """As `TargetWorker.warm_up`."""
        self._submit([ProposeItem(_WARM_UP_ID, 0, [0], 2, SamplingParams(temperature=0.0))]).result()
        self._inbox.put([_WARM_UP_ID])
