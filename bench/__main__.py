"""`make bench`: prints figures as they come; the last line is all of them as JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench import acceptance, decode, forward, gap
from specdec.config import load_engine_config


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "what", nargs="*", choices=["forward", "decode", "gap", "acceptance"], default=["forward", "decode"]
    )
    parser.add_argument("--config", type=Path, default=Path("serve_config.yaml"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--out", type=Path, help="folder for plots (needs the extra 'bench')")
    options = parser.parse_args()
    config = load_engine_config(options.config)
    figures: dict[str, dict[str, float]] = {}
    if "forward" in options.what:
        figures["forward"] = forward.run(config.target.source, options.repeats)
    if "decode" in options.what:
        repeats = max(1, options.repeats // 5)
        figures["decode"] = decode.run(config, options.num_draft_tokens, options.temperature, repeats)
    if "gap" in options.what:
        figures["gap"] = gap.run(config)
    if "acceptance" in options.what:
        figures["acceptance"] = acceptance.run(config, options.out)
    for name, group in figures.items():
        for key, value in group.items():
            print(f"{name:8s} {key:42s} {value:10.3f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
