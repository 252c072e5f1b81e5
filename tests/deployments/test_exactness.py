"""What is promised, over HTTP and Ray with the real model: exactly the target's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from specdec.runner.load import load_reference, load_tokenizer
from tests.deployments.cluster import RunningApp

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MAX_TOKENS = 64
NUM_DRAFT_TOKENS = (0, 1, 4, 8)

# Where the reference's two best logits are closer than this, another order of summation may choose the other one.
TIE = 0.005

RecordProperty = Callable[[str, object], None]

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "1, 2, 3, 5, 8, 13,",
    "Q: Why is the sky blue?\nA:",
    "Translate to German: 'Good morning, my friends.' ->",
    "<|im_start|>user\nName three primary colours.<|im_end|>\n<|im_start|>assistant\n",
    "日本の首都は",
]


@pytest.fixture(scope="module")
def reference(demo_model_path: Path) -> Iterator[PreTrainedModel]:
    """The rounded model, run by transformers itself."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield load_reference(demo_model_path, "float16")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def expected(reference: PreTrainedModel, demo_app: RunningApp) -> dict[str, tuple[list[int], list[float]]]:
    """What `generate` gives for each prompt, and by how much it preferred each token."""
    tokenizer = load_tokenizer(demo_app.config.target)
    answers = {}
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        output = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        gaps = [float(top[0] - top[1]) for top in (logits[0].topk(2).values for logits in output.logits)]
        answers[prompt] = (output.sequences[0, ids.shape[1] :].tolist(), gaps)
    return answers


def complete(app: RunningApp, prompt: str, k: int, **params: object) -> list[int]:
    """The tokens of an answer drafted with k tokens a step."""
    answer = app.complete(
        prompt=prompt,
        max_tokens=MAX_TOKENS,
        return_token_ids=True,
        speculative={"num_draft_tokens": k},
        **params,
    )
    assert (answer["speculative"]["num_draft_tokens"] > 0) == (k > 0), "the wish for k was not followed"
    tokens: list[int] = answer["choices"][0]["token_ids"]
    assert answer["usage"]["completion_tokens"] == len(tokens)
    return tokens


def near_tie(got: list[int], wanted: list[int], gaps: list[float]) -> str | None:
    """None if the tokens are equal; where they first differ, if the reference was undecided there.

    Raises:
        AssertionError: they differ, and it was not.
    """
    if got == wanted:
        return None
    position = next(i for i, (ours, theirs) in enumerate(zip(got, wanted, strict=False)) if ours != theirs)
    assert gaps[position] < TIE, f"token {position} is {got[position]}, not {wanted[position]}; gap {gaps[position]}"
    return f"token {position}, gap {gaps[position]:.5f}"


@pytest.mark.parametrize("k", NUM_DRAFT_TOKENS)
def test_greedy_equals_generate(
    demo_app: RunningApp,
    expected: dict[str, tuple[list[int], list[float]]],
    k: int,
    record_property: RecordProperty,
) -> None:
    near_ties = {}
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda prompt: complete(demo_app, prompt, k, temperature=0), PROMPTS))
    for prompt, tokens in zip(PROMPTS, together, strict=True):
        assert complete(demo_app, prompt, k, temperature=0) == tokens, "alone and among others differ"
        wanted, gaps = expected[prompt]
        if (tie := near_tie(tokens, wanted, gaps)) is not None:
            near_ties[prompt] = tie
    record_property("near_ties", near_ties)


def test_the_comparison_can_fail(expected: dict[str, tuple[list[int], list[float]]]) -> None:
    wanted, gaps = expected[PROMPTS[0]]
    sure = next(position for position, gap in enumerate(gaps) if gap > 10 * TIE)
    wrong = [*wanted[:sure], wanted[sure] + 1, *wanted[sure + 1 :]]
    with pytest.raises(AssertionError, match=f"token {sure} "):
        near_tie(wrong, wanted, gaps)


def test_seeded_sampling_is_the_same_for_every_k_and_company(demo_app: RunningApp) -> None:
    params = {"temperature": 0.8, "top_p": 0.95}
    requests = [(prompt, seed) for seed, prompt in enumerate(PROMPTS)]

    def sample(case: tuple[str, int], k: int) -> list[int]:
        return complete(demo_app, case[0], k, seed=case[1], **params)

    plain = [sample(case, 0) for case in requests]
    assert len({tuple(tokens) for tokens in plain}) == len(plain)
    assert sample(requests[0], 0) == plain[0], "two runs differ"
    for k in NUM_DRAFT_TOKENS[1:]:
        assert sample(requests[0], k) == plain[0], f"alone, k={k}"
        with ThreadPoolExecutor(len(requests)) as pool:
            assert list(pool.map(lambda case, k=k: sample(case, k), requests)) == plain, f"among others, k={k}"
    assert sample((PROMPTS[0], 12345), 0) != plain[0], "the seed makes no difference"


def test_random_seed_is_told_and_reproduces(demo_app: RunningApp) -> None:
    body = {"prompt": PROMPTS[2], "max_tokens": 24, "temperature": 1.0}
    first = demo_app.complete(**body)
    again = demo_app.complete(**body, seed=first["seed"])
    other = demo_app.complete(**body)
    assert again["choices"] == first["choices"]
    assert other["seed"] != first["seed"]
