"""`baton status`, `baton config`, the program as a whole, and the Python client below it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_router import ROOT, ScriptedRouter, baton, contents, start_baton

from cli.common import lasting_console
from cli.config import default_config
from cluster.errors import (
    BatonError,
    InvalidRequest,
    NotReachable,
)
from cluster.pb import admin_pb2, worker_pb2
from tools.client import BatonClient, make_spec

# status


def cluster_status() -> admin_pb2.GetStatusResponse:
    info = worker_pb2.WorkerInfo(worker_id="prefill-0", role=worker_pb2.ROLE_PREFILL, node="node-a", block_size=16)
    info.metrics_address = "127.0.0.1:9400"
    info.ranks.add(tp_rank=0, pid=4242, host="127.0.0.1", device="cpu")
    stats = worker_pb2.WorkerStats(blocks_free=1000, blocks_held=20, blocks_cached=4, blocks_total=1024)
    stats.num_running_seqs = 7
    state = admin_pb2.WorkerStatus
    workers = [
        state(worker_id="prefill-0", address="127.0.0.1:7001", state=state.STATE_READY, info=info, stats=stats),
        state(worker_id="decode-0", address="127.0.0.1:7002", state=state.STATE_CONNECTING),
    ]
    workers[0].role, workers[1].role, workers[0].is_draining = worker_pb2.ROLE_DECODE, worker_pb2.ROLE_DECODE, True
    router = admin_pb2.RouterStatus(num_queued=3, max_queued=1024, num_running=5, pid=99, uptime_s=61)
    router.metrics_address = "127.0.0.1:9500"
    return admin_pb2.GetStatusResponse(model="bard", router_address="127.0.0.1:50051", workers=workers, router=router)


def test_status_shows_the_role_of_now_and_not_the_one_a_worker_was_started_for(router: ScriptedRouter) -> None:
    router.status = cluster_status()
    router.status.config_version = 7
    document = json.loads(baton("status", "--json", "--address", router.address).stdout)
    assert document["config_version"] == 7
    assert [(w["worker_id"], w["role"], w["is_draining"]) for w in document["workers"]] == [
        ("prefill-0", "decode", True),
        ("decode-0", "decode", False),
    ]
    assert baton("status", "--address", router.address).stdout.startswith(
        "bard at 127.0.0.1:50051, up 61 s, configuration 7\n"
    )


def test_status_json_names_each_worker_with_its_ranks_and_blocks(router: ScriptedRouter) -> None:
    router.status = cluster_status()
    done = baton("status", "--json", "--address", router.address)
    document = json.loads(done.stdout)
    ready, connecting = document["workers"]
    assert (ready["worker_id"], ready["role"], ready["node"], ready["state"]) == (
        "prefill-0",
        "decode",
        "node-a",
        "ready",
    )
    assert ready["ranks"] == [{"tp_rank": 0, "pid": 4242, "host": "127.0.0.1", "device": "cpu"}]
    assert ready["kv_blocks"] == {"free": 1000, "held": 20, "cached": 4, "total": 1024}
    assert ready["running_sequences"] == 7
    assert document["router"]["metrics_address"] == "127.0.0.1:9500"
    assert (ready["metrics_address"], connecting["metrics_address"]) == ("127.0.0.1:9400", None)
    assert (connecting["worker_id"], connecting["state"], connecting["role"]) == ("decode-0", "connecting", "decode")
    assert (document["router"]["queued"], document["router"]["running"], document["router"]["pid"]) == (3, 5, 99)


def test_status_is_a_table_for_people(router: ScriptedRouter) -> None:
    router.status = cluster_status()
    lines = baton("status", "--address", router.address).stdout.splitlines()
    assert lines[0] == "bard at 127.0.0.1:50051, up 61 s"
    assert lines[1].startswith("requests: 5 running, 3 of 1024 queued, 0 finished")
    ready = next(line for line in lines if "prefill-0" in line)
    assert " ".join(ready.split()) == "prefill-0 ready, draining decode node-a 0 (4242, cpu) 1000 20 4 1024 7 0"
    connecting = next(line for line in lines if "decode-0" in line)
    assert " ".join(connecting.split()) == "decode-0 connecting decode - - - - - - - -"


def test_status_of_a_cluster_without_workers_says_so(router: ScriptedRouter) -> None:
    done = baton("status", "--address", router.address)
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "no workers")


# config, version, start-up


def test_config_validate_says_what_it_found() -> None:
    done = baton("config", "validate", str(ROOT / "cluster.yaml"))
    assert done.exit_code == 0
    expected = "1 prefill + 1 decode worker, tiny-shakespeare in float32 on cpu, gRPC on 127.0.0.1:50051"
    assert done.stdout == f"{ROOT / 'cluster.yaml'}: valid: {expected}\n"


def test_the_file_beside_the_source_is_used_from_a_folder_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_config() == ROOT / "cluster.yaml"
    own = tmp_path / "cluster.yaml"
    own.touch()
    assert default_config() == own


def test_config_validate_reports_the_mistakes_with_exit_code_3(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("metadata:\n  serving: {model: {}, rolls: 1}\n")
    done = baton("config", "validate", str(file))
    assert (done.exit_code, done.stdout) == (3, "")
    assert f'{file}:2:24: metadata.serving.rolls: unknown key; did you mean "roles"?' in done.stderr
    assert f"{file}:2:20: metadata.serving.model.path: is missing" in done.stderr


def test_the_program_ends_with_the_same_exit_codes(tmp_path: Path, nobody: str) -> None:
    for code, arguments in {
        0: ("--version",),
        2: ("no-such-command",),
        3: ("config", "validate", str(tmp_path / "none.yaml")),
        4: ("status", "--address", nobody),
    }.items():
        with start_baton(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            out, err = process.communicate(timeout=30)
        assert process.returncode == code, err
        assert b"Traceback" not in err
        assert bool(out) == (code == 0)


def test_the_program_lists_its_commands_without_grpc_protobuf_ray_torch_or_rich() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from cli.main import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "print([m for m in ('google.protobuf', 'grpc', 'ray', 'torch', 'rich', 'yaml') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("command", ["keys", "status"])
def test_a_command_is_loaded_when_it_is_named(command: str) -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from cli.main import app\n"
        "assert CliRunner().invoke(app, [sys.argv[1], '--help']).exit_code == 0\n"
        "print(*sorted(m for m in sys.modules if m.startswith('cli.') or m == 'rich'))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", code, command]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr) == (sorted(["cli.common", "cli.main", f"cli.{command}"]), "")


# the client


def test_a_prompt_is_text_token_ids_or_messages() -> None:
    assert make_spec("hi").WhichOneof("prompt") == "text"
    assert list(make_spec([1, 2]).token_ids.ids) == [1, 2]
    assert make_spec([]).WhichOneof("prompt") == "token_ids"
    assert contents(make_spec([{"role": "user", "content": "hi"}])) == [("user", "hi")]
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        make_spec("\ud800")


def test_a_deadline_of_the_caller_ends_the_stream(router: ScriptedRouter) -> None:
    router.script = router.hello_then_hang
    with BatonClient(router.address) as client, client.stream(make_spec("x"), timeout_s=0.5) as stream:
        with pytest.raises(BatonError) as caught:
            list(stream)
        assert caught.value.grpc_code == "DEADLINE_EXCEEDED"


def test_leaving_a_stream_cancels_it_at_the_server(router: ScriptedRouter) -> None:
    router.script = router.hello_then_hang
    with BatonClient(router.address) as client, client.stream(make_spec("x")) as stream:
        next(stream)
    assert router.cancelled.wait(10)


def test_a_call_returns_the_servers_answer(router: ScriptedRouter, nobody: str) -> None:
    with BatonClient(router.address) as client:
        assert client.tokenize("abc") == [97, 98, 99]
    with BatonClient(nobody) as client, pytest.raises(NotReachable, match=f"nobody answers at {nobody}"):
        client.tokenize("abc")


@pytest.mark.parametrize("is_full", [False, True], ids=["nobody reads it", "its disk is full"])
def test_what_a_command_that_owns_processes_cannot_print_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full" if is_full else writing, "w", encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        console = lasting_console()
        for _ in range(3):
            console.print("decode-0 was lost " * 1000)
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())  # for what it still holds when it closes
        console.print("stopped")
