"""What is wrong with a Serve config, as far as it can be told before serving.

Serve drops settings it does not know in silence, and reports a deployment or a policy that does not fit only when
replicas fail to come up.
"""

from __future__ import annotations

import importlib
import typing
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from deployments.names import DRAFT_NAME, ORCHESTRATOR_NAME, TARGET_NAME
from specdec.config import EngineConfig, describe_validation_error
from specdec.errors import ConfigError

# Fields whose schema is a plain dict, and the model that Serve makes of them later.
_MODELS_OF_DICTS: dict[str, type[BaseModel]] = {"autoscaling_config": AutoscalingConfig}
_FREE_FORM = {"args", "policy_kwargs", "runtime_env", "user_config", "ray_actor_options"}


def require_sound_serve_config(document: dict[str, Any], config: EngineConfig) -> None:
    """
    Args:
        document: a whole Serve config with one application.
        config: the application's ``args``.

    Raises:
        ConfigError: a setting is unknown or wrong, a deployment is not one of the application's, or an autoscaling
            policy does not take its arguments. Lists all faults.
    """
    faults = [f"{path}: unknown setting; check its spelling" for path in unknown_keys(document, ServeDeploySchema)]
    try:
        ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        faults.append(describe_validation_error(error))
    except (ImportError, AttributeError, ValueError) as error:  # the schema imports what the config names
        faults.append(str(error))
    if not faults:
        faults = _deployment_faults(document["applications"][0].get("deployments") or [], config)
    if faults:
        raise ConfigError("\n".join(faults))


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
        inner = _MODELS_OF_DICTS.get(key) or _model_within(field.annotation)
        if inner is None or key in _FREE_FORM:
            continue
        for index, item in enumerate(value if isinstance(value, list) else [value]):
            unknown += unknown_keys(item, inner, f"{here}[{index}]." if isinstance(value, list) else f"{here}.")
    return unknown


def _model_within(annotation: object) -> type[BaseModel] | None:
    """The pydantic model in an annotation such as ``list[Model] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := _model_within(part))), None)


def _deployment_faults(entries: list[dict[str, Any]], config: EngineConfig) -> list[str]:
    faults = []
    names = {ORCHESTRATOR_NAME, TARGET_NAME}
    if config.draft is not None and config.speculation.enabled:
        names.add(DRAFT_NAME)
    for index, entry in enumerate(entries):
        here = f"applications[0].deployments[{index}]"
        if entry["name"] not in names:
            hint = " without a draft" if entry["name"] == DRAFT_NAME else ""
            faults.append(f"{here}.name: {entry['name']!r} is not a deployment of this application{hint}; remove it")
        scaling = entry.get("autoscaling_config")
        if isinstance(scaling, dict) and scaling.get("policy"):
            faults += _policy_faults(scaling["policy"], f"{here}.autoscaling_config.policy")
    return faults


def _policy_faults(policy: dict[str, Any], path: str) -> list[str]:
    """Make the policy, as Serve's controller will: there, a fault repeats for ever in the log."""
    module, _, name = str(policy.get("policy_function", "")).partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        if isinstance(function, type):
            function(**policy.get("policy_kwargs", {}))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return [f"{path}: {error}"]
    return []
