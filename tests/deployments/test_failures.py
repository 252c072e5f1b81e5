"""Whatever breaks: replicas killed while they decode, over HTTP and Ray with the real model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from ray import serve

from specdec.types import WorkerInfo
from tests.deployments.cluster import APP_NAME, RunningApp, kill_replica, replica_names, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

BODY = {
    "prompt": "Once upon a time, in a village by the sea,",
    "max_tokens": 96,
    "temperature": 0.8,
    "seed": 7,
    "ignore_eos": True,
    "speculative": {"num_draft_tokens": 2},
}


def stream(app: RunningApp, **changes: Any) -> Iterator[dict[str, Any]]:
    """The events of a streamed completion."""
    body = {"model": app.config.served_model_name, "stream": True, **BODY, **changes}
    with app.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def text(events: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


def held_sequences(deployment: str) -> int:
    """Sequences that the replica of a deployment holds."""
    handle = serve.get_deployment_handle(deployment, APP_NAME)
    info: WorkerInfo = handle.info.remote().result(timeout_s=30)
    return info.num_sequences


@pytest.fixture(scope="module")
def undisturbed(demo_app: RunningApp) -> str:
    return str(demo_app.complete(**BODY)["choices"][0]["text"])


@pytest.mark.parametrize("deployment", ["Draft", "Target"])
def test_killed_replica_changes_nothing_in_the_text(demo_app: RunningApp, undisturbed: str, deployment: str) -> None:
    events = []
    killed = None
    for event in stream(demo_app):
        events.append(event)
        assert "error" not in event, event
        if len(events) == 8:
            killed = kill_replica(deployment)
    assert killed is not None
    assert text(events) == undisturbed
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    wait_until(lambda: [name for name in replica_names(deployment) if name != killed] != [])


def test_drafting_resumes_after_the_draft_replica_is_back(demo_app: RunningApp, undisturbed: str) -> None:
    kill_replica("Draft")

    def drafted() -> bool:
        answer = demo_app.complete(**BODY)
        assert answer["choices"][0]["text"] == undisturbed
        return bool(answer["speculative"]["num_draft_tokens"] > 0)

    wait_until(drafted)


def test_disconnect_frees_the_sequence_on_both_workers(demo_app: RunningApp) -> None:
    wait_until(lambda: held_sequences("Target") == 0 and held_sequences("Draft") == 0)
    events = stream(demo_app, max_tokens=1500)
    next(events)
    assert held_sequences("Target") == 1
    events.close()  # type: ignore[attr-defined]
    wait_until(lambda: held_sequences("Target") == 0 and held_sequences("Draft") == 0, deadline_s=20)


def test_disconnect_does_not_disturb_others(demo_app: RunningApp, undisturbed: str) -> None:
    # The first request of all starts the loop; what it is cancelled with must not reach the others.
    first = stream(demo_app, max_tokens=1500)
    next(first)
    answers: list[str] = []
    other = threading.Thread(target=lambda: answers.append(demo_app.complete(**BODY)["choices"][0]["text"]))
    other.start()
    next(first)
    first.close()  # type: ignore[attr-defined]
    other.join()
    assert answers == [undisturbed]


def test_killed_orchestrator_comes_back(demo_app: RunningApp, undisturbed: str) -> None:
    def read_until_killed() -> None:
        for index, _ in enumerate(stream(demo_app, max_tokens=1500)):
            if index == 3:
                kill_replica("Orchestrator")

    with pytest.raises(httpx.HTTPError):
        read_until_killed()
    wait_until(lambda: demo_app.client.get("/ready").status_code == 200)
    assert demo_app.complete(**BODY)["choices"][0]["text"] == undisturbed
    # Nobody told the workers that its sequences are gone; they find out by themselves, later.
