"""Pools of workers without models: the target is a pure function of the tokens before and the seed.

They keep to the workers' contract by holding, for every sequence, the very tokens they were fed, and computing from
those alone. So whoever believes a worker to hold what it does not hold gets another text.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.errors import WorkerRequestError, WorkerUnavailableError
from specdec.types import (
    ProposeItem,
    ProposeResult,
    SamplingParams,
    VerifyItem,
    VerifyResult,
    WorkerInfo,
)

NextToken = Callable[[Sequence[int], int], int]
"""The token after the given ones, under a seed."""

ALPHABET = b"abcdefgh "


def hashed(tokens: Sequence[int], seed: int) -> int:
    """A text without end in which every token depends on all before it."""
    return ALPHABET[_hash(tokens, seed) % len(ALPHABET)]


def scripted(tokens: Sequence[int], prompt_length: int) -> NextToken:
    """Says ``tokens`` after a prompt, then dots."""
    return lambda before, seed: (list(tokens) + [ord(".")] * len(before))[len(before) - prompt_length]


def _hash(tokens: Sequence[int], salt: int) -> int:
    return zlib.crc32(repr((salt, tuple(tokens))).encode())


@dataclass(frozen=True, slots=True)
class Fault:
    """What is to go wrong with one call.

    Attributes:
        error: raised instead of answering.
        forget: the worker is a new one, which holds nothing.
        computed: the work was done, only the answer is lost.
        hang: no answer, ever.
        late_s: the answer takes this long.
        refuse: sequences that are answered with an error.
    """

    error: BaseException | None = None
    forget: bool = False
    computed: bool = False
    hang: bool = False
    late_s: float = 0.0
    refuse: frozenset[str] = frozenset()


UNAVAILABLE = Fault(error=WorkerUnavailableError("the replica is dead"))
KILLED = Fault(error=WorkerUnavailableError("the replica is dead"), forget=True)
RESTARTED = Fault(forget=True)
ANSWER_LOST = Fault(error=WorkerUnavailableError("connection reset"), computed=True)
REFUSED = Fault(error=WorkerRequestError("no such method"))
HANGS = Fault(hang=True)
BROKEN = Fault(error=RuntimeError("a bug in the client"))


@dataclass(slots=True)
class Held:
    """What a worker holds of a sequence."""

    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Recorded:
    """A call as it came in; ``results`` are there once it is answered."""

    lane: str
    items: list[VerifyItem] | list[ProposeItem]
    results: list[VerifyResult] | list[ProposeResult] | None = None

    @property
    def sequence_ids(self) -> list[str]:
        return [item.sequence_id for item in self.items]


class FakePool:
    """Common to both kinds.

    Attributes:
        faults: by number of the call, from 0; ``every_call`` counts for those not named.
        gate: an event that calls whose items ``is_gated`` wait for.
        calls: all, in order of arrival.
        released: sequence ids, in order.
        too_early: sequences released while a call about them was under way.
        too_late: sequences a call came about after their release.
    """

    role = "fake"

    def __init__(self, next_token: NextToken = hashed) -> None:
        self.next_token = next_token
        self.faults: dict[int, Fault] = {}
        self.every_call = Fault()
        self.gate = asyncio.Event()
        self.is_gated: Callable[[VerifyItem | ProposeItem], bool] = lambda item: False
        self.calls: list[Recorded] = []
        self.released: list[str] = []
        self.too_early: list[str] = []
        self.too_late: list[str] = []
        self.max_model_len = 10_000
        self._held: dict[str, dict[str, Held]] = {}
        self._under_way: list[str] = []

    @property
    def held_ids(self) -> set[str]:
        """Sequences some worker holds something of."""
        return {sequence_id for held in self._held.values() for sequence_id in held}

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    async def info(self) -> WorkerInfo:
        fault = self.every_call
        if fault.hang:
            await asyncio.Event().wait()
        if fault.error is not None:
            raise fault.error
        return WorkerInfo(self.role, "fingerprint", self.max_model_len, len(self.held_ids), 1, 1, 0.0, 0.0)

    async def release(self, sequence_ids: list[str], *, lane: str) -> None:
        self.too_early += [each for each in sequence_ids if each in self._under_way]
        self.released += sequence_ids
        for sequence_id in sequence_ids:
            self._held.get(lane, {}).pop(sequence_id, None)

    async def _begin(self, call: Recorded) -> Fault:
        """Let time pass, and go wrong where that is due. `_end` must follow."""
        fault = self.faults.get(len(self.calls), self.every_call)
        self.calls.append(call)
        self.too_late += [each for each in call.sequence_ids if each in self.released]
        self._under_way += call.sequence_ids
        await asyncio.sleep(fault.late_s)
        if any(self.is_gated(item) for item in call.items):
            await self.gate.wait()
        if fault.hang:
            await asyncio.Event().wait()
        if fault.forget:
            self._held[call.lane] = {}
        if fault.error is not None and not fault.computed:
            raise fault.error
        return fault

    async def _end(self, call: Recorded) -> None:
        try:
            await asyncio.sleep(0)  # a cancelled call, too, takes a while to end
        finally:
            for sequence_id in call.sequence_ids:
                self._under_way.remove(sequence_id)

    def _feed(self, item: VerifyItem | ProposeItem, lane: str) -> Held | int:
        """Take an item's tokens in; the length held where that is less than the caller counts on."""
        sequences = self._held.setdefault(lane, {})
        held = sequences.get(item.sequence_id)
        num_held = len(held.tokens) if held is not None else 0
        if num_held < item.base_length:
            return num_held
        if held is None:
            if item.sampling is None:
                return 0
            held = sequences[item.sequence_id] = Held(item.sampling)
        held.tokens[item.base_length :] = item.tokens
        return held


