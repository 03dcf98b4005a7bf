"""`baton doctor` on this machine: each thing broken on purpose is named, with its value and what to do."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from doctored import ask as ask_programs
from doctored import ask_here as ask
from doctored import copy_model, the_problem, the_warning, write_config
from scripted_router import ROOT

from benchmarks.redis_server import RedisServer, running_redis
from cluster.api_keys import ApiKey, digest_of, render_keys
from cluster.pb import admin_pb2, worker_pb2
from cluster.program import free_memory_bytes
from tools.doctor import machine, network, running
from tools.doctor.check import Result, exit_code
from tools.doctor.subject import DoctorOptions, Subject

# 1 to 3: the model folder


def test_a_file_of_weights_that_was_cut_short_is_named(tmp_path: Path) -> None:
    folder = copy_model(tmp_path)
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)
    outcomes = ask(write_config(tmp_path, model={"path": str(folder)}), "model", "tokenizer")
    found = the_problem(outcomes["model"])
    assert found.found.startswith(f"{weights}: truncated or not a safetensors file")
    assert "fetch the file again" in found.remedy
    assert outcomes["tokenizer"].result is Result.OK
    assert exit_code(outcomes.values()) == 3


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    folder = copy_model(tmp_path)
    (folder / "tokenizer.json").unlink()
    found = the_problem(ask(write_config(tmp_path, model={"path": str(folder)}), "tokenizer")["tokenizer"])
    assert f"{folder / 'tokenizer.json'}: cannot be read (No such file or directory)" in found.found
    assert found.remedy == "put the model's own tokenizer.json into its folder"


def test_a_tensor_parallel_size_that_does_not_divide_the_model_is_named(tmp_path: Path) -> None:
    roles = {"prefill": {"devices": 3, "tensor_parallel": 3}, "decode": {"devices": 1}}
    found = the_problem(ask(write_config(tmp_path, roles=roles), "model")["model"])
    assert found.found.startswith("tensor_parallel: 3 does not divide 8 attention heads")


# 4 to 7: a GPU, NCCL and flash-attn that are not there


@pytest.mark.skipif(machine.NVIDIA_DRIVER.exists(), reason="there is an NVIDIA driver")
def test_a_gpu_nccl_and_flash_attn_that_are_asked_for_and_not_there_are_named(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        model={"dtype": "bfloat16"},
        engine={"device": "cuda", "attention": "flash_attn", "kernels": "auto"},
        transfer={"transport": "nccl"},
    )
    outcomes = ask(config, "device", "nccl", "flash-attn", "attention", "transport")
    device = the_problem(outcomes["device"])
    assert device.found.startswith("engine.device is cuda, and torch ") and device.found.endswith("sees no GPU here")
    assert "set engine.device: cpu" in device.remedy
    nccl = the_problem(outcomes["nccl"])
    assert nccl.found == "this build of torch has no NCCL, and transfer.transport is nccl"
    flash = the_problem(outcomes["flash-attn"])
    assert flash.found == "engine.attention is flash_attn, and flash-attn is not installed"
    assert "pip install --no-build-isolation flash-attn" in flash.remedy
    assert outcomes["attention"].findings[0].found == "there is no device to compute on; see `device`"
    assert outcomes["transport"].findings[0].found.endswith("this build of torch has no NCCL; use auto or gloo")
    config = write_config(tmp_path, engine={"device": "auto", "attention": "flash_attn"})
    told = [finding.found for finding in ask(config, "attention")["attention"].findings]
    assert told == [
        f"{role}: attention: flash_attn cannot run: FlashAttention needs a CUDA device, this is cpu; use auto or cpu"
        for role in ("prefill", "decode")
    ]


def test_a_flash_attn_that_was_built_for_another_torch_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packages" / "flash_attn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c105ErrorC2E')\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    config = write_config(tmp_path, engine={"device": "cuda", "kernels": "auto"})
    found = the_warning(ask_programs(config, "flash-attn")["flash-attn"])
    assert found.found == (
        "flash-attn of unknown version cannot be imported: ImportError: undefined symbol: _ZN3c105ErrorC2E"
    )
    assert "build it against torch 2." in found.remedy


def facts(subject: Subject, monkeypatch: pytest.MonkeyPatch, **parts: Any) -> Subject:
    """What `worker.examine` would say on a machine with GPUs."""
    monkeypatch.setattr(subject, "machine", lambda name: {"found": parts[name]})
    return subject


def test_fewer_gpus_than_devices_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roles = {"prefill": {"devices": 2}, "decode": {"devices": 2}}
    config = write_config(tmp_path, roles=roles, engine={"device": "cuda", "kernels": "auto"})
    gpu = {"name": "H200", "capability": "9.0", "free_bytes": 140 * 10**9, "total_bytes": 150 * 10**9}
    with Subject(DoctorOptions(config)) as subject:
        torch = {"version": "2.13.0", "cuda": "12.8", "sees_gpu": True}
        (found,) = machine.device.run(facts(subject, monkeypatch, torch=torch, gpus=[gpu]))
        assert (found.result, found.found) == (
            Result.WARNING,
            "the roles name 4 devices, and this machine has 1 GPU",
        )
        (found,) = machine.device.run(facts(subject, monkeypatch, torch=torch, gpus=[gpu] * 4))
        assert found.result is Result.OK and found.found.startswith("4 GPUs for 4 devices: H200 (140.0 GB free)")


def test_a_driver_that_torch_does_not_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "version"
    driver.touch()
    monkeypatch.setattr(machine, "NVIDIA_DRIVER", driver)
    config = write_config(tmp_path, engine={"device": "auto"})
    with Subject(DoctorOptions(config)) as subject:
        torch = {"version": "2.13.0+cpu", "cuda": None, "sees_gpu": False}
        (found,) = machine.device.run(facts(subject, monkeypatch, torch=torch, gpus=[]))
    assert found.result is Result.WARNING
    assert found.found.startswith("there is an NVIDIA driver here, but torch 2.13.0+cpu sees no GPU")


# KV below the pools


def test_host_memory_of_all_workers_that_is_not_there_is_named(tmp_path: Path) -> None:
    half = free_memory_bytes() // 2
    path = write_config(tmp_path, engine={"kv_host_bytes": half}, roles={"prefill": {"devices": 3}})
    result = ask(path, "memory")["memory"]
    found = the_warning(result)
    assert found.found.startswith("all workers take ") and "engine.kv_host_bytes" in found.remedy
    own = [finding.found for finding in result.findings if "of host memory" in finding.found]
    assert own[0].startswith("prefill: ") and own[1].startswith("decode: "), result


def test_a_disk_without_room_for_all_workers_and_one_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    below = {"kv_host_bytes": 1_000_000, "kv_disk_bytes": 2**58, "kv_disk_path": str(tmp_path / "kv")}
    found = the_warning(ask(write_config(tmp_path, engine=below), "kv-disk")["kv-disk"])
    assert found.found.startswith(f"{tmp_path}/kv: ") and "KV of prefill, decode workers" in found.found
    assert "lower engine.kv_disk_bytes" in found.remedy
    (tmp_path / "file").touch()
    small = {**below, "kv_disk_bytes": 1_000_000, "kv_disk_path": str(tmp_path / "file" / "kv")}
    found = the_problem(ask(write_config(tmp_path, engine=small), "kv-disk")["kv-disk"])
    assert "it cannot be written" in found.found and "engine.kv_disk_path" in found.remedy
    there = {**small, "kv_disk_path": str(tmp_path)}
    assert ask(write_config(tmp_path, engine=there), "kv-disk")["kv-disk"].result is Result.OK
    assert ask(write_config(tmp_path), "kv-disk")["kv-disk"].result is Result.SKIPPED


# 8: shared memory


def test_a_small_dev_shm_is_named(tmp_path: Path) -> None:
    """In a mount namespace of its own, where /dev/shm is as small as Docker makes it."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("needs a mount namespace")
    path = write_config(tmp_path)
    doctor = f"{sys.executable} -m cli.main doctor {path} --json --limit 100"
    command = f"mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {doctor}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    found = checks["shared-memory"]["findings"][0]
    assert found["result"] == "problem"
    assert found["found"] == "/dev/shm: 67.1 MB free of 67.1 MB; Ray's object store needs 83.9 MB"
    assert "docker run --shm-size=2g" in found["remedy"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """One that would have to lie in a file; nobody can write there, root included."""
    (tmp_path / "file").touch()
    outcome = ask(write_config(tmp_path, log_dir=str(tmp_path / "file" / "logs")), "disk")["disk"]
    found = the_problem(outcome)
    assert found.found == f"{tmp_path / 'file' / 'logs'} (log_dir) cannot be written"


# 9: ports


def test_a_port_that_somebody_has_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcomes = ask(write_config(tmp_path, admin={"port": port}), "ports", "router")
    found = the_problem(outcomes["ports"])
    assert found.found == f"admin.port: 127.0.0.1:{port} is taken by another program"
    assert f"ss -ltnp 'sport = :{port}'" in found.remedy and "set admin.port to another port" in found.remedy
    assert outcomes["router"].result is Result.SKIPPED


def test_a_host_that_is_not_of_this_machine_is_named(tmp_path: Path) -> None:
    config = write_config(tmp_path, router={"host": "198.51.100.7", "port": 50061, "insecure": True})
    found = the_problem(ask(config, "ports")["ports"])
    assert found.found == f"router.port: cannot listen on 198.51.100.7:50061: {os.strerror(errno.EADDRNOTAVAIL)}"
    assert found.remedy.startswith("set router.host to an address of this machine")


# 10 to 12: Redis


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


def test_a_redis_that_is_down_is_named_without_its_password(tmp_path: Path, nobody: str) -> None:
    found = the_problem(ask(write_config(tmp_path, state=f"redis://:hunter2@{nobody}"), "redis")["redis"])
    assert found.found.startswith(f"Redis at {nobody} cannot be used: Error 111")
    assert "start redis-server there" in found.remedy
    assert "hunter2" not in found.found + found.remedy


def test_a_redis_that_never_answers_is_named_in_time(tmp_path: Path, own_redis: RedisServer) -> None:
    config = write_config(tmp_path, state=own_redis.url)
    own_redis.pause()
    began = time.monotonic()
    found = the_problem(ask(config, "redis", limit_s=2.0)["redis"])
    assert time.monotonic() - began < 15
    assert found.found == (f"Redis at 127.0.0.1:{own_redis.port} accepts connections and does not answer within 1 s")


def test_a_redis_that_keeps_nothing_is_a_warning_and_nothing_is_left_in_it(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    outcome = ask(write_config(tmp_path, state=own_redis.url), "redis")["redis"]
    assert "keeps no append-only file" in the_warning(outcome).found
    assert [f.result for f in outcome.findings] == [Result.WARNING, Result.OK]
    assert own_redis.num_keys() == 0


# 13: the keys file


def test_a_keys_file_that_others_may_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(render_keys([ApiKey("k", digest_of("baton-x"), "acme", ("generate",))]))
    path.chmod(0o644)
    outcome = ask(write_config(tmp_path, auth={"keys_file": str(path)}), "keys-file")["keys-file"]
    found = the_problem(outcome)
    assert found.found == f"{path} has mode 0644: others than its owner may read or change it"
    assert found.remedy == f"chmod 600 {path}"
    assert "no key of" in the_warning(outcome).found and "--scope admin" in the_warning(outcome).remedy


# 14 to 16: certificates


def internal(authority: Authority, name: str = "baton", *, is_expired: bool = False) -> dict[str, str]:
    tls = authority.internal(name, is_expired=is_expired)
    return {"cert": tls.cert, "key": tls.key, "ca": tls.ca}


def test_a_certificate_that_has_expired_is_named(tmp_path: Path) -> None:
    config = write_config(tmp_path, internal_tls=internal(Authority(tmp_path), is_expired=True))
    found = the_problem(ask(config, "certificates")["certificates"])
    assert "has expired: it was good until " in found.found
    assert found.remedy.startswith("make a new one as docs/security.md has it")


def test_a_certificate_for_another_name_is_named(tmp_path: Path) -> None:
    config = write_config(tmp_path, internal_tls=internal(Authority(tmp_path), "elsewhere"))
    found = the_problem(ask(config, "certificates")["certificates"])
    assert found.found.endswith("is for elsewhere, not for baton")
    server = Authority(tmp_path).server("bard.example")
    config = write_config(tmp_path, tls={"cert": server.cert, "key": server.key})
    assert the_problem(ask(config, "certificates")["certificates"]).found.endswith(
        "is for bard.example, not for 127.0.0.1"
    )


def test_a_certificate_of_another_authority_and_a_key_of_another_certificate_are_named(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path), Authority(tmp_path)
    config = write_config(tmp_path, internal_tls={**internal(theirs), "ca": ours.file})
    found = the_problem(ask(config, "certificates")["certificates"])
    assert "is refused by the other side: unable to get local issuer certificate" in found.found
    config = write_config(tmp_path, internal_tls={**internal(ours), "key": internal(ours)["key"]})
    assert "are not a pair" in the_problem(ask(config, "certificates")["certificates"]).found


def test_an_ipv6_address_is_found_in_a_certificate_however_it_is_written(tmp_path: Path) -> None:
    server = Authority(tmp_path).server("::1")
    config = write_config(tmp_path, router={"host": "::1"}, tls={"cert": server.cert, "key": server.key})
    (found,) = ask(config, "certificates")["certificates"].findings
    assert found.values["names"] == ["0:0:0:0:0:0:0:1"]
    assert "expires on" in found.found


def test_good_certificates_are_told_with_their_names_and_dates(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    server = ours.server(clients=ours)
    tls = {"cert": server.cert, "key": server.key, "client_ca": server.client_ca}
    config = write_config(tmp_path, tls=tls, internal_tls=internal(ours))
    outcome = ask(config, "certificates", tls=ours.client(showing=ours))["certificates"]
    # Certificates for tests live for a day.
    assert [f.result for f in outcome.findings] == [Result.WARNING] * 2
    assert [f.values["names"] for f in outcome.findings] == [["localhost", "127.0.0.1"], ["baton"]]
    assert all("expires on" in f.found for f in outcome.findings)


# 17: Ray's token


def test_a_missing_token_of_ray_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    token = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    config = write_config(tmp_path)
    found = the_problem(ask(config, "ray")["ray"])
    assert found.found == f"RAY_AUTH_MODE is token, and {token} cannot be read: No such file or directory"
    assert "ray get-auth-token --generate" in found.remedy
    token.write_text("secret")
    token.chmod(0o644)
    assert "has mode 0644: others may read Ray's token" in the_problem(ask(config, "ray")["ray"]).found
    monkeypatch.delenv("RAY_AUTH_MODE")
    token.unlink()
    machines = {"provider": {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2"]}}
    found = the_warning(ask(write_config(tmp_path, machines), "ray")["ray"])
    assert found.found.startswith("the file names 1 other machine, and Ray has no token")


def test_the_doctor_works_where_ray_is_not_installed_and_says_so(tmp_path: Path) -> None:
    """In a process in which Ray can be neither found nor imported."""
    code = (
        "import sys, importlib.metadata as m\n"
        "sys.modules['ray'] = None\n"
        "found = m.version\n"
        "def version(name):\n"
        "    if name == 'ray': raise m.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "m.version = version\n"
        f"sys.argv = ['baton', 'doctor', {str(write_config(tmp_path))!r}, '--json', '--limit', '100']\n"
        "from cli.main import main\n"
        "main()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    checks = {check["name"]: check["findings"][0] for check in json.loads(done.stdout)["checks"]}
    assert checks["ray"]["found"] == "Ray is not installed: `baton serve` needs it"
    assert checks["model"]["result"] == "ok"


# 18: a worker that the controller cannot start


def test_a_worker_that_does_not_come_up_is_named_with_the_reason_of_the_controller(tmp_path: Path) -> None:
    ready = admin_pb2.WorkerStatus(worker_id="prefill-0", state=admin_pb2.WorkerStatus.STATE_READY)
    prefill, decode, process = worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE, admin_pb2.ProcessStatus
    processes = [
        process(name="router", state="ready", num_starts=1),
        process(name="prefill-0", state="ready", num_starts=3, why="it died", role=prefill),
        process(name="decode-0", state="backing off", why="out of memory", role=decode),
        process(name="decode-1", state="stopped", role=decode),
    ]
    with Subject(DoctorOptions(write_config(tmp_path))) as subject:
        subject.cluster.status = admin_pb2.GetStatusResponse(workers=[ready])
        subject.cluster.state = admin_pb2.GetClusterResponse(processes=processes)
        told = [(finding.result, finding.found) for finding in running.workers.run(subject)]
    assert told == [
        (Result.WARNING, "prefill-0 has been started 3 times (it died)"),
        (Result.PROBLEM, "decode-0 is backing off (out of memory): the router has no such worker"),
        (Result.OK, "1 of 2 workers ready"),
    ]


# 19: the clock


def test_a_clock_that_nobody_keeps_is_a_warning_where_there_are_several_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_clock_state", lambda: 5)
    machines = {"provider": {"type": "aws", "region": "eu-west-1"}}
    assert "run an NTP client" in the_warning(ask(write_config(tmp_path, machines), "clock")["clock"]).remedy
    assert ask(write_config(tmp_path), "clock")["clock"].result is Result.OK
