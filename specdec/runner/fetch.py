"""``python -m specdec.runner.fetch SOURCE``: bring a model to this machine before anything serves it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from specdec.errors import ConfigError
from specdec.runner.sources import resolve_source

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Resolve a source and log its folder; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m specdec.runner.fetch", description="Fetch and convert a model.")
    parser.add_argument("source", help="a Hub id, a folder, a .gguf file or 'demo:...'")
    source = parser.parse_args(arguments).source
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        logger.info("%s is in %s", source, resolve_source(source, setting="source"))
    except ConfigError as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
