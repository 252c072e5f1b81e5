"""The whole system in one process, on a tiny model with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from specdec import Engine
from specdec.config import (
    DraftSettings,
    EngineConfig,
    ModelSettings,
    WorkerSettings,
)
from specdec.errors import ContextLengthError, InvalidRequestError, WorkerError
from specdec.runner.load import load_reference
from specdec.types import FinishReason, SpeculativeStats, TokenOrigin
from tests.models import EOS_TOKEN_ID, TOKENIZER_VOCAB_SIZE, make_tiny_llama

NUM_TOKENS = 40
NEAR_TIE = 0.005
PROMPTS = [
    "The quick brown fox",
    "a",
    "def main():\n    ",
    "Größe, 大きさ, размер",
    "1 2 3 4 5 6 7 8 9",
    "x" * 150,
    "Once upon a time " * 8,
    "👍",
]
DRAFT_LENGTHS = [0, 1, 4, 8]
WORKER = WorkerSettings(kv_cache_bytes=4 << 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def config(folder: Path) -> EngineConfig:
    return EngineConfig(
        target=ModelSettings(source=str(folder), device="cpu"),
        draft=DraftSettings(cut_layers=[0], device="cpu"),
        target_worker=WORKER,
        draft_worker=WORKER,
    )


@pytest.fixture(scope="module")
def engine(config: EngineConfig) -> Iterator[Engine]:
    with Engine(config) as engine:
        yield engine


def reference_greedy(folder: Path, token_ids: list[int]) -> tuple[list[int], list[float]]:
    """Transformers' own greedy generation, and how far apart its two best logits were at every token."""
    model = load_reference(folder, "float16")
    out = model.generate(
        torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        suppress_tokens=list(range(TOKENIZER_VOCAB_SIZE, model.config.vocab_size)),  # padding, no tokens
        output_scores=True,
        return_dict_in_generate=True,
    )
    best = [torch.topk(scores[0], 2).values for scores in out.scores]
    return out.sequences[0, len(token_ids) :].tolist(), [float(two[0] - two[1]) for two in best]


def assert_same(ids: list[int], wanted: list[int], gaps: list[float]) -> None:
    """Equal, or different from a place on where the reference all but tied."""
    for position, (token, other) in enumerate(zip(ids, wanted, strict=False)):
        if token != other:
            assert gaps[position] < NEAR_TIE, f"{token} instead of {other} at {position}"
            return
    assert len(ids) == len(wanted)


@pytest.fixture(scope="module")
def references(engine: Engine, folder: Path) -> list[tuple[list[int], list[float]]]:
    return [reference_greedy(folder, engine.tokenizer.encode(prompt)) for prompt in PROMPTS]


