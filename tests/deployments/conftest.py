from __future__ import annotations

from collections.abc import Iterator

import pytest

from specdec.config import DraftSettings, EngineConfig, LoopSettings, ModelSettings, RetrySettings, WorkerSettings
from tests.deployments.cluster import RunningApp, free_port, ray_cluster


@pytest.fixture(scope="session")
def cluster_port() -> Iterator[int]:
    """The HTTP port of the one cluster all tests share."""
    port = free_port()
    with ray_cluster(port):
        yield port


@pytest.fixture(scope="module")
def demo_app(cluster_port: int, demo_model_path: object) -> Iterator[RunningApp]:
    """The demo pair, with a draft of two of its layers: poor, so that rejections are the rule, and quick."""
    worker = WorkerSettings(max_model_len=2048, kv_cache_bytes=256 << 20)
    config = EngineConfig(
        target=ModelSettings(source="demo:smollm2-135m-instruct", device="cpu"),
        draft=DraftSettings(cut_layers=[0, 29], device="cpu"),
        target_worker=worker,
        draft_worker=worker,
        loop=LoopSettings(target_retry=RetrySettings(initial_backoff_s=0.1, max_backoff_s=1.0)),
    )
    app = RunningApp(config, cluster_port)
    yield app
    app.close()
