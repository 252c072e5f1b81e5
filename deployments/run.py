"""``make serve``: a Serve config on a Ray of its own, in the foreground, until Ctrl-C.

``serve run`` does the serving. It takes the HTTP address from the config file alone, says nothing when a setting is
wrong until a replica fails, and does not tell when it is ready. So this checks the config and the port, fetches the
models, hands ``serve run`` a copy of the config with the wanted address, and reports when requests can be sent.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import http.client
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from deployments.serve_schema import require_sound_serve_config
from specdec.config import EngineConfig, load_engine_config
from specdec.errors import ConfigError
from specdec.runner.pair import require_sound_pair
from specdec.runner.sources import resolve_source

logger = logging.getLogger(__name__)


def _ray_environment() -> dict[str, str]:
    """Settings of the Ray that is started. It listens on all interfaces, and whoever may speak to it may run code: a
    token of its own keeps everybody else out.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}


_READY_POLL_S = 1.0
_READY_TIMEOUT_S = 10.0


def check_port_free(host: str, port: int) -> None:
    """Make sure a server can listen there.

    Raises:
        ConfigError: another program listens, or the address cannot be bound.
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that linger are no obstacle
            probe.bind((host, port))
            probe.listen()
    except OSError as error:
        other = _other_port(port)
        if error.errno == errno.EADDRINUSE:
            reason = f"port {port} is in use; stop the program that uses it or run: make serve PORT={other}"
        else:
            reason = f"cannot listen on {host} port {port}: {error.strerror}; run: make serve PORT={other}"
        raise ConfigError(reason) from error


@contextmanager
def claim_port(port: int) -> Iterator[None]:
    """Keep other servers of this kind off a port for as long as this one lives.

    Serve binds the port only when its replicas are up, and lets others share it: two servers started together would
    both find it free and then take turns in answering.

    Raises:
        ConfigError: one of them is being started or running.
    """
    with (Path(tempfile.gettempdir()) / f"specdec-serve-{port}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another server is starting on port {port}; stop it or run: make serve PORT={_other_port(port)}"
            ) from error
        yield


def _other_port(port: int) -> int:
    return 9000 if port != 9000 else 9001


def fetch_models(config: EngineConfig) -> None:
    """Bring every model of ``config`` to this machine's disk, so that replicas only load it.

    Raises:
        ConfigError: a model cannot be had.
    """
    resolve_source(config.target.source, config.target.revision, setting="target.source")
    if config.draft is not None and config.draft.source is not None:
        resolve_source(config.draft.source, config.draft.revision, setting="draft.source")


def config_with_address(path: Path, host: str, port: int) -> dict[str, Any]:
    """The Serve config at ``path``, with its HTTP address replaced.

    Raises:
        ConfigError: it has no applications to serve, or ``http_options`` is no mapping.
    """
    document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    options = document.get("http_options") or {}
    if "applications" not in document or not isinstance(options, dict):
        raise ConfigError(f"{path} is no Serve config: it needs 'applications', and 'http_options' may be a mapping")
    return document | {"http_options": options | {"host": host, "port": port}}


def run_until_stopped(command: Sequence[str | Path], url: str) -> int:
    """Run a server in the foreground and log when ``url`` is ready; returns its exit status.

    Ctrl-C and SIGTERM reach it as one SIGINT, upon which ``serve run`` takes down what it started.
    """
    # Set even where the shell ignores SIGINT for us (a job in the background): our child would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.default_int_handler)  # the terminal is closed: our child has left its session
    # In a session of its own, a terminal's Ctrl-C does not reach it a second time.
    server = subprocess.Popen(command, env=_ray_environment() | os.environ, start_new_session=True)
    stopped = threading.Event()
    threading.Thread(target=_announce_when_ready, args=(url, stopped), daemon=True).start()
    while True:
        try:
            return server.wait()
        except KeyboardInterrupt:
            if not stopped.is_set():
                logger.info("stopping")
            stopped.set()
            server.send_signal(signal.SIGINT)


def _announce_when_ready(url: str, stopped: threading.Event) -> None:
    while not stopped.wait(_READY_POLL_S):
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=_READY_TIMEOUT_S):
                logger.info("ready: %s/v1 (Ctrl-C stops it)", url)
                return
        except (OSError, http.client.HTTPException):  # it does not listen yet, or answers that it is not ready
            continue


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m deployments.run", description="Serve a config until Ctrl-C.")
    parser.add_argument("config", type=Path, help="a Serve config, such as serve_config.yaml")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8000, help="HTTP port (default: %(default)s)")
    return parser.parse_args(arguments)


def _port(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"a port is a number from 1 to 65535, not {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until stopped; returns the exit status."""
    options = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        check_port_free(options.host, options.port)
        config = load_engine_config(options.config)
        document = config_with_address(options.config, options.host, options.port)
        require_sound_serve_config(document, config)
        fetch_models(config)
        require_sound_pair(config)
        with claim_port(options.port):
            return _serve(options, document)
    except ConfigError as error:
        logger.error("%s", error)
        return 1


def _serve(options: argparse.Namespace, document: dict[str, Any]) -> int:
    """Hand the checked config to ``serve run``."""
    authority = f"[{options.host}]" if ":" in options.host else options.host
    with tempfile.TemporaryDirectory(prefix="specdec-serve-") as folder:
        copy = Path(folder) / options.config.name
        copy.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        serve = Path(sys.executable).with_name("serve")
        return run_until_stopped([serve, "run", "--address", "local", copy], f"http://{authority}:{options.port}")


if __name__ == "__main__":
    sys.exit(main())
