"""A runner without a model, whose logits are a hash of everything the KV cache holds for a sequence.

One wrong, stale or foreign cache entry changes the logits beyond recognition.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.cache.blocks import BLOCK_SIZE, num_blocks_for
from specdec.cache.keys import KVIdentity
from specdec.runner.batch import SequenceRows
from specdec.sampling.choose import choose_tokens
from specdec.sampling.mask import MaskFactory
from specdec.types import SamplingParams, VerifyItem
from specdec.worker.scheduler import Scheduler
from specdec.worker.sequences import SequenceTable
from tests import oracles

VOCAB_SIZE = 11


def hashed_logits(prefix: Sequence[int], salt: int = 0) -> list[float]:
    """The model: a row of logits as a function of a whole prefix."""
    draw = random.Random(zlib.crc32(array("q", [salt, *prefix]).tobytes()))
    return [draw.gauss(0.0, 1.5) for _ in range(VOCAB_SIZE)]


def plain_tokens(prompt: Sequence[int], params: SamplingParams, count: int, salt: int = 0) -> list[int]:
    """What plain decoding gives, one naive step at a time."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(oracles.choose(hashed_logits(tokens, salt), params, len(tokens), tokens, len(prompt)))
    return tokens[len(prompt) :]


class PrefixRunner:
    """In the place of `specdec.runner.model.ModelRunner`; checks what it is asked for.

    Attributes:
        forwards: the rows of every forward so far.
        num_copies: blocks copied so far.
        before_forward: called in the step thread.
    """

    fingerprint = "0" * 64
    vocab_size = VOCAB_SIZE

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_model_len: int = 512,
        max_tokens: int = 32,
        max_prefill_beside_decode: int | None = None,
        salt: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.max_tokens = max_tokens
        self.max_prefill_beside_decode = max_prefill_beside_decode or max_tokens
        self.forwards: list[list[SequenceRows]] = []
        self.num_copies = 0
        self.kv_identity = KVIdentity(self.fingerprint, "tokens", str(salt))
        self.before_forward: Callable[[], None] = lambda: None
        self._salt = salt
        self._cache: list[int | None] = [None] * (num_blocks * BLOCK_SIZE)

    def forward(self, sequences: Sequence[SequenceRows]) -> Tensor:
        self.before_forward()
        self._check(sequences)
        self.forwards.append(
            [SequenceRows(list(r.token_ids), r.start, list(r.blocks), r.num_logits) for r in sequences]
        )
        logits = []
        for rows in sequences:
            for offset, token in enumerate(rows.token_ids):
                self._cache[self._place(rows, rows.start + offset)] = token
            for length in range(rows.end - rows.num_logits + 1, rows.end + 1):
                logits.append(hashed_logits(self._read(rows, length), self._salt))
        return torch.tensor(logits, dtype=torch.float64).view(len(logits), VOCAB_SIZE)

    def copy_block(self, source: int, destination: int) -> None:
        self.num_copies += 1
        block = self._cache[source * BLOCK_SIZE : (source + 1) * BLOCK_SIZE]
        self._cache[destination * BLOCK_SIZE : (destination + 1) * BLOCK_SIZE] = block

    def held(self, block: int) -> list[int | None]:
        """What a block of the cache holds."""
        return self._cache[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]

    def _check(self, sequences: Sequence[SequenceRows]) -> None:
        assert 0 < sum(len(rows.token_ids) for rows in sequences) <= self.max_tokens
        users = Counter(block for rows in sequences for block in rows.blocks)
        for rows in sequences:
            assert len(set(rows.blocks)) == len(rows.blocks), "a sequence has a block twice"
            written = rows.blocks[rows.start // BLOCK_SIZE : num_blocks_for(rows.end)]
            assert all(users[block] == 1 for block in written), "a block that others read is written to"
            assert 0 <= rows.num_logits <= len(rows.token_ids)
            assert len(rows.token_ids) > 0
            assert rows.end <= self.max_model_len
            assert all(0 <= token < VOCAB_SIZE for token in rows.token_ids)

    def _place(self, rows: SequenceRows, position: int) -> int:
        return rows.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    def _read(self, rows: SequenceRows, length: int) -> list[int]:
        prefix = [self._cache[self._place(rows, position)] for position in range(length)]
        assert None not in prefix, "a position was never computed"
        return [token for token in prefix if token is not None]


class FakeClock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_scheduler(
    runner: PrefixRunner,
    clock: FakeClock | None = None,
    idle_timeout_s: float = 60.0,
    make_mask: MaskFactory | None = None,
    *,
    prefix_cache: bool = True,
) -> Scheduler:
    """A scheduler for this runner, to be stepped by hand."""
    clock = clock or FakeClock()
    return Scheduler(
        SequenceTable(
            runner.num_blocks,
            idle_timeout_s,
            identity=runner.kv_identity if prefix_cache else None,
            copy_block=runner.copy_block,
            clock=clock,
        ),
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        max_tokens=runner.max_tokens,
        max_prefill_beside_decode=runner.max_prefill_beside_decode,
        clock=clock,
        make_mask=make_mask,
    )


def step(scheduler: Scheduler, runner: PrefixRunner) -> bool:
    """What the step thread does once; False when there was nothing to compute."""
    batch = scheduler.next_batch()
    if not batch:
        return False
    logits = runner.forward([rows.rows for _, rows in batch])
    tokens = choose_tokens(logits, [choice for _, rows in batch for choice in rows.choices])
    first = 0
    for pending, rows in batch:
        scheduler.advance(pending, rows, tokens[first : first + len(rows.choices)])
        first += len(rows.choices)
    scheduler.end_batch()
    return True


def whole(sequence_id: str, tokens: list[int], draft: list[int], params: SamplingParams) -> VerifyItem:
    """An item that counts on nothing; its tokens are the prompt."""
    return VerifyItem(sequence_id, 0, tokens, draft, params, len(tokens))
