"""Sampling parameters and log-probabilities through the whole system, against transformers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from specdec import Engine
from specdec.config import DraftSettings, EngineConfig, ModelSettings, WorkerSettings
from specdec.engine import Completion
from specdec.runner.load import load_reference
from specdec.types import FinishReason, GenerationRequest
from tests import oracles
from tests.models import EOS_TOKEN_ID, TOKENIZER_VOCAB_SIZE, make_tiny_llama

NUM_TOKENS = 24
PROMPTS = ["The quick brown fox", "a", "x" * 70]
WORKER = WorkerSettings(kv_cache_bytes=4 << 20)
LETTERS = range(64, 90)  # the tiny tokenizer's ids of "a" to "z"

PARAMETERS: dict[str, dict[str, object]] = {
    "min_p": {"min_p": 0.2},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 1.2},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "logit_bias": {"logit_bias": dict.fromkeys(LETTERS, 8.0)},
    "min_tokens": {"min_tokens": NUM_TOKENS - 4, "stop_token_ids": list(range(0, 256, 3))},
    "bad_words": {"bad_words": [*map(chr, range(97, 110)), "zz"], "logit_bias": dict.fromkeys(LETTERS, 8.0)},
    "everything": {
        "min_p": 0.01,
        "top_k": 200,
        "top_p": 0.98,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {97: 5.0},
        "min_tokens": 10,
        "bad_words": ["a b", "e"],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"), seed=2)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    config = EngineConfig(
        target=ModelSettings(source=str(folder), device="cpu"),
        draft=DraftSettings(cut_layers=[0], device="cpu"),
        target_worker=WORKER,
        draft_worker=WORKER,
    )
    with Engine(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load_reference(folder, "float16")


def reference_logits(model: PreTrainedModel, request: GenerationRequest, tokens: tuple[int, ...]) -> torch.Tensor:
    """Logits of one full forward over prompt and answer, at every token of the answer."""
    first = len(request.prompt_token_ids) - 1
    with torch.inference_mode():
        logits = model(torch.tensor([[*request.prompt_token_ids, *tokens]])).logits[0, first:-1, :TOKENIZER_VOCAB_SIZE]
    return logits.double()


def run(engine: Engine, prompt: str, k: int, **options: object) -> Completion:
    return engine.generate(prompt, max_tokens=NUM_TOKENS, num_draft_tokens=k, seed=4, **options)


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_the_naive_formulas_at_every_draft_length(
    engine: Engine, model: PreTrainedModel, name: str, temperature: float
) -> None:
    options = {"temperature": temperature, "ignore_eos": True, **PARAMETERS[name]}
    plain = [run(engine, prompt, 0, **options) for prompt in PROMPTS]
    for k in (1, 4, 8):
        assert [run(engine, prompt, k, **options).token_ids for prompt in PROMPTS] == [each.token_ids for each in plain]
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            together = threads.map(lambda prompt, k=k: run(engine, prompt, k, **options).text, PROMPTS)
            assert list(together) == [each.text for each in plain]
    for prompt, completion in zip(PROMPTS, plain, strict=True):
        request = engine.request(prompt, max_tokens=NUM_TOKENS, seed=4, **options)
        sampling = request.sampling
        before = list(request.prompt_token_ids)
        for row, token in zip(
            reference_logits(model, request, completion.token_ids).tolist(), completion.token_ids, strict=True
        ):
            if len(before) - len(request.prompt_token_ids) < sampling.min_tokens:
                for stop in request.stop_token_ids:
                    row[stop] = float("-inf")
            assert oracles.choose(row, sampling, len(before), before, len(request.prompt_token_ids)) == token
            before.append(token)


def test_the_repetition_penalty_is_transformers_own(engine: Engine, model: PreTrainedModel) -> None:
    """Greedy generation with it, where the processor sees prompt and answer."""
    request = engine.request(PROMPTS[0], max_tokens=NUM_TOKENS)
    prompt = torch.tensor([request.prompt_token_ids])
    expected = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        suppress_tokens=list(range(TOKENIZER_VOCAB_SIZE, model.config.vocab_size)),
        logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)]),
    )[0, prompt.shape[1] :].tolist()
    for k in (0, 4):
        completion = run(engine, PROMPTS[0], k, temperature=0.0, repetition_penalty=1.7)
        assert list(completion.token_ids) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_logprobs_are_those_of_a_rescoring(engine: Engine, model: PreTrainedModel, temperature: float, k: int) -> None:
    """Of the model's own distribution, whatever else is asked for."""
    options = {"temperature": temperature, "ignore_eos": True, "frequency_penalty": 0.5, "top_k": 100, "logprobs": 5}
    for prompt in PROMPTS:
        completion = run(engine, prompt, k, **options)
        request = engine.request(prompt, max_tokens=NUM_TOKENS)
        expected = reference_logits(model, request, completion.token_ids).log_softmax(-1)
        assert len(completion.logprobs) == len(completion.token_ids) == NUM_TOKENS
        for token, row, entry in zip(completion.token_ids, expected, completion.logprobs, strict=True):
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert [value for _, value in entry.top] == pytest.approx(row.topk(5).values.tolist(), abs=1e-4)
            assert [float(row[other]) for other, _ in entry.top] == pytest.approx(
                [value for _, value in entry.top], abs=1e-4
            )
        assert len({entry.logprob for entry in completion.logprobs}) > NUM_TOKENS / 2


