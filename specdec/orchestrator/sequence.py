"""A sequence: the truth about one request, whatever becomes of the workers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from specdec.orchestrator.text import IncrementalDecoder, StopStrings
from specdec.runner.tokenizer import Tokenizer
from specdec.types import (
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    ProposeItem,
    SamplingParams,
    SpeculativeStats,
    TokenLogprobs,
    TokenOrigin,
    VerifyItem,
    VerifyResult,
)


class Sequence:
    """One prompt and what was generated after it.

    Attributes:
        token_ids: prompt and committed tokens.
        target_length, draft_length: how many of them the workers are believed to hold. Beliefs: workers say when
            they hold less.
        draft_ready: the draft worker holds the sequence up to the last few tokens.
        draftable: False once the draft worker refused the sequence for good.
        events: chunks, or the error that ended the sequence, for the request's own task.
        finished: no more events will come.
    """

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, deadline: float) -> None:
        """
        Args:
            deadline: on the event loop's clock.
        """
        self.request = request
        self.deadline = deadline
        self.token_ids = list(request.prompt_token_ids)
        self.target_length = 0
        self.draft_length = 0
        self.draft_ready = False
        self.draftable = True
        self.finished = False
        self.stats = SpeculativeStats()
        self.events: asyncio.Queue[GenerationChunk | Exception] = asyncio.Queue()
        self._end_tokens: frozenset[int] = frozenset() if request.ignore_eos else tokenizer.eos_token_ids
        self._sampling = request.sampling
        if request.sampling.min_tokens:
            # An end token the tokenizer does not know never comes out, so there is nothing to mask.
            end_tokens = {*self._end_tokens, *request.stop_token_ids}
            known = tuple(sorted(token for token in end_tokens if token < tokenizer.vocab_size))
            self._sampling = replace(request.sampling, end_token_ids=known)
        self._decoder = IncrementalDecoder(tokenizer, request.prompt_token_ids)
        self._stop = StopStrings(request.stop)

    @property
    def sequence_id(self) -> str:
        """The sequence's name on the workers."""
        return self.request.request_id

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens the request may still get."""
        return self.request.max_tokens - self._num_generated

    @property
    def _num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def _num_generated(self) -> int:
        return len(self.token_ids) - self._num_prompt_tokens

    def verify_item(self, draft: list[int]) -> VerifyItem:
        """The next verify step."""
        base = self.target_length
        return VerifyItem(self.sequence_id, base, self.token_ids[base:], draft, *self._first_contact(base))

    def propose_item(self, num_draft_tokens: int) -> ProposeItem:
        """The next draft."""
        base = self.draft_length
        return ProposeItem(self.sequence_id, base, self.token_ids[base:], num_draft_tokens, *self._first_contact(base))

    def draft_prefill_item(self) -> ProposeItem:
        """What brings the draft worker up to the last token but one; the last is fed when a draft is wanted."""
        base, end = self.draft_length, len(self.token_ids) - 1
        return ProposeItem(self.sequence_id, base, self.token_ids[base:end], 0, *self._first_contact(base))

    def commit(self, result: VerifyResult, draft: list[int]) -> None:
        """Take the outcome of a verify step and tell the request."""
        length, num_accepted = len(self.token_ids), result.num_accepted
        self.stats.num_steps += 1
        self.stats.num_draft_tokens += len(draft)
        self.stats.num_accepted_tokens += num_accepted
        self.target_length = length + num_accepted
        # A draft worker never feeds its last guess, so it holds one token less than it drafted.
        self.draft_length = min(self.draft_length, length) if not draft else length + min(num_accepted, len(draft) - 1)
        last = (
            TokenOrigin.PLAIN
            if not draft
            else (TokenOrigin.BONUS if num_accepted == len(draft) else TokenOrigin.RECOVERED)
        )
        # Whoever computes the sequence again, after a failure, may find more: that was computed for this request.
        num_cached_tokens = result.num_cached_tokens if self.stats.num_steps == 1 else 0
        origins = [TokenOrigin.ACCEPTED] * num_accepted + [last]
        self._emit(result.output, origins, result.logprobs, num_cached_tokens)

    def fail(self, error: Exception) -> None:
        """End the sequence with an error."""
        if not self.finished:
            self.finished = True
            self.events.put_nowait(error)

    def _emit(
        self, tokens: list[int], origins: list[TokenOrigin], logprobs: list[TokenLogprobs], num_cached_tokens: int
    ) -> None:
        """Append tokens one by one until one ends the sequence, and put the chunk they make."""
        text, emitted = "", 0
        finish_reason: FinishReason | None = None
        stop_reason: str | int | None = None
        for token in tokens:
            self.token_ids.append(token)
            emitted += 1
            if token in self._end_tokens:
                finish_reason = FinishReason.STOP
            elif token in self.request.stop_token_ids:
                finish_reason, stop_reason = FinishReason.STOP, token
            else:
                piece = self._decoder.add(token)
                # A stop string is looked for in what comes after the first min_tokens tokens only.
                text += piece if self._num_generated <= self._sampling.min_tokens else self._stop.add(piece)
                if self._stop.matched is not None:
                    finish_reason, stop_reason = FinishReason.STOP, self._stop.matched
                elif self.num_remaining_tokens == 0:
                    finish_reason = FinishReason.LENGTH
            if finish_reason is not None:
                break
        if finish_reason is not None:
            self.finished = True
            # What was held back may still complete a stop string.
            text += self._stop.add(self._decoder.finish()) + self._stop.finish()
            if self._stop.matched is not None:
                finish_reason, stop_reason = FinishReason.STOP, self._stop.matched
        self.events.put_nowait(
            GenerationChunk(
                text=text,
                token_ids=tuple(tokens[:emitted]),
                origins=tuple(origins[:emitted]),
                finish_reason=finish_reason,
                stop_reason=stop_reason,
                stats=replace(self.stats),
                num_cached_tokens=num_cached_tokens,
                logprobs=tuple(logprobs[:emitted]),
            )
        )

    def _first_contact(self, base_length: int) -> tuple[SamplingParams | None, int, str | None]:
        """Sampling parameters, number of prompt tokens, cache salt: first and last go along on first contact only."""
        if base_length == 0:
            return self._sampling, self._num_prompt_tokens, self.request.cache_salt
        return None, self._num_prompt_tokens, None