@pytest.mark.parametrize("k", DRAFT_LENGTHS)
def test_greedy_equals_transformers_generate(
    engine: Engine, references: list[tuple[list[int], list[float]]], k: int
) -> None:
    def run(prompt: str) -> list[int]:
        completion = engine.generate(prompt, temperature=0.0, max_tokens=NUM_TOKENS, num_draft_tokens=k)
        return list(completion.token_ids)

    alone = [run(prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        together = list(threads.map(run, PROMPTS))
    assert alone == together
    for ids, (wanted, gaps) in zip(alone, references, strict=True):
        assert_same(ids, wanted, gaps)


def test_the_comparison_with_the_reference_can_fail() -> None:
    assert_same([1, 2, 3], [1, 2, 3], [1.0] * 3)
    assert_same([1, 9, 9], [1, 2, 3], [1.0, 0.001, 1.0])
    for ids in ([1, 9, 3], [1, 2], [1, 2, 3, 4]):
        with pytest.raises(AssertionError):
            assert_same(ids, [1, 2, 3], [1.0] * 3)


def test_sampled_text_is_the_same_for_every_draft_length_alone_and_among_others(engine: Engine) -> None:
    def run(prompt: str, k: int, seed: int = 11) -> str:
        return engine.generate(
            prompt, temperature=0.8, seed=seed, max_tokens=24, num_draft_tokens=k, ignore_eos=True
        ).text

    wanted = [run(prompt, 0) for prompt in PROMPTS]
    for k in DRAFT_LENGTHS:
        assert [run(prompt, k) for prompt in PROMPTS] == wanted
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            assert list(threads.map(lambda prompt, k=k: run(prompt, k), PROMPTS)) == wanted
    assert [run(prompt, 4, seed=12) for prompt in PROMPTS] != wanted, "a seed matters"


def test_speculation_speculates(engine: Engine) -> None:
    completion = engine.generate(
        PROMPTS[0], temperature=0.8, seed=3, max_tokens=100, num_draft_tokens=3, ignore_eos=True
    )
    assert completion.stats.num_draft_tokens > 100
    assert 0 < completion.stats.num_accepted_tokens < completion.stats.num_draft_tokens
    assert len(completion.token_ids) == completion.stats.num_steps + completion.stats.num_accepted_tokens == 100
    assert set(completion.origins) == set(TokenOrigin)
    assert completion.origins.count(TokenOrigin.ACCEPTED) == completion.stats.num_accepted_tokens


def test_speculation_can_be_turned_off(engine: Engine) -> None:
    plain = engine.generate(PROMPTS[0], temperature=0.0, max_tokens=20, speculative=False)
    assert plain.stats == SpeculativeStats(num_steps=len(plain.token_ids))
    assert set(plain.origins) == {TokenOrigin.PLAIN}
    assert plain.text == engine.generate(PROMPTS[0], temperature=0.0, max_tokens=20).text


def test_a_prompt_seen_before_is_not_computed_again_and_the_text_is_the_same(engine: Engine) -> None:
    options = {"temperature": 0.8, "seed": 21, "max_tokens": 70, "ignore_eos": True}
    prompt = "A prefix nobody else here begins with. " * 5  # 195 tokens
    first, second = (engine.generate(prompt, **options) for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 192)
    salted = [engine.generate(prompt, **options, cache_salt=salt) for salt in ("a", "b", "a")]
    assert [completion.num_cached_tokens for completion in salted] == [0, 0, 192]
    assert {completion.token_ids for completion in (first, second, *salted)} == {first.token_ids}
    # The next turn of a conversation finds what was generated in this one: 195 + 69 tokens are held.
    ids = [*engine.tokenizer.encode(prompt), *first.token_ids, 65, 66]
    assert engine.generate(ids, **options).num_cached_tokens == 256


def test_the_prefix_cache_can_be_switched_off(config: EngineConfig, engine: Engine) -> None:
    off = {"target_worker": WORKER.model_copy(update={"prefix_cache": False})}
    with Engine(config.model_copy(update=off)) as without:
        completions = [without.generate("y" * 130, max_tokens=4, seed=1) for _ in range(2)]
    assert [completion.num_cached_tokens for completion in completions] == [0, 0]
    assert {completion.text for completion in completions} == {engine.generate("y" * 130, max_tokens=4, seed=1).text}


def test_a_stream_joins_to_the_generation(engine: Engine) -> None:
    options = {"temperature": 0.8, "seed": 5, "max_tokens": 30, "ignore_eos": True}
    whole = engine.generate(PROMPTS[3], **options)
    chunks = list(engine.stream(PROMPTS[3], **options))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == whole.finish_reason == FinishReason.LENGTH
    # Steps and drafts are this run's own: whether a first draft is ready in time is chance.
    assert [chunk.stats.num_steps for chunk in chunks] == list(range(1, len(chunks) + 1))
    assert len(whole.token_ids) <= whole.stats.num_steps + whole.stats.num_accepted_tokens
    assert whole.text == engine.tokenizer.decode(list(whole.token_ids))


def test_the_end_token_ends_a_generation(engine: Engine) -> None:
    options = {"temperature": 2.0, "max_tokens": 100}
    endless = (engine.generate("a", seed=seed, ignore_eos=True, **options) for seed in range(100))
    going_on = next(completion for completion in endless if EOS_TOKEN_ID in completion.token_ids[:-1])
    ended = engine.generate("a", seed=going_on.seed, **options)
    assert ended.token_ids == going_on.token_ids[: going_on.token_ids.index(EOS_TOKEN_ID) + 1]
    assert (ended.finish_reason, going_on.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)
    assert len(going_on.token_ids) == 100


def test_a_stop_string_ends_a_generation(engine: Engine) -> None:
    options = {"temperature": 0.8, "seed": 9, "max_tokens": 40, "ignore_eos": True}
    whole = engine.generate("abc", **options).text
    stop = whole[20:22]
    completion = engine.generate("abc", stop=[stop], **options)
    assert completion.text == whole[: whole.index(stop)]
    assert completion.finish_reason == FinishReason.STOP


def test_a_seed_is_chosen_and_told(engine: Engine) -> None:
    first = engine.generate("abc", max_tokens=30)
    again = engine.generate("abc", max_tokens=30, seed=first.seed)
    assert again.token_ids == first.token_ids
    assert engine.generate("abc", max_tokens=30).seed != first.seed


def test_text_tokens_and_chat_prompts(engine: Engine) -> None:
    options = {"temperature": 0.0, "max_tokens": 10}
    by_text, by_ids = (engine.generate(prompt, **options) for prompt in ("hello", engine.tokenizer.encode("hello")))
    assert by_text.token_ids == by_ids.token_ids
    assert engine.request("hello").prompt_token_ids == tuple(engine.tokenizer.encode("hello"))
    assert engine.request([1, 2]).prompt_token_ids == (1, 2)
    chat = engine.tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert engine.request("hello", chat=True).prompt_token_ids == tuple(chat) != tuple(engine.tokenizer.encode("hello"))


@pytest.mark.parametrize(
    ("prompt", "options", "param"),
    [
        ("", {}, "prompt"),
        ("a", {"max_tokens": 0}, "max_tokens"),
        ("a", {"temperature": -1.0}, "temperature"),
        ("a", {"top_p": 0.0}, "top_p"),
        ("a", {"top_k": -1}, "top_k"),
        ("a", {"seed": -1}, "seed"),
        ("a", {"min_p": 2.0}, "min_p"),
        ("a", {"presence_penalty": 3.0}, "presence_penalty"),
        ("a", {"frequency_penalty": -3.0}, "frequency_penalty"),
        ("a", {"repetition_penalty": 0.0}, "repetition_penalty"),
        ("a", {"logit_bias": {1: 101.0}}, "logit_bias"),
        ("a", {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ("a", {"bad_words": [""]}, "bad_words"),
        ("a", {"logprobs": 21}, "logprobs"),
        ("a", {"stop": [""]}, "stop"),
        ("a", {"num_draft_tokens": -1}, "speculative.num_draft_tokens"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(engine: Engine, prompt: str, options: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.generate(prompt, **options)
    assert caught.value.param == param


def test_what_does_not_fit_the_context_is_refused_with_the_limit(engine: Engine) -> None:
    with pytest.raises(ContextLengthError, match="512"):
        engine.generate("a", max_tokens=512)
    with pytest.raises(ContextLengthError, match="600"):
        engine.generate("a" * 600, max_tokens=1)
    assert len(engine.generate("a" * 500, max_tokens=12, ignore_eos=True).token_ids) == 12


def test_a_token_that_does_not_exist_is_refused_and_hurts_nobody(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="99999"):
        engine.generate([1, 99999], max_tokens=3)
    with pytest.raises(WorkerError, match="99999"):
        engine.generate("a", max_tokens=3, logit_bias={99999: 1.0})
    engine.generate("a", max_tokens=3)