class FakeTarget(FakePool):
    """A `TargetClient`."""

    role = "target"

    def __init__(self, next_token: NextToken = hashed, lanes: Sequence[str] = ("only",)) -> None:
        super().__init__(next_token)
        self.offered = list(lanes)

    def lanes(self) -> list[str]:
        return list(self.offered)

    async def verify(self, items: list[VerifyItem], *, lane: str) -> list[VerifyResult]:
        call = Recorded(lane, items)
        try:
            fault = await self._begin(call)
            results = [self._verify(item, lane, fault) for item in items]
            if fault.error is not None:
                raise fault.error
            call.results = results
            return results
        finally:
            await self._end(call)

    def _verify(self, item: VerifyItem, lane: str, fault: Fault) -> VerifyResult:
        if not item.tokens:
            return VerifyResult(item.sequence_id, error="tokens is empty")
        if item.sequence_id in fault.refuse:
            return VerifyResult(item.sequence_id, error="refused by the test")
        held = self._feed(item, lane)
        if isinstance(held, int):
            return VerifyResult(item.sequence_id, need_from=held)
        output: list[int] = []
        for guess in [*item.draft, None]:
            output.append(self.next_token(held.tokens, held.sampling.seed))
            if output[-1] != guess:
                break
            held.tokens.append(output[-1])
        return VerifyResult(item.sequence_id, output, len(output) - 1)


class FakeDraft(FakePool):
    """A `DraftClient`.

    Attributes:
        agreement: share of positions at which the guess is the target's own token, 0 to 1.
    """

    role = "draft"

    def __init__(self, next_token: NextToken = hashed, agreement: float = 1.0) -> None:
        super().__init__(next_token)
        self.agreement = agreement

    async def propose(self, items: list[ProposeItem], *, lane: str) -> list[ProposeResult]:
        call = Recorded(lane, items)
        try:
            fault = await self._begin(call)
            results = [self._propose(item, lane, fault) for item in items]
            if fault.error is not None:
                raise fault.error
            call.results = results
            return results
        finally:
            await self._end(call)

    def _propose(self, item: ProposeItem, lane: str, fault: Fault) -> ProposeResult:
        if not item.tokens:
            return ProposeResult(item.sequence_id, error="tokens is empty")
        if item.sequence_id in fault.refuse or item.base_length + len(item.tokens) > self.max_model_len:
            return ProposeResult(item.sequence_id, error="refused by the test")
        held = self._feed(item, lane)
        if isinstance(held, int):
            return ProposeResult(item.sequence_id, need_from=held)
        draft: list[int] = []
        while len(draft) < item.num_draft_tokens:
            before = [*held.tokens, *draft]
            own = self.next_token(before, held.sampling.seed)
            draft.append(own if _hash(before, -1) % 1000 < self.agreement * 1000 else own + 1)
        held.tokens += draft[:-1]  # the last guess is not fed
        return ProposeResult(item.sequence_id, draft)
