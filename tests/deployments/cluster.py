"""A small Ray cluster with the application on it, for tests that need the real thing."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import ray
from ray import serve
from ray.util import list_named_actors

from deployments.builder import build_app
from specdec.config import EngineConfig

APP_NAME = "specdec-test"
DEADLINE_S = 180.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def ray_cluster(port: int) -> Iterator[None]:
    """Ray and Serve's HTTP proxy on loopback, shut down at the end."""
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
        configure_logging=False,
    )
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


class RunningApp:
    """The application under test.

    Attributes:
        url: of its HTTP ingress.
    """

    def __init__(self, config: EngineConfig, port: int, num_targets: int = 1) -> None:
        self.config = config
        self.url = f"http://127.0.0.1:{port}"
        app = build_app(config)
        serve.run(app, name=APP_NAME, route_prefix="/")
        self.client = httpx.Client(base_url=self.url, timeout=DEADLINE_S)
        wait_until(lambda: self.client.get("/ready").status_code == 200)

    def close(self) -> None:
        self.client.close()
        serve.delete(APP_NAME)

    def complete(self, **body: Any) -> dict[str, Any]:
        """POST /v1/completions, which must succeed."""
        response = self.client.post("/v1/completions", json={"model": self.config.served_model_name, **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


def replica_names(deployment: str) -> list[str]:
    """Names of the live replica actors of a deployment."""
    prefix = f"SERVE_REPLICA::{APP_NAME}#{deployment}#"
    return [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["name"].startswith(prefix)]


def kill_replica(deployment: str) -> str:
    """Kill one replica of a deployment, as a crash would; its name."""
    name = replica_names(deployment)[0]
    ray.kill(ray.get_actor(name, namespace="serve"))
    return name


def wait_until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Poll until the condition holds; fail at the deadline."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            if condition():
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError("the condition did not come true in time")
