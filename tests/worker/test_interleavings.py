"""Whatever is drafted, whatever is called in between: the tokens are those of plain decoding."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specdec.types import SamplingParams, VerifyItem
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
PROMPTS = [[(7 * s + n * n) % VOCAB_SIZE for n in range(length)] for s, length in enumerate((1, 60, 63, 110))]
EXPECTED = {
    (p, i): plain_tokens(PROMPTS[p], PARAMS[i], NUM_TOKENS) for p in range(len(PROMPTS)) for i in range(len(PARAMS))
}


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
        self.readers = [Reader(n % 4, n % 5) for n in range(5)]

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
            self.readers[who] = Reader((reader.prompt + 1) % 4, (reader.params + 1) % 5)

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
        pool, names = self.scheduler.table.pool, [f"r{n}" for n in range(5)]
        held = [s for name in names if (s := self.scheduler.table.find(name)) is not None]
        assert pool.num_free == pool.num_blocks - sum(len(sequence.blocks) for sequence in held)

    def teardown(self) -> None:
        if not hasattr(self, "runner"):
            return
        # Everything that was sent is answered in the end.
        for _ in range(300):
            step(self.scheduler, self.runner)
            self.clock.now += 1.0
        self.receive()
        assert all(reader.call is None for reader in self.readers)
        self.scheduler.release([f"r{n}" for n in range(5)])
        assert self.scheduler.table.pool.num_free == self.runner.num_blocks


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
