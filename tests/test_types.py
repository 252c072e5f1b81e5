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
    ],
)
def test_sampling_values_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


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
