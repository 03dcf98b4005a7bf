"""`baton serve --detach` and `baton stop` where there is nothing that could keep a cluster."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["serve", "--detach"], 2, "name it: --address auto --detach"),
        (["serve", "--detach", "--address", "127.0.0.1:9"], 1, "no Ray cluster answers at 127.0.0.1:9"),
        (["serve", "--address", "nonsense"], 1, "--address: 'nonsense' is not an address"),
        (["stop", "--address", "127.0.0.1:9"], 1, "no Ray cluster answers at 127.0.0.1:9"),
    ],
)
def test_there_must_be_a_ray_that_goes_on(
    arguments: list[str], code: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.local_ray.QUIET", {})
    config = ["--config", str(ROOT / "cluster.yaml"), "--port", "0"] if arguments[0] == "serve" else []
    done = CliRunner().invoke(app, [*arguments, *config])
    assert done.exit_code == code
    assert expected in done.output


@pytest.mark.parametrize(
    "command", [["stop"], ["serve", "--address", "auto", "--port", "0", "--config", str(ROOT / "cluster.yaml")]]
)
def test_auto_is_what_ray_start_has_left_and_nothing_else(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A private Ray beside it is not taken up, and one that is gone is named at once: Ray tries for minutes."""
    monkeypatch.setattr("controller.local_ray.QUIET", {})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert "no Ray cluster runs on this machine" in done.output
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:9")
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert "no Ray cluster answers at 127.0.0.1:9" in done.output


def test_what_is_no_ray_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.local_ray.QUIET", {})
    monkeypatch.setattr("controller.local_ray._CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        done = CliRunner().invoke(app, ["stop", "--address", address])
    assert done.exit_code == 1
    assert f"what answers at {address} is no Ray cluster" in done.output
