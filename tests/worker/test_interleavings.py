"""Whatever is drafted, whatever is called in between: the tokens are those of plain decoding."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specdec.cache.blocks import BLOCK_SIZE
from specdec.types import ProposeItem, SamplingParams, VerifyItem
from specdec.worker.calls import Call
from tests.worker.prefix_runner import VOCAB_SIZE, FakeClock, PrefixRunner, make_scheduler, plain_tokens, step

MAX_MODEL_LEN = 150
NUM_TOKENS = 24

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.2, top_k=6, top_p=0.9, seed=2),
    SamplingParams(temperature=0.9, seed=3, repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3),
    SamplingParams(temperature=0.0, frequency_penalty=0.8, bad_words=((3, 4), (7,)), min_tokens=9, end_token_ids=(1,)),
]
NOBODYS_PARAMS = SamplingParams(temperature=1.0, seed=99)
COMMON = [(7 + n * n) % VOCAB_SIZE for n in range(110)]
PROMPTS = [[3], COMMON[:60], [*COMMON[:70], 1, 2, 3], COMMON[:70], COMMON, [*COMMON[:100], *[5] * 10]]
NAMES = [f"{kind}{n}" for kind in "rd" for n in range(5)]
EXPECTED = {
    (p, i): plain_tokens(PROMPTS[p], PARAMS[i], NUM_TOKENS) for p in range(len(PROMPTS)) for i in range(len(PARAMS))
}

# All that may ever be found: full blocks of what some reader's text begins with.
TEXTS = [PROMPTS[p] + EXPECTED[p, i] for p, i in EXPECTED]
FINDABLE = [text[start : start + BLOCK_SIZE] for text in TEXTS for start in (0, BLOCK_SIZE)]


@dataclass
class Reader:
    """One sequence, as its caller sees it."""

    prompt: int
    params: int
    tokens: list[int] = field(default_factory=list)
    base: int = 0
    call: Call | None = None

    @property
    def expected(self) -> list[int]:
        return EXPECTED[self.prompt, self.params]

    @property
    def committed(self) -> list[int]:
        return PROMPTS[self.prompt] + self.tokens


class Interleavings(RuleBasedStateMachine):
    """Several readers over one worker with a pool too small for all of them."""

    @initialize(num_blocks=st.integers(3, 9), max_tokens=st.integers(8, 40))
    def start(self, num_blocks: int, max_tokens: int) -> None:
        self.runner = PrefixRunner(num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN, max_tokens=max_tokens)
        self.clock = FakeClock()
        self.scheduler = make_scheduler(self.runner, self.clock, idle_timeout_s=20.0)
        self.readers = [Reader(n + 1, n % 5) for n in range(5)]

    def draft(self, reader: Reader, kind: str, length: int) -> list[int]:
        rest = reader.expected[len(reader.tokens) :]
        garbage = [(reader.base + n * n) % VOCAB_SIZE for n in range(length)]
        drafts = {
            "oracle": rest[:length],
            "half right": rest[: length // 2] + garbage,
            "garbage": garbage,
            "empty": [],
            "too long": (rest + garbage * 10)[: self.runner.max_tokens - 1],
            "out of vocabulary": [*rest[: length // 2], VOCAB_SIZE + length, *rest[length // 2 :]],
        }
        return drafts[kind][: self.runner.max_tokens - 1]

    @rule(
        who=st.integers(0, 4),
        kind=st.sampled_from(["oracle", "half right", "garbage", "empty", "too long", "out of vocabulary"]),
        length=st.integers(1, 6),
        base=st.sampled_from(["all", "all", "less", "none"]),
    )
    def send(self, who: int, kind: str, length: int, base: str) -> None:
        reader = self.readers[who]
        if reader.call is not None or len(reader.tokens) >= NUM_TOKENS:
            return
        counted = {"all": reader.base, "less": reader.base // 2, "none": 0}[base]
        item = VerifyItem(
            f"r{who}",
            counted,
            reader.committed[counted:],
            self.draft(reader, kind, length),
            PARAMS[reader.params] if counted == 0 else None,
            len(PROMPTS[reader.prompt]) if counted == 0 else 0,
        )
        reader.call = Call([item])
        self.scheduler.add(reader.call)

    @rule(kind=st.sampled_from(["oracle", "half right", "garbage"]), length=st.integers(1, 6))
    def round_of_all(self, kind: str, length: int) -> None:
        """What a lane does most of the time; without it hardly a sequence would get beyond its prompt."""
        for who in range(5):
            self.send(who, kind, length, "all")
        self.compute(20)

    @rule(who=st.integers(0, 4), length=st.integers(0, 12))
    def draft_for(self, who: int, length: int) -> None:
        """Drafts that will not be committed: they are for other parameters. Here to hold and to share blocks."""
        item = ProposeItem(f"d{who}", 0, self.readers[who].committed, length, NOBODYS_PARAMS)
        self.scheduler.add(Call([item]))

    @rule(count=st.integers(1, 4))
    def compute(self, count: int) -> None:
        for _ in range(count):
            step(self.scheduler, self.runner)
        self.clock.now += 0.1
        self.receive()

    @rule(who=st.integers(0, 4))
    def give_up(self, who: int) -> None:
        reader = self.readers[who]
        if reader.call is not None and reader.call.future.cancel():
            reader.call = None

    @rule(who=st.integers(0, 4))
    def release_and_forget(self, who: int) -> None:
        reader = self.readers[who]
        if reader.call is None:
            self.scheduler.release([f"r{who}"])
            self.readers[who] = Reader((reader.prompt + 1) % len(PROMPTS), (reader.params + 1) % 5)

    @rule(who=st.integers(0, 4), prompt=st.integers(0, len(PROMPTS) - 1))
    def go_on_with_another_text(self, who: int, prompt: int) -> None:
        """Keep of a sequence what its text has in common with another, maybe half a block."""
        reader = self.readers[who]
        # Not under penalties: what counts as the prompt is settled at first contact.
        if reader.call is None and reader.params < 3:
            pairs = zip(reader.committed[: reader.base], PROMPTS[prompt][:-1], strict=False)
            base = next((n for n, (mine, other) in enumerate(pairs) if mine != other), None)
            if base is None:
                base = min(reader.base, len(PROMPTS[prompt]) - 1)
            self.readers[who] = Reader(prompt, reader.params, base=base)

    @rule()
    def crash(self) -> None:
        self.scheduler.fail_all(RuntimeError("a forward failed"))
        for reader in self.readers:
            if reader.call is not None and reader.call.future.exception() is not None:
                reader.call = None

    @rule(seconds=st.sampled_from([1.0, 6.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.scheduler.table.sweep()

    def receive(self) -> None:
        for reader in self.readers:
            if reader.call is None or not reader.call.future.done():
                continue
            (result,) = reader.call.future.result()
            reader.call = None
            assert result.error is None
            if result.need_from is not None:
                assert result.need_from < reader.base
                reader.base = result.need_from
                continue
            new = (reader.tokens + result.output)[:NUM_TOKENS]
            assert new == reader.expected[: len(new)]
            assert result.num_accepted == len(result.output) - 1
            reader.base = len(reader.committed) + result.num_accepted
            reader.tokens += result.output

    @invariant()
    def blocks_are_counted(self) -> None:
        if not hasattr(self, "runner"):
            return
        pool = self.scheduler.table.pool
        held = [s for name in NAMES if (s := self.scheduler.table.find(name)) is not None]
        users = Counter(block for sequence in held for block in sequence.blocks)
        assert [pool._num_users[block] for block in range(pool.num_blocks)] == [
            users[block] for block in range(pool.num_blocks)
        ]
        assert pool.num_free == pool.num_blocks - len(users)

    @invariant()
    def only_committed_tokens_can_be_found(self) -> None:
        if not hasattr(self, "runner"):
            return
        for block in self.scheduler.table.pool._block_of.values():
            assert self.runner.held(block) in FINDABLE

    def teardown(self) -> None:
        if not hasattr(self, "runner"):
            return
        # Everything that was sent is answered in the end.
        for _ in range(300):
            step(self.scheduler, self.runner)
            self.clock.now += 1.0
        self.receive()
        assert all(reader.call is None for reader in self.readers)
        self.scheduler.release(NAMES)
        assert self.scheduler.table.pool.num_free == self.runner.num_blocks


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
