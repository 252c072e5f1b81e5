"""Serve drops settings it does not know in silence; so every key of our configs is compared with its schema."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from deployments.names import DRAFT_NAME, ORCHESTRATOR_NAME, TARGET_NAME
from deployments.serve_schema import require_sound_serve_config, unknown_keys
from specdec.config import EngineConfig
from specdec.errors import ConfigError

ROOT = Path(__file__).parents[2]
CONFIGS = ["serve_config.yaml", "serve_config.gpu.yaml"]


@pytest.fixture(params=CONFIGS)
def document(request: pytest.FixtureRequest) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / request.param).read_text(encoding="utf-8"))
    return loaded


def test_serve_knows_every_key(document: dict[str, Any]) -> None:
    ServeDeploySchema.model_validate(document)
    assert unknown_keys(document, ServeDeploySchema) == []


def test_args_are_ours(document: dict[str, Any]) -> None:
    EngineConfig.model_validate(document["applications"][0]["args"])


def test_every_deployment_is_autoscaled(document: dict[str, Any]) -> None:
    deployments = {entry["name"]: entry for entry in document["applications"][0]["deployments"]}
    assert set(deployments) == {TARGET_NAME, DRAFT_NAME, ORCHESTRATOR_NAME}
    for entry in deployments.values():
        AutoscalingConfig.model_validate(entry["autoscaling_config"])


def test_the_launcher_finds_nothing_wrong(document: dict[str, Any]) -> None:
    require_sound_serve_config(document, EngineConfig.model_validate(document["applications"][0]["args"]))


def change_policy(document: dict[str, Any]) -> None:
    policy = document["applications"][0]["deployments"][1]["autoscaling_config"]["policy"]
    policy["policy_kwargs"] = {"sequences_per_replika": 3}


def change_policy_name(document: dict[str, Any]) -> None:
    policy = document["applications"][0]["deployments"][1]["autoscaling_config"]["policy"]
    policy["policy_function"] = "deployments.autoscaling:NoSuchPolicy"


def drop_draft(document: dict[str, Any]) -> None:
    document["applications"][0]["args"]["draft"] = None


def mistype(document: dict[str, Any]) -> None:
    document["htpp_options"] = {}


def wrong_type(document: dict[str, Any]) -> None:
    document["http_options"]["port"] = "many"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_policy, r"deployments\[1\].autoscaling_config.policy: .*sequences_per_replika"),
        (change_policy_name, "NoSuchPolicy"),
        (drop_draft, "'Draft' is not a deployment of this application without a draft; remove it"),
        (mistype, "htpp_options: unknown setting"),
        (wrong_type, "http_options.port"),
    ],
)
def test_what_serve_would_find_out_late_or_never_is_found_before(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
    change(document)
    with pytest.raises(ConfigError, match=message):
        require_sound_serve_config(document, EngineConfig.model_validate(document["applications"][0]["args"]))


def test_the_demo_fits_two_cores() -> None:
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
    entries = document["applications"][0]["deployments"]
    assert sum(entry["ray_actor_options"]["num_cpus"] for entry in entries) <= 2
    assert document["http_options"]["host"] == "127.0.0.1"


def test_gpus_are_asked_for_where_models_run() -> None:
    document = yaml.safe_load((ROOT / "serve_config.gpu.yaml").read_text(encoding="utf-8"))
    gpus = {e["name"]: e["ray_actor_options"].get("num_gpus", 0) for e in document["applications"][0]["deployments"]}
    assert gpus == {ORCHESTRATOR_NAME: 0, TARGET_NAME: 1, DRAFT_NAME: 1}


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("", "aplications"),
        ("http_options", "prot"),
        ("applications.0", "arg"),
        ("applications.0.deployments.0", "max_ongoing_request"),
        ("applications.0.deployments.0.autoscaling_config", "min_replica"),
        ("applications.0.deployments.1.autoscaling_config.policy", "policy_functon"),
    ],
)
def test_a_mistyped_key_is_found(path: str, wrong: str) -> None:
    document = copy.deepcopy(yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8")))
    place: Any = document
    for part in path.split(".") if path else []:
        place = place[int(part) if part.isdigit() else part]
    place[wrong] = 1
    assert [found.rpartition(".")[2] for found in unknown_keys(document, ServeDeploySchema)] == [wrong]
