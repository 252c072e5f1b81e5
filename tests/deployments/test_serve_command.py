"""`make serve` as a newcomer runs it: the command, the one request of the README, Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.deployments.cluster import free_port, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def readme_request() -> dict[str, object]:
    """The body of the README's curl."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"curl .*-d '(\{.*?\})'", text, re.DOTALL)
    assert found is not None
    body: dict[str, object] = json.loads(found[1])
    return body


def test_first_run(demo_model_path: Path, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("w+") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "deployments.run", "serve_config.yaml", "--port", str(port)],
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )
        try:
            wait_until(lambda: server.poll() is not None or httpx.get(f"{url}/ready", timeout=30).status_code == 200)
            assert server.poll() is None, (tmp_path / "log").read_text()
            answer = httpx.post(f"{url}/v1/chat/completions", json=readme_request(), timeout=120).json()
            assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert answer["speculative"]["num_draft_tokens"] > 0
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
            (model,) = client.models.list()
            events = client.completions.create(
                model=model.id, prompt="1, 2, 3,", max_tokens=8, temperature=0, stream=True
            )
            assert "".join(event.choices[0].text for event in events).startswith(" 4, 5")
            started = psutil.Process(server.pid).children(recursive=True)
            assert started, "the server runs no processes"
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=120)
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive, f"left running: {alive}"
