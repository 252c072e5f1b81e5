"""Serve drops settings it does not know in silence; so every key of our configs is compared with its schema."""

from __future__ import annotations

import copy
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from deployments.orchestrator import DRAFT_NAME, ORCHESTRATOR_NAME, TARGET_NAME
from specdec.config import EngineConfig

ROOT = Path(__file__).parents[2]
CONFIGS = ["serve_config.yaml", "serve_config.gpu.yaml"]

# Fields whose schema is a plain dict, and the model that Serve makes of them later.
MODELS_OF_DICTS = {"autoscaling_config": AutoscalingConfig}
FREE_FORM = {"args", "policy_kwargs", "runtime_env", "user_config", "ray_actor_options"}


def unknown_keys(settings: object, model: type[BaseModel], path: str = "") -> list[str]:
    """Paths of the keys in ``settings`` that ``model``, or a model within it, has no field for."""
    if not isinstance(settings, dict):
        return []
    unknown = []
    for key, value in settings.items():
        here = f"{path}{key}"
        field = model.model_fields.get(key)
        if field is None:
            unknown.append(here)
            continue
        inner = MODELS_OF_DICTS.get(key) or model_within(field.annotation)
        if inner is None or key in FREE_FORM:
            continue
        for index, item in enumerate(value if isinstance(value, list) else [value]):
            unknown += unknown_keys(item, inner, f"{here}[{index}]." if isinstance(value, list) else f"{here}.")
    return unknown


def model_within(annotation: object) -> type[BaseModel] | None:
    """The pydantic model in an annotation such as ``list[Model] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := model_within(part))), None)


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


def test_policies_take_their_arguments(document: dict[str, Any]) -> None:
    import importlib

    for entry in document["applications"][0]["deployments"]:
        if policy := entry["autoscaling_config"].get("policy"):
            module, name = policy["policy_function"].split(":")
            getattr(importlib.import_module(module), name)(**policy["policy_kwargs"])


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