def test_logprobs_have_the_same_bits_at_every_draft_length_and_change_no_token(engine: Engine) -> None:
    options = {"temperature": 0.9, "ignore_eos": True}
    without = run(engine, PROMPTS[0], 4, **options)
    told = [run(engine, PROMPTS[0], k, logprobs=3, **options) for k in (0, 1, 4, 8)]
    assert {completion.token_ids for completion in told} == {without.token_ids}
    assert without.logprobs == ()
    assert all(completion.logprobs == told[0].logprobs for completion in told)
    chunks = list(engine.stream(PROMPTS[0], max_tokens=NUM_TOKENS, seed=4, logprobs=3, **options))
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
    assert tuple(itertools.chain.from_iterable(chunk.logprobs for chunk in chunks)) == told[0].logprobs


def test_no_end_before_min_tokens_and_an_end_after_them(engine: Engine) -> None:
    # An end token so likely that only min_tokens can hold it back.
    options = {"logit_bias": {EOS_TOKEN_ID: 100.0}, "temperature": 1.0}
    for k in (0, 4, 8):
        for least in (0, 1, 5, NUM_TOKENS):
            completion = run(engine, PROMPTS[0], k, min_tokens=least, **options)
            assert EOS_TOKEN_ID not in completion.token_ids[:least]
            if least < NUM_TOKENS:
                assert completion.token_ids[least:] == (EOS_TOKEN_ID,)
                assert completion.finish_reason == FinishReason.STOP
            else:
                assert completion.finish_reason == FinishReason.LENGTH


def test_a_bias_of_a_hundred_bans_or_selects(engine: Engine) -> None:
    for temperature, k in itertools.product((0.0, 1.0), (0, 4)):
        only = run(engine, "a", k, temperature=temperature, logit_bias={LETTERS[1]: 100.0})
        assert only.text == "b" * NUM_TOKENS
        none = run(engine, "a", k, temperature=temperature, logit_bias=dict.fromkeys(LETTERS, -100.0))
        assert not set(none.token_ids) & set(LETTERS)


def test_bad_words_do_not_come_out(engine: Engine) -> None:
    options = {"temperature": 1.0, "logit_bias": {LETTERS[0]: 50.0, LETTERS[1]: 50.0}, "ignore_eos": True}
    for k in (0, 4):
        assert "ab" in run(engine, "a", k, **options).text
        text = run(engine, "a", k, bad_words=["ab"], **options).text
        assert "ab" not in text
        assert set(text) <= {"a", "b"}
