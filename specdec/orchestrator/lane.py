"""A lane: the sequences that advance together against one target worker and one draft worker.

Every round is one `propose` and one `verify` for all of them. A sequence that cannot take part (its prompt is being
computed, its worker died) is brought up beside the rounds by calls of its own, and joins the next round once it is up.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Coroutine

from specdec.config import LoopSettings
from specdec.drafting.length import FixedDraftLength
from specdec.errors import DeadlineExceededError, WorkerError, WorkerRequestError, WorkerUnavailableError
from specdec.orchestrator.base import DraftClient, TargetClient
from specdec.orchestrator.retry import Availability, Backoff, answer_within
from specdec.orchestrator.sequence import Sequence
from specdec.types import ProposeItem, ProposeResult, VerifyResult

logger = logging.getLogger(__name__)


class Lane:
    """Runs rounds while it has sequences.

    Attributes:
        name: passed with every call, for sticky routing.
    """

    def __init__(
        self,
        name: str,
        target: TargetClient,
        draft: DraftClient | None,
        draft_length: FixedDraftLength,
        settings: LoopSettings,
    ) -> None:
        self.name = name
        self._target = target
        self._draft = draft
        self._draft_length = draft_length
        self._settings = settings
        self._draft_availability = Availability(settings.draft_retry)
        self._sequences: dict[str, Sequence] = {}
        self._ready: dict[str, Sequence] = {}
        self._in_round: set[str] = set()
        self._wake = asyncio.Event()
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._rounds = self._spawn("rounds", name, self._run())

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Take a sequence in."""
        self._sequences[sequence.sequence_id] = sequence
        self._bring_up(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Let go of a sequence, finished or not, and free it on both workers."""
        if self._sequences.pop(sequence.sequence_id, None) is None:
            return
        self._ready.pop(sequence.sequence_id, None)
        sequence.finished = True
        # A worker must not hear of the sequence again after it has freed it: while the sequence is in the round,
        # the round's end frees it.
        if sequence.sequence_id not in self._in_round:
            self._free([sequence.sequence_id])

    def stop(self) -> None:
        """Stop the rounds of a lane that has no sequences; what the round under way has let go of is freed."""
        self._rounds.cancel()

    async def close(self) -> None:
        """End every sequence with an error, free them, and stop the rounds."""
        for sequence in list(self._sequences.values()):
            sequence.fail(WorkerUnavailableError("the server is shutting down"))
            self.discard(sequence)
        self.stop()
        while self._tasks:  # a task that ends may have started another, to free what it was about
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    # --- rounds ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            batch = [sequence for sequence in self._ready.values() if not sequence.finished]
            if not batch:
                self._wake.clear()
                continue
            self._in_round = {sequence.sequence_id for sequence in batch}
            try:
                await self._round(batch)
            except Exception as error:
                # A fault of ours must end these requests with an error, not leave them hanging.
                logger.exception("lane %s: a round failed", self.name)
                for sequence in batch:
                    sequence.fail(error)
            finally:
                self._end_round(batch)

    async def _round(self, batch: list[Sequence]) -> None:
        """Draft and verify once for every sequence."""
        drafts = await self._propose(batch)
        items = [sequence.verify_item(drafts.get(sequence.sequence_id, [])) for sequence in batch]
        try:
            results = await answer_within(self._target.verify(items, lane=self.name), self._settings.target_timeout_s)
        except (WorkerError, TimeoutError) as error:
            logger.warning("lane %s: verify failed, recovering %d sequences: %r", self.name, len(batch), error)
            for sequence in batch:
                self._bring_up(sequence)
            return
        for sequence, item, result in zip(batch, items, results, strict=True):
            if not sequence.finished and not self._accept(sequence, result, item.draft):
                self._bring_up(sequence)

    def _accept(self, sequence: Sequence, result: VerifyResult, draft: list[int]) -> bool:
        """Take a verify result; False when the worker wants the sequence sent again."""
        if result.error is not None:
            sequence.fail(WorkerRequestError(f"the target worker refused the sequence: {result.error}"))
        elif result.need_from is not None:
            sequence.target_length = min(result.need_from, sequence.target_length)
            return False
        else:
            sequence.commit(result, draft)
        return True

    def _end_round(self, batch: list[Sequence]) -> None:
        """Free the sequences that ended or were let go of during the round."""
        self._in_round = set()
        gone = [s.sequence_id for s in batch if s.finished or s.sequence_id not in self._sequences]
        for sequence_id in gone:
            self._ready.pop(sequence_id, None)
            self._sequences.pop(sequence_id, None)
        if gone:
            self._free(gone)

    # --- drafting -------------------------------------------------------------------------------------------

    async def _propose(self, batch: list[Sequence]) -> dict[str, list[int]]:
        """Drafts by sequence; none for those that have none, for whatever reason."""
        wanted = {sequence.sequence_id: self._num_draft_tokens(sequence) for sequence in batch}
        if self._draft is None or not any(wanted.values()) or not self._draft_is_up():
            return {}
        drafting = []
        for sequence in batch:
            if not wanted[sequence.sequence_id]:
                continue
            if sequence.draft_ready:
                drafting.append(sequence)
            else:
                self._bring_up_draft(sequence)
        if not drafting:
            return {}
        items = [sequence.propose_item(wanted[sequence.sequence_id]) for sequence in drafting]
        results = await self._ask_draft(items, self._settings.draft_timeout_s)
        drafts = {}
        for sequence, result in zip(drafting, results or [], strict=results is not None):
            if result.error is not None:
                logger.info("%s goes on without a draft: %s", sequence.sequence_id, result.error)
                sequence.draftable = False
            elif result.need_from is not None:
                sequence.draft_length = min(result.need_from, sequence.draft_length)
                sequence.draft_ready = False
            else:
                drafts[sequence.sequence_id] = result.draft
        return drafts

    async def _ask_draft(self, items: list[ProposeItem], timeout_s: float) -> list[ProposeResult] | None:
        """Call the draft pool; None, and the pool is left alone for a while, if it gives no proper answer."""
        if self._draft is None:
            return None
        try:
            results = await answer_within(self._draft.propose(items, lane=self.name), timeout_s)
            if len(results) != len(items):
                raise WorkerRequestError(f"the draft pool answered {len(results)} of {len(items)} items")
        except (WorkerError, TimeoutError) as error:
            self._note_draft_failure(error)
            return None
        except Exception as error:
            # Whatever a drafter does wrong may cost speed, never a request.
            logger.exception("lane %s: the drafter is at fault", self.name)
            self._note_draft_failure(error)
            return None
        self._draft_availability.succeeded()
        return results

    def _num_draft_tokens(self, sequence: Sequence) -> int:
        if not sequence.draftable:
            return 0
        return self._draft_length.num_draft_tokens(sequence.request.speculative, sequence.num_remaining_tokens)

    def _draft_is_up(self) -> bool:
        """Whether to ask the draft pool for drafts. While it is down, it is probed beside the rounds: a round that asks
        a dead pool would wait for the timeout with all its sequences.
        """
        if self._draft_availability.probe_due and ("probe", self.name) not in self._tasks:
            self._spawn("probe", self.name, self._probe_draft())
        return self._draft_availability.up

    async def _probe_draft(self) -> None:
        if self._draft is None:
            return
        try:
            await answer_within(self._draft.info(), self._settings.draft_timeout_s)
        except (WorkerError, TimeoutError) as error:
            self._note_draft_failure(error)
        else:
            self._draft_availability.probed()

    def _note_draft_failure(self, error: Exception) -> None:
        wait_s = self._draft_availability.failed()
        logger.warning("lane %s: no draft, plain decoding for %.2f s: %r", self.name, wait_s, error)

    # --- bringing sequences up ------------------------------------------------------------------------------

    def _bring_up(self, sequence: Sequence) -> None:
        """Compute the sequence on the target worker, beside the rounds, until that has succeeded."""
        self._ready.pop(sequence.sequence_id, None)
        self._spawn("target", sequence.sequence_id, self._prefill_target(sequence))
        # While the draft pool is down it is left alone; a later round asks for the sequence's draft.
        if self._draft is None or not self._draft_is_up():
            return
        if not sequence.draft_ready and self._num_draft_tokens(sequence):
            self._bring_up_draft(sequence)

    def _bring_up_draft(self, sequence: Sequence) -> None:
        if ("draft", sequence.sequence_id) not in self._tasks:
            self._spawn("draft", sequence.sequence_id, self._prefill_draft(sequence))

    async def _prefill_target(self, sequence: Sequence) -> None:
        """Verify the sequence alone, with no draft, again and again until a worker answers or its time is up."""
        backoff, loop = Backoff(self._settings.target_retry), asyncio.get_running_loop()
        while not sequence.finished:
            item = sequence.verify_item([])
            try:
                call = self._target.verify([item], lane=self.name)
                result = (await answer_within(call, self._settings.prefill_timeout_s))[0]
            except WorkerRequestError as error:
                sequence.fail(error)
                break
            except (WorkerUnavailableError, TimeoutError) as error:
                wait_s = backoff.next_wait_s()
                if loop.time() + wait_s >= sequence.deadline:
                    sequence.fail(DeadlineExceededError(f"no target worker answered in time; last: {error!r}"))
                    break
                logger.warning("%s: target call failed, again in %.2f s: %r", sequence.sequence_id, wait_s, error)
                await asyncio.sleep(wait_s)
                continue
            except Exception as error:
                # A fault of ours: as in a round.
                logger.exception("%s: a target call failed", sequence.sequence_id)
                sequence.fail(error)
                break
            if self._accept(sequence, result, []):
                break
        if sequence.finished:
            self.discard(sequence)
        elif sequence.sequence_id in self._sequences:
            self._ready[sequence.sequence_id] = sequence
            self._wake.set()

    async def _prefill_draft(self, sequence: Sequence) -> None:
        """Bring the draft worker up to date. One try; the next round asks for another when the pool is worth it."""
        item = sequence.draft_prefill_item()
        if item.tokens:
            results = await self._ask_draft([item], self._settings.prefill_timeout_s)
            if results is None:
                return
            result = results[0]
            if result.error is not None:
                sequence.draftable = False
                return
            if result.need_from is not None:
                sequence.draft_length = min(result.need_from, sequence.draft_length)
                return
            sequence.draft_length = item.base_length + len(item.tokens)
        sequence.draft_ready = True

    # --- tasks ----------------------------------------------------------------------------------------------

    def _free(self, sequence_ids: list[str]) -> None:
        """Stop bringing sequences up; when that has stopped, free them on both workers."""
        keys = [(kind, sequence_id) for kind in ("target", "draft") for sequence_id in sequence_ids]
        bring_ups = [self._tasks[key] for key in keys if key in self._tasks]
        for task in bring_ups:
            task.cancel()
        self._spawn("release", sequence_ids[0], self._release(sequence_ids, bring_ups))

    async def _release(self, sequence_ids: list[str], after: list[asyncio.Task[None]]) -> None:
        await asyncio.gather(*after, return_exceptions=True)
        await self._target.release(sequence_ids, lane=self.name)
        if self._draft is not None:
            await self._draft.release(sequence_ids, lane=self.name)

    def _spawn(self, kind: str, key: str, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run work in a context of its own: the task must not be cancelled, or traced, with whoever started it."""
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks[(kind, key)] = task
        task.add_done_callback(lambda done: self._forget((kind, key), done))
        return task

    def _forget(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("lane %s: task %s failed", self.name, key, exc_info=error)
