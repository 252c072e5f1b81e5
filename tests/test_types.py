from __future__ import annotations

import dataclasses
import math
import pickle

import pytest

from specdec.errors import InvalidRequestError
from specdec.types import (
    MAX_SEED,
    GenerationChunk,
    GenerationRequest,
    ProposeItem,
    SamplingParams,
    SpeculativeParams,
    SpeculativeStats,
    TokenLogprobs,
    TokenOrigin,
    VerifyItem,
    VerifyResult,
)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.0},
        {"temperature": 1e-6},
        {"temperature": 100.0},
        {"top_k": 0},
        {"top_k": 10**9},
        {"top_p": 1.0},
        {"top_p": 1e-9},
        {"seed": 0},
        {"seed": MAX_SEED},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1e-6},
        {"logit_bias": ((3, -100.0), (4, 100.0))},
        {"min_tokens": 0},
        {"bad_words": ((1,), (2, 3))},
        {"logprobs": 0},
        {"logprobs": 20},
    ],
    ids=str,
)
def test_sampling_values_at_the_edges_are_taken(values: dict[str, float]) -> None:
    params = SamplingParams(**values)
    for name, value in values.items():
        assert getattr(params, name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.001),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", -0.5),
        ("top_p", 1.0001),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("min_p", -0.1),
        ("min_p", math.nan),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -math.inf),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", math.nan),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_sampling_values_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_an_empty_bad_word_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="bad word") as caught:
        SamplingParams(bad_words=((1,), ()))
    assert caught.value.param == "bad_words"


@pytest.mark.parametrize(
    "values",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((1, 0.5),)},
        {"min_tokens": 1},
        {"bad_words": ((1,),)},
    ],
    ids=str,
)
def test_parameters_that_need_the_tokens_before_say_so(values: dict[str, float]) -> None:
    assert SamplingParams(**values).edits_logits
    assert not SamplingParams(0.5, 3, 0.9, 1, min_p=0.1, logprobs=3).edits_logits


def test_all_token_ids_in_the_parameters_are_named() -> None:
    params = SamplingParams(logit_bias=((1, 1.0),), min_tokens=1, end_token_ids=(2,), bad_words=((3, 4), (5,)))
    assert params.named_token_ids == {1, 2, 3, 4, 5}


def test_a_negative_draft_length_is_named() -> None:
    assert SpeculativeParams(num_draft_tokens=0).num_draft_tokens == 0
    with pytest.raises(InvalidRequestError) as caught:
        SpeculativeParams(num_draft_tokens=-1)
    assert caught.value.param == "speculative.num_draft_tokens"


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"prompt_token_ids": ()}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"stop": ("end", "")}, "stop"),
        ({"sampling": SamplingParams(min_tokens=2)}, "min_tokens"),
    ],
)
def test_a_request_that_cannot_be_served_names_the_field(values: dict[str, object], param: str) -> None:
    good = {"request_id": "r", "prompt_token_ids": (1,), "max_tokens": 1, "stop": ("end",)}
    GenerationRequest(**good)
    with pytest.raises(InvalidRequestError) as caught:
        GenerationRequest(**good | values)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("steps", "drafted", "accepted", "length"),
    [(0, 0, 0, 0.0), (1, 0, 0, 1.0), (4, 16, 0, 1.0), (4, 16, 16, 5.0), (3, 9, 4, 1 + 4 / 3)],
)
def test_acceptance_length(steps: int, drafted: int, accepted: int, length: float) -> None:
    assert SpeculativeStats(steps, drafted, accepted).acceptance_length == pytest.approx(length)


def test_what_crosses_the_wire_pickles_to_its_equal() -> None:
    messages = [
        VerifyItem("s", 3, [4, 5], [6], SamplingParams(seed=MAX_SEED), "salt"),
        VerifyResult("s", [6, 7], 1),
        VerifyResult("s", need_from=0),
        VerifyResult("s", [6], 0, logprobs=[TokenLogprobs(-1.0, ((6, -1.0),))]),
        VerifyItem("s", 0, [1], [], SamplingParams(logit_bias=((1, 2.0),), bad_words=((1, 2),), logprobs=3), 1),
        ProposeItem("s", 0, [1], 4, SamplingParams()),
        GenerationChunk("x", (1,), (TokenOrigin.BONUS,)),
    ]
    for message in messages:
        assert pickle.loads(pickle.dumps(message)) == message


@pytest.mark.parametrize("kind", [SamplingParams, SpeculativeParams, GenerationRequest, GenerationChunk])
def test_what_is_shared_between_tasks_cannot_be_changed(kind: type) -> None:
    values = {"request_id": "r", "prompt_token_ids": (1,), "max_tokens": 1, "text": "", "token_ids": (), "origins": ()}
    names = {field.name for field in dataclasses.fields(kind)}
    shared = kind(**{name: value for name, value in values.items() if name in names})
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(shared, min(names), None)
