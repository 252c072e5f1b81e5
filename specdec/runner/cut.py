"""A draft cut from a target: some of its layers, with its embedding and head."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from specdec.errors import ConfigError, UnsupportedModelError


def cut_layers(model: PreTrainedModel, layers: list[int]) -> None:
    """Keep only some decoder layers of a model, in place, in ascending order.

    Raises:
        ConfigError: an index is not in the model, or given twice.
        UnsupportedModelError: the model has no list of layers.
    """
    config = model.config.get_text_config()
    total: int = config.num_hidden_layers
    wrong = [layer for layer in layers if not 0 <= layer < total]
    if wrong:
        raise ConfigError(f"draft.cut_layers: {wrong} not in the target, whose layers are 0 to {total - 1}")
    if len(set(layers)) != len(layers):
        raise ConfigError(f"draft.cut_layers: {layers} names a layer twice")
    kept = sorted(layers)
    owner, name = _layer_list(model, total)
    old = getattr(owner, name)
    setattr(owner, name, nn.ModuleList([old[index] for index in kept]))
    for index, layer in enumerate(getattr(owner, name)):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in kept]


def _layer_list(model: nn.Module, num_layers: int) -> tuple[nn.Module, str]:
    """The module that owns a model's list of decoder layers, and the list's attribute name."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == num_layers:
                return module, name
    raise UnsupportedModelError("draft.cut_layers: the target has no list of decoder layers to cut from")
