"""Which items are computed, and in which forward. No thread and no tensor: the step loop drives it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from specdec.errors import InvalidRequestError
from specdec.sampling.history import TokenHistory
from specdec.sampling.mask import MaskFactory
from specdec.types import ProposeItem, SamplingParams, TokenLogprobs, VerifyItem
from specdec.worker.calls import AnyJob, Call, Item, PendingItem
from specdec.worker.jobs import JobRows, ProposeJob, VerifyJob
from specdec.worker.rounds import RoundClock
from specdec.worker.sequences import CachedSequence, SequenceTable


class Scheduler:
    """Turns items into jobs when there is room for them, and jobs into the rows of the next forward.

    Items of one sequence run one after another, in the order of their arrival. An item that counts on KV the worker
    does not hold is answered at once, and so is one that finds no room although its sequence is known: its caller
    takes it out of the round and sends it whole. An item sent whole waits for room.
    """

    def __init__(
        self,
        table: SequenceTable,
        *,
        vocab_size: int,
        max_model_len: int,
        max_tokens: int,
        max_prefill_beside_decode: int,
        make_mask: MaskFactory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            vocab_size: token ids are below this.
            max_model_len: longest sequence, in tokens.
            max_tokens: most tokens in one forward.
            max_prefill_beside_decode: most tokens of long feeds in one forward while other sequences decode.
            make_mask: None refuses sequences with a grammar.
        """
        self.table = table
        self._make_mask = make_mask
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_tokens = max_tokens
        self._max_prefill_beside_decode = max_prefill_beside_decode
        self._rounds = RoundClock(clock)
        self._decoding = False
        self._waiting: list[PendingItem] = []
        self._running: list[PendingItem] = []

    @property
    def has_work(self) -> bool:
        """Some job can be advanced, or some item may become one."""
        return bool(self._running or self._waiting)

    def add(self, call: Call) -> None:
        """Take a call in. Items that are wrong are answered here."""
        for index, item in enumerate(call.items):
            pending = PendingItem(call, index)
            fault = self._fault(item)
            if fault is not None:
                pending.refuse(fault)
            else:
                self._waiting.append(pending)

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Forget sequences, and refuse what still waits for them."""
        released = set(sequence_ids)
        for pending in [p for p in self._waiting if p.item.sequence_id in released]:
            self._waiting.remove(pending)
            pending.refuse("the sequence was released")
        for sequence_id in released:
            self.table.close(sequence_id)

    def next_batch(self) -> list[tuple[PendingItem, JobRows]]:
        """The rows of the next forward: at most ``max_tokens`` tokens, decode and verify rows before prefill.

        While sequences decode, prefill gets a small part of a forward, and none while their next round is due: they
        should not wait for somebody's long prompt.
        """
        self._drop_cancelled()
        self._admit()
        # Short ones first, otherwise in order of arrival, so that no flow of short prompts starves a long one.
        jobs = [(pending, job, self._decodes(job)) for pending, job in self._jobs()]
        jobs.sort(key=lambda entry: not entry[2])
        decoding = bool(jobs) and jobs[0][2]
        if decoding:
            self._rounds.begin()
        elif self._rounds.due:
            return []
        budget = self._max_tokens
        prefill_budget = self._max_prefill_beside_decode if decoding or self._rounds.decoding else budget
        batch: list[tuple[PendingItem, JobRows]] = []
        for pending, job, decodes in jobs:
            rows = job.next_rows(budget if decodes else min(budget, prefill_budget))
            if rows is None:
                continue
            batch.append((pending, rows))
            budget -= len(rows.rows.token_ids)
            if not decodes:
                prefill_budget -= len(rows.rows.token_ids)
            if budget == 0:
                break
        self._decoding = decoding
        return batch

    def end_batch(self) -> None:
        """The forward of the last batch is over, and its jobs have advanced."""
        if self._decoding:
            self._rounds.end()

    def _decodes(self, job: AnyJob) -> bool:
        """Whether a job is as short as a decode or verify step. What cannot be cut counts as short, too: otherwise it
        would wait for as long as others decode.
        """
        return job.num_tokens_to_feed <= max(self._max_prefill_beside_decode, job.num_tail_rows)

    def advance(
        self, pending: PendingItem, rows: JobRows, tokens: list[int], logprobs: Sequence[TokenLogprobs | None] = ()
    ) -> None:
        """Take the outcome of a forward for one of its jobs: the tokens chosen, and what there is to tell of them."""
        job = _job_of(pending)
        job.advance(rows.rows, tokens, logprobs)
        if job.done:
            self._end(pending)
            pending.call.answer(pending.index, job.result)

    def fail_all(self, error: BaseException) -> None:
        """End everything with an error and forget all KV: after a failed forward none of it can be trusted."""
        for pending in [*self._running, *self._waiting]:
            pending.call.fail(error)
        for pending in list(self._running):
            self._end(pending)
        self._waiting.clear()
        self.table.clear()

    def _jobs(self) -> list[tuple[PendingItem, AnyJob]]:
        return [(pending, pending.job) for pending in self._running if pending.job is not None]

    def _end(self, pending: PendingItem) -> None:
        job = _job_of(pending)
        self._running.remove(pending)
        self.table.end(job.sequence, job.num_committed)

    def _drop_cancelled(self) -> None:
        self._waiting = [pending for pending in self._waiting if not pending.call.future.cancelled()]
        for pending in [pending for pending in self._running if pending.call.future.cancelled()]:
            self._end(pending)

    def _admit(self) -> None:
        """Turn waiting items into jobs, in order of arrival, as far as there is room."""
        still_waiting = []
        for pending in self._waiting:
            if not self._try_start(pending):
                still_waiting.append(pending)
        self._waiting = still_waiting

    def _try_start(self, pending: PendingItem) -> bool:
        """Start an item or answer it; False leaves it waiting."""
        item, sequence = pending.item, self.table.find(pending.item.sequence_id)
        if sequence is not None and sequence.busy:
            return False
        held = sequence.length if sequence is not None else 0
        if held < item.base_length:
            pending.ask_from(held)
            return True
        if sequence is None:
            if item.sampling is None:
                pending.ask_from(0)
                return True
            sequence = self.table.open(item.sequence_id, item.sampling, self._history(item, item.sampling))
        elif item.sampling is not None and item.base_length == 0:
            # A release may have been lost, and the id be another request's by now.
            sequence.sampling, sequence.history = item.sampling, self._history(item, item.sampling)
        if item.base_length == 0:
            self.table.restart(sequence, item.tokens, item.cache_salt)
        else:
            # What is held beyond the caller's base is a draft that was never committed, or will be sent again.
            self.table.crop(sequence, item.base_length)
        num_cached = sequence.length - item.base_length
        job = self._make_job(item, sequence)
        job.result.num_cached_tokens = num_cached
        if not self.table.reserve(sequence, job.max_length):
            self.table.close(item.sequence_id)
            if item.base_length == 0:
                return False
            pending.ask_from(0)
            return True
        pending.job = job
        self.table.begin(sequence, num_cached, 0 if item.base_length else len(item.tokens) - num_cached)
        self._running.append(pending)
        return True

    def _history(self, item: Item, sampling: SamplingParams) -> TokenHistory:
        if self._make_mask is None or sampling.grammar is None:
            return TokenHistory(item.num_prompt_tokens)
        return TokenHistory(item.num_prompt_tokens, self._make_mask(sampling.grammar))

    def _make_job(self, item: Item, sequence: CachedSequence) -> AnyJob:
        room = self._max_model_len - item.base_length - len(item.tokens)
        if isinstance(item, ProposeItem):
            return ProposeJob(item, max(0, min(item.num_draft_tokens, room)), sequence)
        # A guess can be anything. What cannot be a token, or would not fit, ends the draft before it.
        valid = 0
        while valid < min(len(item.draft), room) and 0 <= item.draft[valid] < self._vocab_size:
            valid += 1
        return VerifyJob(item, item.draft[:valid], sequence)

    def _fault(self, item: Item) -> str | None:
        """What makes an item impossible to serve, or None."""
        if not item.tokens:
            return "tokens is empty: send at least the last committed token"
        if item.base_length < 0:
            return f"base_length is {item.base_length}; it counts tokens"
        if item.num_prompt_tokens < 0:
            return f"num_prompt_tokens is {item.num_prompt_tokens}; it counts tokens"
        if item.sampling is not None and (fault := self._grammar_fault(item.sampling)) is not None:
            return fault
        named = () if item.sampling is None else item.sampling.named_token_ids
        wrong = [token for token in (*item.tokens, *named) if not 0 <= token < self._vocab_size]
        if wrong:
            return f"token id {wrong[0]} is not in the vocabulary of {self._vocab_size}"
        length = item.base_length + len(item.tokens)
        if length > self._max_model_len:
            return f"{length} tokens are more than this worker's max_model_len of {self._max_model_len}"
        if isinstance(item, VerifyItem) and len(item.draft) >= self._max_tokens:
            return f"a draft of {len(item.draft)} tokens does not fit into one step of {self._max_tokens}"
        return None

    def _grammar_fault(self, sampling: SamplingParams) -> str | None:
        if sampling.grammar is None:
            return None
        if self._make_mask is None:
            return "this worker has no grammars"
        try:
            self._make_mask(sampling.grammar)
        except InvalidRequestError as error:
            return f"the grammar is wrong: {error}"
        return None


def _job_of(pending: PendingItem) -> AnyJob:
    """The job of a running item."""
    if pending.job is None:
        raise RuntimeError("the item is not running")
    return pending.job
