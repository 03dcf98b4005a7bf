"""`baton config explain`: the sum for each role, as text and as JSON; mistakes end it as they end `config validate`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_router import ROOT, baton

from cli import config
from cluster.config.load import load_config
from cluster.errors import ConfigError
from cluster.text import format_bytes
from worker import examine

ENGINE = "{device: cpu, kv_cache_tokens: 4096, max_num_batched_tokens: 256, max_num_seqs: 16}"


def write(folder: Path, *, model: str = "", engine: str = ENGINE, roles: str = "{}") -> str:
    file = folder / "cluster.yaml"
    path = ROOT / "models" / "tiny-shakespeare"
    serving = f"{{model: {{path: {path}{model}}}, engine: {engine}, roles: {roles}}}"
    file.write_text(f"metadata:\n  serving: {serving}\n")
    return str(file)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs `worker.examine` here, where torch is loaded already. Other tests here run it as the program does."""
    run = subprocess.run

    def run_here(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if command[1:3] != ["-m", "worker.examine"]:
            return run(command, **options)
        out, errors = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            patch.setattr(sys, "stdin", io.StringIO(options["input"]))
            code = examine.main(command[3:])
        return subprocess.CompletedProcess(command, code, out.getvalue(), errors.getvalue())

    monkeypatch.setattr(subprocess, "run", run_here)


def explained(*arguments: str) -> dict[str, Any]:
    done = baton("config", "explain", "--json", *arguments)
    assert done.exit_code == 0, done.stderr
    roles: dict[str, Any] = json.loads(done.stdout)["roles"]
    return roles


def test_the_sum_of_each_role_as_json(tmp_path: Path) -> None:
    roles = "{prefill: {devices: 4, tensor_parallel: 2, kv_cache_tokens: 8192}, decode: {devices: 3, block_size: 32}}"
    told = explained(write(tmp_path, model=", dtype: bfloat16, quantization: int8", roles=roles))

    prefill, decode = told["prefill"], told["decode"]
    assert (prefill["workers"], prefill["tensor_parallel"]) == (2, 2)
    assert (decode["workers"], decode["tensor_parallel"]) == (3, 1)
    assert (prefill["num_blocks"], prefill["num_tokens"]) == (512, 8192)
    assert (decode["num_blocks"], decode["num_tokens"]) == (128, 4096)
    # bfloat16 keys and values of 4 layers, 4 KV heads, 32 dimensions; two ranks share the heads
    assert decode["kv_bytes_per_token"] == 2 * 2 * 4 * 4 * 32 == 2 * prefill["kv_bytes_per_token"]
    for of in told.values():
        parts = of["weight_bytes"] + of["activation_bytes"] + of["reserved_bytes"] + of["left_bytes"]
        assert parts == of["budget_bytes"] == int(0.9 * of["free_bytes"])
        assert of["pool_bytes"] == of["num_tokens"] * of["kv_bytes_per_token"] < of["left_bytes"]
        assert of["activations_are_measured"] is False and of["activations_why"] == "measured when a worker starts"
        assert (of["mean_tokens"], of["requests_at_mean"]) == (1024, of["num_tokens"] // 1024)
        assert (of["decided_by"], of["quantization"], of["dtype"]) == ("kv_cache_tokens", "int8", "bfloat16")


@pytest.mark.usefixtures("in_this_process")
def test_the_mean_length_is_the_callers(tmp_path: Path) -> None:
    told = explained(write(tmp_path), "--mean-tokens", "100")["decode"]
    assert (told["mean_tokens"], told["requests_at_mean"]) == (100, 4096 // 112)
    short = explained(write(tmp_path, model=", max_model_len: 500"))["decode"]
    assert (short["mean_tokens"], short["requests_at_mean"]) == (500, 8)


@pytest.mark.usefixtures("in_this_process")
def test_the_sum_is_written_for_people(tmp_path: Path) -> None:
    file = write(tmp_path, engine="{device: cpu, memory_utilization: 0.5}")
    told = explained(file)["decode"]

    done = baton("config", "explain", file)

    assert done.exit_code == 0, done.stderr
    text = done.stdout[done.stdout.index("decode:") :]
    rows = {line[2:16].strip(): " ".join(line[16:].split()) for line in text.splitlines()[1:]}
    assert text.startswith("decode: 1 worker of 1 rank\n") and "prefill: 1 worker of 1 rank" in done.stdout
    assert rows["budget"].endswith("GB 0.5 of it (engine.memory_utilization)")
    assert rows["- weights"].startswith(
        f"{format_bytes(told['weight_bytes'])} computed in bfloat16: bfloat16 as it is, "
    )
    step = "a step of 2,048 tokens and 64 sequences"
    size = format_bytes(told["activation_bytes"])
    assert rows["- activations"] == f"{size} estimated for {step}; measured when a worker starts"
    assert rows["= left"].endswith("tokens of 2,048 bytes fit")
    pool = "8,192 tokens, 512 blocks of 16 tokens in bfloat16; four requests of max_model_len"
    assert rows["KV pool"].startswith(f"16.8 MB {pool}")
    assert rows["requests"].startswith("8 of 1,024 tokens at a time")


@pytest.mark.usefixtures("in_this_process")
def test_host_memory_and_disk_are_told_for_each_rank_and_for_all_of_them(tmp_path: Path) -> None:
    below = f"kv_host_bytes: 6553600, kv_disk_bytes: 20000000, kv_disk_path: {tmp_path}/kv"
    file = write(tmp_path, engine=f"{ENGINE[:-1]}, {below}}}", roles="{prefill: {devices: 2}}")
    told = explained(file)["prefill"]
    text = " ".join(baton("config", "explain", file).stdout.split())
    assert (told["num_host_blocks"], told["host_bytes"]) == (200, 6_553_600), "32 kB each, in bfloat16"
    assert told["disk_bytes"] == told["num_disk_blocks"] * (32768 + 4096) <= 20_000_000
    assert told["disk_path"] == f"{tmp_path}/kv" and told["disk_is_writable"]
    assert "host memory 6.6 MB 3,200 tokens, 200 blocks; the role takes 13.1 MB of this machine, " in text
    assert f"the role takes {format_bytes(2 * told['disk_bytes'])} in {tmp_path}/kv, " in text


@pytest.mark.usefixtures("in_this_process")
def test_a_role_without_workers_has_nothing_to_share_out(tmp_path: Path) -> None:
    file = write(tmp_path, roles="{prefill: {devices: 0, min_workers: 0}}")

    told = explained(file)
    done = baton("config", "explain", file)

    assert told["prefill"] == {"workers": 0} and told["decode"]["num_tokens"] == 4096
    assert "prefill: no workers; decode workers compute prompts as well\n\ndecode: 1 worker of 1 rank\n" in done.stdout


def test_kernels_that_are_wanted_and_cannot_be_used_are_refused(tmp_path: Path) -> None:
    done = baton(
        "config", "explain", write(tmp_path, model=", dtype: float16", engine="{device: cpu, kernels: native}")
    )
    assert done.exit_code == 3 and "prefill workers: kernels: native cannot be used" in done.stderr


def test_without_a_file_it_explains_cluster_yaml_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert explained()["prefill"]["num_tokens"] == 16384


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"engine": "{device: cpu, kv_cache_tokens: 100000000000}"},
            "prefill workers: kv_cache_tokens: 100000000000 do",
        ),
        ({"roles": "{decode: {kv_cache_tokens: 1000}}"}, "decode workers: max_model_len: one request of 2048 tokens"),
        ({"roles": "{decode: {devices: 3, tensor_parallel: 3}}"}, "decode workers: tensor_parallel: 3 does not divide"),
        ({"model": ", max_model_len: 4096"}, "max_model_len: 4096 is not between 1 and the checkpoint's"),
        ({"engine": "{divice: cpu}"}, 'unknown key; did you mean "device"?'),
    ],
    ids=["memory", "pool", "ranks", "context", "key"],
)
def test_what_a_worker_would_refuse_is_refused(wrong: dict[str, str], said: str, tmp_path: Path) -> None:
    done = baton("config", "explain", write(tmp_path, **wrong))

    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr.startswith("error: ") and said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("in_this_process")
