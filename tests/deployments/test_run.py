from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deployments import run
from deployments.run import check_port_free, claim_port, config_with_address, main
from specdec.errors import ConfigError

SERVE_CONFIG = """
http_options: {host: 0.0.0.0, port: 8000, request_timeout_s: 60}
applications:
- name: default
  import_path: deployments.app:build
  args: {draft: null, target: {source: SOURCE}}
"""

LAUNCHER = """
import sys
from deployments.run import run_until_stopped
sys.exit(run_until_stopped([sys.executable, "-c", sys.argv[1]], "http://127.0.0.1:1"))
"""

# Answers an interrupt as `serve run` does, and tells its parent's reader what it saw.
SERVER = """
import os, sys, time
print(os.environ["RAY_AUTH_MODE"], flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted once", flush=True)
    sys.exit(0)
"""


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def serve_config(tmp_path: Path) -> Path:
    path = tmp_path / "serve_config.yaml"
    path.write_text(SERVE_CONFIG.replace("SOURCE", str(tmp_path / "no-such-model")))
    return path


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> int:
        raise AssertionError("a server was started")

    monkeypatch.setattr(run, "run_until_stopped", refuse)


def test_a_port_in_use_is_named_with_a_way_out(
    taken_port: int, serve_config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert main([str(serve_config), "--port", str(taken_port)]) == 1
    assert f"port {taken_port} is in use" in caplog.text
    assert "make serve PORT=9000" in caplog.text


def test_a_port_freed_is_free_at_once(taken_port: int) -> None:
    with socket.create_connection(("127.0.0.1", taken_port)), pytest.raises(ConfigError):
        check_port_free("127.0.0.1", taken_port)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()  # lingers in TIME_WAIT on the server's side
    check_port_free("127.0.0.1", port)


def test_a_port_is_claimed_by_one_server_at_a_time() -> None:
    port = free_port()
    with claim_port(port):
        with pytest.raises(ConfigError, match=f"another server is starting on port {port}"), claim_port(port):
            pass
        with claim_port(free_port()):
            pass
    with claim_port(port):
        pass


def test_a_foreign_address_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.77 port 8000"):
        check_port_free("192.0.2.77", 8000)


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http"])
def test_what_is_no_port_is_refused(port: str, serve_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(serve_config), f"--port={port}"])
    assert "a port is a number from 1 to 65535" in capsys.readouterr().err


def test_only_the_address_is_replaced(serve_config: Path) -> None:
    before = yaml.safe_load(serve_config.read_text())
    after = config_with_address(serve_config, "127.0.0.1", 9000)
    assert after.pop("http_options") == {"host": "127.0.0.1", "port": 9000, "request_timeout_s": 60}
    del before["http_options"]
    assert after == before


def test_engine_settings_alone_cannot_be_served(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("draft: null")
    with pytest.raises(ConfigError, match="needs 'applications'"):
        config_with_address(path, "127.0.0.1", 8000)


def test_a_wrong_setting_stops_before_anything_starts(serve_config: Path, caplog: pytest.LogCaptureFixture) -> None:
    serve_config.write_text(serve_config.read_text().replace("draft:", "darft:"))
    assert main([str(serve_config), "--port", str(free_port())]) == 1
    assert "darft: unknown setting" in caplog.text


def test_a_missing_model_stops_before_anything_starts(serve_config: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main([str(serve_config), "--port", str(free_port())]) == 1
    assert "target.source" in caplog.text
    assert "does not exist" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_reaches_the_server_as_one_interrupt(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    command = [sys.executable, "-c", LAUNCHER, SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        mode = launcher.stdout.readline()
        launcher.send_signal(number)
        assert launcher.communicate()[0] == "interrupted once\n"
        assert mode == "token\n"
        assert launcher.returncode == 0


def test_a_server_that_fails_passes_its_status_on() -> None:
    command = [sys.executable, "-c", LAUNCHER, "raise SystemExit(3)"]
    assert subprocess.run(command, check=False).returncode == 3


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
