"""The router as a program: flags, a thread of its own, errors at start, and a clean end in a real process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from router_harness import make_model_folder

from cluster.errors import CheckpointError, ConfigError
from cluster.pb import generation_pb2 as pb
from cluster.pb import generation_pb2_grpc
from cluster.settings import RouterSettings, parse_flags
from router.program import RouterProgram, create

ROOT = Path(__file__).resolve().parents[3]


def program(folder: Path, **settings: object) -> RouterProgram:
    given = {"model_path": str(folder), "port": 0, **settings}
    return create(RouterSettings.from_values(**given).to_json(), lambda line: None)


def test_a_program_starts_serves_and_stops(tmp_path: Path) -> None:
    router = program(make_model_folder(tmp_path), model_name="m")
    assert json.loads(router.prepare()) == {}
    card = json.loads(router.start())
    assert set(card) == {"address", "control_address", "http_address", "pid"} and not card["http_address"]
    with grpc.insecure_channel(card["address"]) as channel:
        answer = generation_pb2_grpc.GenerationServiceStub(channel).ListModels(pb.ListModelsRequest())
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert [model.name for model in answer.models] == ["m"]
    assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
    router.stop()
    router.stop()
    router.wait()


def test_what_is_wrong_at_start_is_raised_by_start_and_by_wait(tmp_path: Path) -> None:
    router = program(tmp_path / "absent")
    with pytest.raises(CheckpointError):
        router.start()
    with pytest.raises(CheckpointError):
        router.wait()
    router.stop()
    make_model_folder(tmp_path)
    with pytest.raises(ConfigError, match="prefill:ID=HOST:PORT"):
        program(tmp_path, workers=["prefill-0@host"]).start()
    with pytest.raises(ConfigError, match="without TLS"):
        program(tmp_path, host="0.0.0.0").start()


def test_a_port_in_use_is_a_bad_setting(tmp_path: Path) -> None:
    first = program(make_model_folder(tmp_path))
    port = int(json.loads(first.start())["address"].rpartition(":")[2])
    with pytest.raises(ConfigError, match=str(port)):
        program(tmp_path, port=port).start()
    first.stop()
    first.wait()


def test_flags_are_the_settings_fields_and_win_over_json() -> None:
    flags = [
        "--settings",
        '{"model": {"path": "a"}, "router": {"port": 1}}',
        "--port",
        "2",
        "--insecure",
        "--max-model-len",
        "64",
    ]
    flags += ["--queue-timeout-s", "1.5", "--workers", "prefill:p=h:1", "decode:d=h:2"]
    settings = parse_flags(RouterSettings, "python -m router", flags)
    section = settings.router
    assert (settings.model.path, section.port, section.insecure, settings.model.max_model_len) == ("a", 2, True, 64)
    assert section.queue_timeout_s == 1.5 and list(settings.workers) == ["prefill:p=h:1", "decode:d=h:2"]


def test_a_missing_model_path_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_flags(RouterSettings, "python -m router", [])
    assert end.value.code == 2 and "--model-path" in capsys.readouterr().err


def test_sigterm_ends_the_process_with_exit_code_zero(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "router", "--model-path", str(make_model_folder(tmp_path)), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        ready = json.loads(process.stdout.readline())
        assert ready["event"] == "ready" and ready["pid"] == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert "Traceback" not in process.stderr.read()


def test_reflection_lists_the_public_services_only(tmp_path: Path) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    router = program(make_model_folder(tmp_path))
    address = json.loads(router.start())["address"]
    with grpc.insecure_channel(address) as channel:
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = next(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask])))
    names = {service.name for service in answer.list_services_response.service}
    assert {"baton.v1.GenerationService", "baton.admin.v1.StatusService", "grpc.health.v1.Health"} <= names
    assert "baton.admin.v1.ControlService" not in names
    router.stop()
    router.wait()
