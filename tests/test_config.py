from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from specdec.config import (
    DEMO_TARGET,
    DraftSettings,
    EngineConfig,
    ModelSettings,
    describe_validation_error,
    load_engine_config,
)
from specdec.errors import ConfigError


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def settings_models(model: type[BaseModel] = EngineConfig) -> set[type[BaseModel]]:
    """All models of the config, found by their fields."""
    found = {model}
    for field in model.model_fields.values():
        for part in [field.annotation, *getattr(field.annotation, "__args__", ())]:
            if isinstance(part, type) and issubclass(part, BaseModel):
                found |= settings_models(part)
    return found


def test_the_default_is_the_demo_pair() -> None:
    config = EngineConfig()
    assert config.target.source == DEMO_TARGET
    assert config.draft is not None
    assert config.draft.source is None
    assert config.draft.cut_layers
    assert config.draft_model == ModelSettings(source=DEMO_TARGET)
    assert config.served_model_name == DEMO_TARGET.removeprefix("demo:")
    assert config.speculation.enabled


@pytest.mark.parametrize("model", settings_models(), ids=lambda model: model.__name__)
def test_no_settings_take_unknown_keys(model: type[BaseModel]) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate({"no_such_setting": 1})
    assert "extra_forbidden" in {fault["type"] for fault in caught.value.errors()}


def test_all_settings_were_found() -> None:
    assert len(settings_models()) == 8


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        EngineConfig().speculation.num_draft_tokens = 5


@pytest.mark.parametrize(
    ("document", "setting"),
    [
        ({"target": {"source": ""}}, "target.source"),
        ({"target": {}}, "target.source"),
        ({"target": {"source": "x", "dtype": "int8"}}, "target.dtype"),
        ({"target": {"source": "x", "device": "tpu"}}, "target.device"),
        ({"target": {"source": "x", "device": "cuda:"}}, "target.device"),
        ({"target": {"source": "x", "device": "cuda:one"}}, "target.device"),
        ({"draft": {}}, "draft"),
        ({"draft": {"source": "x", "cut_layers": [0]}}, "draft"),
        ({"draft": {"cut_layers": []}}, "draft.cut_layers"),
        ({"draft": {"cut_layers": ["first"]}}, "draft.cut_layers.0"),
        ({"target_worker": {"kv_cache_bytes": 0}}, "target_worker.kv_cache_bytes"),
        ({"target_worker": {"max_model_len": 1}}, "target_worker.max_model_len"),
        ({"draft_worker": {"max_tokens_per_step": 0}}, "draft_worker.max_tokens_per_step"),
        ({"draft_worker": {"idle_sequence_timeout_s": 0}}, "draft_worker.idle_sequence_timeout_s"),
        ({"speculation": {"num_draft_tokens": -1}}, "speculation.num_draft_tokens"),
        ({"speculation": {"num_draft_tokens": 17}}, "speculation"),
        ({"loop": {"request_timeout_s": 0}}, "loop.request_timeout_s"),
        ({"loop": {"max_num_sequences": 0}}, "loop.max_num_sequences"),
        ({"loop": {"max_queued_requests": -1}}, "loop.max_queued_requests"),
        ({"loop": {"target_retry": {"initial_backoff_s": -1}}}, "loop.target_retry.initial_backoff_s"),
        ({"api": {"max_body_bytes": 10}}, "api.max_body_bytes"),
        ({"model_name": ""}, "model_name"),
        ({"modelname": "x"}, "modelname"),
        ({"loop": {"request_timeout": 5}}, "loop.request_timeout"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_named_by_its_path(tmp_path: Path, document: dict[str, object], setting: str) -> None:
    path = write(tmp_path, yaml.safe_dump(document))
    with pytest.raises(ConfigError) as caught:
        load_engine_config(path)
    assert str(path) in str(caught.value)
    assert re.search(rf"^{re.escape(setting)}: \S", str(caught.value), re.MULTILINE), str(caught.value)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:11"])
def test_devices(device: str) -> None:
    assert ModelSettings(source="x", device=device).device == device
    assert DraftSettings(source="x", device=device).device == device


def test_a_device_of_the_draft_is_checked_like_the_targets(tmp_path: Path) -> None:
    path = write(tmp_path, "draft: {cut_layers: [0], device: gpu}")
    with pytest.raises(ConfigError, match=r"draft.*device"):
        load_engine_config(path)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        EngineConfig.model_validate({"loop": {"x": 1, "max_num_sequences": 0}, "y": 2})
    lines = describe_validation_error(caught.value).splitlines()
    assert sorted(line.split(":")[0] for line in lines) == ["loop.max_num_sequences", "loop.x", "y"]
    assert "unknown setting" in next(line for line in lines if line.startswith("loop.x"))


def test_the_draft_of_its_own_source_and_the_draft_cut_from_the_target() -> None:
    target = ModelSettings(source="org/large", revision="v2")
    own = EngineConfig(target=target, draft=DraftSettings(source="org/small", dtype="float32", device="cpu"))
    assert own.draft_model == ModelSettings(source="org/small", dtype="float32", device="cpu")
    cut = EngineConfig(target=target, draft=DraftSettings(cut_layers=[0]))
    assert cut.draft_model == ModelSettings(source="org/large", revision="v2")
    assert EngineConfig(target=target, draft=None).draft_model is None


def test_the_name_in_the_api() -> None:
    target = ModelSettings(source="org/large")
    assert EngineConfig(target=target).served_model_name == "org/large"
    assert EngineConfig(target=target, model_name="mine").served_model_name == "mine"


def test_a_file_of_settings_and_a_serve_config_with_them_are_the_same(tmp_path: Path) -> None:
    settings = {"target": {"source": "org/large"}, "draft": None, "speculation": {"num_draft_tokens": 2}}
    alone = load_engine_config(write(tmp_path, yaml.safe_dump(settings)))
    serve = {"http_options": {"port": 1}, "applications": [{"name": "specdec", "args": settings}, {"name": "other"}]}
    assert load_engine_config(write(tmp_path, yaml.safe_dump(serve))) == alone
    assert alone.draft is None
    assert alone.speculation.num_draft_tokens == 2


def test_a_serve_config_without_args_is_the_default(tmp_path: Path) -> None:
    assert load_engine_config(write(tmp_path, "applications: [{name: specdec}]")) == EngineConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "mapping", id="empty"),
        pytest.param("- a\n- b", "mapping", id="a list"),
        pytest.param("just words", "mapping", id="words"),
        pytest.param("a: [1", "YAML", id="no YAML"),
        pytest.param("a: b: c", "YAML", id="no YAML either"),
        pytest.param(b"target: \xff\x80", "YAML", id="no text"),
        pytest.param("applications: []", "applications", id="no application"),
        pytest.param("applications: [3]", "applications", id="applications that are none"),
        pytest.param("applications: {args: {}}", "applications", id="applications that are no list"),
        pytest.param("applications:", "applications", id="applications left empty"),
        pytest.param("applications: [{args: [1]}]", "wrong settings", id="args that are no mapping"),
    ],
)
def test_a_file_that_holds_no_settings(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_engine_config(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*No such file"):
        load_engine_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="directory"):
        load_engine_config(tmp_path)


def test_yaml_is_read_as_data_not_as_code(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="YAML"):
        load_engine_config(write(tmp_path, "target: !!python/object/apply:os.getcwd []"))
