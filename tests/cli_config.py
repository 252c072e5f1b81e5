from __future__ import annotations

from pathlib import Path

import yaml

KV = {"kv_cache_bytes": 1 << 20}


def write_config(tmp_path: Path, folder: Path, **changes: object) -> Path:
    """A config of the model in ``folder`` and a draft cut from it, with ``changes``."""
    path = tmp_path / "serve_config.yaml"
    settings = {
        "target": {"source": str(folder), "device": "cpu"},
        "draft": {"cut_layers": [0], "device": "cpu"},
        "target_worker": KV,
        "draft_worker": KV,
        "model_name": "tiny",
    }
    path.write_text(yaml.safe_dump(settings | changes))
    return path