def test_a_model_that_is_not_there_or_cannot_be_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("metadata:\n  serving: {model: {path: none}}\n")
    done = baton("config", "explain", str(file))
    assert done.exit_code == 3 and f"{file}:2:27: metadata.serving.model.path: no such folder" in done.stderr

    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    done = baton("config", "explain", str(file))
    assert done.exit_code == 3 and "prefill workers: config.json: architecture 'MambaForCausalLM'" in done.stderr


@pytest.mark.usefixtures("in_this_process")
def test_a_mean_that_no_request_can_have_is_refused(tmp_path: Path) -> None:
    done = baton("config", "explain", write(tmp_path), "--mean-tokens", "3000")
    assert done.exit_code == 3 and "--mean-tokens: 3000 is more than max_model_len 2048" in done.stderr
    assert baton("config", "explain", write(tmp_path), "--mean-tokens", "0").exit_code == 2


def test_a_program_that_breaks_is_told_with_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, env: dict[str, str], **__: Any) -> subprocess.CompletedProcess[str]:
        assert env["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT), "it runs from any folder"
        return subprocess.CompletedProcess([], 1, stdout="", stderr="ModuleNotFoundError: No module named 'torch'\n")

    monkeypatch.setattr(config.subprocess, "run", broken)
    done = baton("config", "explain", write(tmp_path))

    assert done.exit_code == 1
    assert (
        "python -m worker.examine memory ended with code 1: ModuleNotFoundError: No module named 'torch'" in done.stderr
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_960, "1.0 MB"),
        (17_250_000_000, "17.2 GB"),
        (5_000_000_000_000_000, "5000.0 TB"),
        (-2_500_000, "-2.5 MB"),
    ],
)
def test_bytes_are_written_with_one_decimal(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("size", "mode", "said"),
    [(None, 0, "cannot be read"), (8, 0o600, r"32 to 4096 bytes.*got 8"), (32, 0o644, "mode 0644.*chmod 600")],
)
def test_a_file_that_is_no_key_for_kv_is_refused_before_anything_starts(
    tmp_path: Path, size: int | None, mode: int, said: str
) -> None:
    key = tmp_path / "key"
    if size is not None:
        key.write_bytes(bytes(size))
        key.chmod(mode)
    serving = load_config(Path(write(tmp_path, engine=f"{ENGINE[:-1]}, kv_key_file: {key}}}")))
    with pytest.raises(ConfigError, match=said) as refused:
        config.check_model(serving, are_here=True)
    assert str(refused.value).startswith(f"kv_key_file: {key}")
