"""Benchmarks, run as others run them, with sizes that say nothing but take seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest
import typer
from checkpoints import make_checkpoint
from tokenizers import Tokenizer
from typer.testing import CliRunner
from waiting import until

from benchmarks import gpu, kv_transfer

ROOT = Path(__file__).resolve().parents[2]
MARK = "BATON_TEST_BENCHMARK"
BUNDLED = ("--model", str(ROOT / "models" / "tiny-shakespeare"))
SMALL = (
    *("--runs", "2", "--tokens", "64", "--passes", "1", "--chunk-tokens", "16", "--chunk-tokens", "64"),
    *("--prompt-tokens", "24", "--prompt-tokens", "100", "--commits", "3", "--cancels", "6"),
)


def run(*arguments: str, timeout_s: float = 300.0) -> tuple[subprocess.CompletedProcess[str], list[psutil.Process]]:
    """What it said, and which of its processes it left behind."""
    mark = uuid.uuid4().hex
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, MARK: mark},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return ended, [process for process in psutil.process_iter() if _has(process, mark)]


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.mark.battery
def test_prints_one_json_object_with_the_promised_keys_and_leaves_no_process(model: Path) -> None:
    ended, left = run("benchmarks/kv_transfer.py", "--json", "--model-dir", str(model), *SMALL)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert left == []
    told = json.loads(ended.stdout)
    for key in ("shm.of_memcpy", "gloo.of_socket", "commit_ms_p50", "cancel_ms_p50", "cancel_ms_p99"):
        assert told[key] > 0, key
    assert list(told["exposed_share"]) == ["24", "100"]
    assert told["commits"] == 3
    assert sum(some["count"] for some in told["cancels"].values()) == 6
    for rates in told["cpu_gb_s"].values():
        assert list(rates) == ["16", "64"]
        assert all(rate > 0 for rate in rates.values())


@pytest.mark.battery
def test_as_a_module_it_shows_tables(model: Path) -> None:
    ended, left = run("-m", "benchmarks.kv_transfer", "--part", "bandwidth", *SMALL)
    assert ended.returncode == 0, ended.stderr
    assert left == []
    assert "KV between two ranks" in ended.stdout
    assert "of_memcpy" in ended.stdout
    assert "cancel" not in ended.stdout


@pytest.mark.parametrize(
    "wrong",
    [
        ("--runs", "0"),
        ("--part", "weather"),
        ("--tokens", "100"),
        ("--tokens", "64", "--chunk-tokens", "128"),
        ("--cancels", "0"),
        ("--prompt-tokens", "100000"),
    ],
    ids=" ".join,
)
def test_a_value_that_cannot_be_measured_is_refused_at_once(model: Path, wrong: tuple[str, ...]) -> None:
    """In this process, which has loaded torch already."""
    app = typer.Typer()
    app.command()(kv_transfer.main)
    before, on_sigterm = psutil.Process().children(recursive=True), signal.getsignal(signal.SIGTERM)
    try:
        ended = CliRunner().invoke(app, ["--json", "--model-dir", str(model), *wrong])
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)
    assert ended.exit_code == 2
    assert ended.stdout == ""
    assert wrong[-2] in ended.stderr
    assert psutil.Process().children(recursive=True) == before


def test_a_worker_that_cannot_start_is_shown_with_what_it_said(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    arguments = ("--json", "--model-dir", str(tmp_path), "--part", "exposed", *SMALL)
    ended, left = run("benchmarks/kv_transfer.py", *arguments)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "python -m worker" in ended.stderr
    assert "safetensors" in ended.stderr
    assert left == []


@pytest.mark.battery
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_the_failover_benchmark_finds_nothing_lost_and_nothing_changed(fault: str) -> None:
    sizes = ("--seconds", "5", "--every", "1.5", "--stop-seconds", "0.5", "--streams", "3", "--requests", "6")
    ended, left = run("benchmarks/failover.py", "--json", "--signal", fault, "--tokens", "40", *sizes)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert left == []
    (told,) = json.loads(ended.stdout).values()
    assert told["faults"] >= 1 and told["completed"] >= 6
    assert told["lost"] == told["changed"] == []
    for key in ("stall_s", "replay_s", "stall_beyond_replay_s"):
        assert set(told[key]) == {"p50", "p99", "max"}


@pytest.mark.battery
@pytest.mark.timeout(900)
@pytest.mark.parametrize("phase", ["stops", "kills"])
def test_a_soak_that_is_interrupted_goes_on_and_finds_nothing_wrong(phase: str, tmp_path: Path) -> None:
    """Too short for slopes to say anything: what it counts is looked at."""
    sizes = ("--capacity-seconds", "4", "--requests", "24", "--every", "4", "--workers", "1", "--load", "0.3")
    command = ("-m", "benchmarks.soak", "--phase", phase, "--minutes", "1", "--state", str(tmp_path), "--json", *sizes)
    mark = uuid.uuid4().hex
    first = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env={**os.environ, MARK: mark}, stderr=subprocess.PIPE
    )
    state = tmp_path / f"{phase}.jsonl"
    try:
        until(lambda: state.exists() and '"kind":"sample"' in state.read_text(), "a sample", 300.0)
    finally:
        first.send_signal(signal.SIGINT)
        assert first.communicate(timeout=60)[1].endswith(b"goes on from here\n")
    assert first.returncode == 130
    assert [process for process in psutil.process_iter() if _has(process, mark)] == []
    ended, left = run(*command, timeout_s=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert left == []
    (found,) = json.loads(ended.stdout).values()
    assert found["segments"] == 2 and found["minutes"] >= 1.0 and found["failures"] == []
    assert found["requests"]["completed"] >= 10 and found["quiet_moments"] >= 1
    assert sum(found["faults"].values()) >= 3
    assert {"router", "prefill-0", "decode-0", "controller", "total", "files"} <= set(found["per_hour"])


@pytest.mark.battery
def test_the_rebalance_benchmark_loses_nothing_reloads_nothing_and_hears_the_mistake_refused() -> None:
    times = ("--seconds", "10", "--every", "4", "--capacity-seconds", "2")
    ended, left = run(
        "benchmarks/rebalance.py", "--json", "--tokens", "16", "--requests", "6", "--streams", "3", *times
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert left == []
    told = json.loads(ended.stdout)
    assert told["changes"] == 2 and told["flips"] == 3 and told["mistakes_refused"] == 1
    assert told["lost"] == told["changed"] == told["restarted"] == told["problems"] == []
    assert told["completed"] >= 1


@pytest.mark.battery
def test_the_resume_benchmark_finds_nothing_lost_and_nothing_changed() -> None:
    sizes = ("--seconds", "5", "--every", "2", "--stop-seconds", "1", "--streams", "3", "--requests", "6")
    ended, left = run("benchmarks/resume.py", "--json", "--tokens", "60", *sizes)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert left == []
    told = json.loads(ended.stdout)
    for phase in ("redis", "router"):
        assert told[phase]["faults"] and told[phase]["completed"] >= 3
        assert told[phase]["lost"] == told[phase]["changed"] == []
    assert told["orphans"]["freed"] == 8 and told["orphans"]["still_running"] == 0


@pytest.mark.battery
@pytest.mark.parametrize("batches", [("1", "2"), ("1", "8", "32")], ids=" ".join)
def test_the_engines_benchmark_prints_the_promised_keys(model: Path, batches: tuple[str, ...]) -> None:
    sizes = (*(text for size in batches for text in ("--batch", size)), "--prompt", "20", "--prompt", "100")
    sizes = (*sizes, "--rounds", "1")
    ended, left = run("benchmarks/engine.py", "--json", "--model", str(model), "--quantization", "int8", *sizes)
    assert ended.returncode == 0, ended.stderr
    assert left == []
    told = json.loads(ended.stdout)
    for size in batches:
        assert told["decode"][size]["tok_s"] > 0 and told["decode"][size]["of_bandwidth"] > 0
    for size in ("20", "100"):
        assert told["prefill"][size]["tok_s"] > 0 and told["prefill"][size]["of_gemm"] > 0
    assert 0 < told["overhead_share"] < 1
    assert sum(told["shares"].values()) == pytest.approx(1, abs=0.01)
    assert told["prefix"]["tokens"] == 100 and told["quantization"] == "int8"


@pytest.mark.battery
def test_the_gpu_command_measures_on_a_cpu_what_can_run_and_says_why_the_rest_cannot(tmp_path: Path) -> None:
    """The program itself: on a CPU its figures mean nothing."""
    only = ("--only", "ceilings", "--only", "speed", "--only", "loading")
    ended, left = run("benchmarks/gpu.py", "--device", "cpu", "--out", str(tmp_path), *only)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert left == []
    parts = json.loads((tmp_path / "results.json").read_text())["parts"]
    found = {each["name"]: each for each in parts["speed"]["findings"]}
    assert "varlen cannot run" in found["bf16, varlen"]["not_run"]
    assert found["bf16"]["graphs"] == "they need a CUDA device, this is cpu"
    for name in ("bf16", "fp8", "int8"):
        assert all(found[f"{name}: decode of {size}"]["mbu"] > 0 for size in (1, 3))
        assert found[f"{name}: prefill of 300"]["mfu"] > 0
    assert len(found["kernels of one step"]["rows"]) > 5
    assert {each["name"] for each in parts["ceilings"]["findings"]} >= {"versions", "copy", "products of 200 rows"}
    loaded = {each["name"]: each for each in parts["loading"]["findings"]}
    assert len(loaded) == 3 and all(loaded[f"from the {where}"]["share"] > 0 for where in ("system's cache", "disk"))


@pytest.mark.battery
def test_the_gpu_command_says_that_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ended, left = run("benchmarks/gpu.py", "--out", str(tmp_path))
    assert ended.returncode == 4 and "error: there is no CUDA device here" in ended.stderr, ended.stdout + ended.stderr
    assert left == []


@pytest.mark.battery
@pytest.mark.timeout(500)
def test_every_part_of_the_gpu_command_but_the_kernels_own_tests_runs_on_a_cpu(tmp_path: Path) -> None:
    """Those tests are interpreted there, for minutes, and part of every run of the tests."""
    only = [word for part in gpu.PARTS if part.name != "kernels" for word in ("--only", part.name)]
    ended, left = run("benchmarks/gpu.py", "--device", "cpu", "--out", str(tmp_path), *only, timeout_s=450)
    parts = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(parts, "ok"), ended.stdout
    assert ended.returncode == 0 and left == []
    found = {name: {each["name"]: each for each in part["findings"]} for name, part in parts.items()}
    assert found["tests"]["tests"]["skipped"] > 100 and found["transfers"]["tests"]["skipped"] > 50
    assert found["links"]["shm"]["gb_s"] > 0 and found["links"]["tensor parallelism of 2"]["largest"] > 0
    assert found["links"]["shm_pages"]["gb_s"] > 0
    assert found["handoff"]["500 tokens by shm_pages"]["tokens"] > 0
    assert found["router"]["streams"]["same_again"] == "8 of 8"
    assert found["router"]["streams"]["disaggregated"] > 0


@pytest.mark.battery
def test_the_formats_benchmark_compares_them_all() -> None:
    model = ROOT / "models" / "tiny-shakespeare"
    text = model / "README.md"
    ended, left = run("benchmarks/formats.py", "--json", "--model", str(model), "--text", str(text), "--rounds", "1")
    assert ended.returncode == 0, ended.stderr
    assert left == []
    rows = json.loads(ended.stdout)["tiny-shakespeare"]
    sizes = [rows[name]["weight_bytes"] for name in ("float32", "bfloat16", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    exact = rows["float32"]["perplexity"]
    for name, row in rows.items():
        assert row["perplexity"] == pytest.approx(exact, rel=0.1 if name == "int4" else 0.01), name


@pytest.mark.battery
def test_a_model_is_made_once_and_can_be_served(tmp_path: Path) -> None:
    first, _ = run("benchmarks/make_model.py", "S", str(tmp_path / "S"))
    again, _ = run("benchmarks/make_model.py", "S", str(tmp_path / "S"))
    assert first.returncode == again.returncode == 0, first.stderr
    assert "made: 49 MB" in first.stdout and "is there already" in again.stdout
    config = json.loads((tmp_path / "S" / "config.json").read_text())
    assert Tokenizer.from_file(str(tmp_path / "S" / "tokenizer.json")).get_vocab_size() <= config["vocab_size"]
    sizes = ("--batch", "1", "--prompt", "32", "--rounds", "1")
    ended, _ = run("benchmarks/engine.py", "--model", str(tmp_path / "S"), *sizes)
    assert ended.returncode == 0, ended.stderr
    assert "bfloat16" in ended.stdout


@pytest.mark.battery
def test_the_routing_benchmark_compares_policies_and_finds_nothing_lost_or_changed() -> None:
    sizes = ("--rounds", "1", "--seconds", "2", "--requests", "16")
    ended, left = run("benchmarks/routing.py", "--json", *sizes)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert left == []
    told = json.loads(ended.stdout)
    assert list(told["policies"]) == ["predicted", "least_loaded", "round_robin"]
    for found in told["policies"].values():
        assert 0 < found["ttft_ms_p50"] <= found["ttft_ms_p90"] and 0 <= found["prefix_hit_ratio"] < 1
    assert told["lost"] == told["changed"] == []
    assert told["decision"]["workers"] == 64 and told["decision"]["cached_blocks"] > 99_000


@pytest.mark.battery
def test_the_router_overhead_benchmark_prints_the_promised_keys() -> None:
    sizes = ("--rounds", "1", "--streams", "4", "--tokens", "16")
    ended, left = run("benchmarks/router_overhead.py", "--json", *sizes)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert left == []
    told = json.loads(ended.stdout)
    assert {"added_per_request_us", "added_per_token_us", "added_cpu_per_token_us", "left_with_a_file"} <= set(told)
    ways = ("router", "two_routers", "journal_in_memory", "journal_in_a_file")
    assert set(told["many_streams"]) == {"echo", *ways, *(f"{way}_paced" for way in ways)}
    assert all(found["tok_s"] > 0 for found in told["many_streams"].values())


@pytest.mark.battery
@pytest.mark.parametrize("server", ["grpc", "http"])
def test_what_holds_baton_bench_against_another_client_counts_one_run_in_both(server: str) -> None:
    """Times of a few milliseconds agree as well as a busy machine lets them; counts agree always."""
    sizes = ("--num-prompts", "6", "--input-len", "40", "--output-len", "8", "--within", "1000000", *BUNDLED)
    ended, left = run("benchmarks/bench_agrees.py", "--json", "--only", server, *sizes)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert left == []
    (told,) = json.loads(ended.stdout)["runs"]
    counts = {"completed": 6, "total_input_tokens": 240, "total_output_tokens": 48}
    for name, number in counts.items():
        assert told["figures"][name] == dict.fromkeys(("bench", "witness", "relay"), number)
    assert all(values["relay"] > 0 for values in told["figures"].values())


@pytest.mark.battery
def test_a_load_that_the_server_refuses_ends_the_comparison_and_says_why() -> None:
    ended, left = run("benchmarks/bench_agrees.py", "--only", "http", "--input-len", "5000", *BUNDLED)
    assert ended.returncode == 1 and ended.stdout == ""
    assert "error: the two clients did not have one run" in ended.stderr and "5000" in ended.stderr
    assert left == []


@pytest.mark.battery
def test_the_benchmark_of_malformed_requests_judges_each_and_leaves_nothing() -> None:
    ended, left = run("-m", "benchmarks.malformed", "--requests", "40", "--good", "2", "--tokens", "4", "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["requests"] == sum(found["codes"].values()) == 40
    assert "OK" not in found["codes"] and found["codes"]["INVALID_ARGUMENT"] > 10
    assert (found["faults"], found["good_changed"]) == ([], 0)
    assert found["alone_ms"]["number"] == 4 and set(found["ratio"]) == {"p50", "p90", "p99"}
    assert not left


@pytest.mark.battery
def test_turns_begin_with_the_tokens_of_those_before_them_which_are_cached() -> None:
    small = ("--only", "colocated", "--conversations", "1", "--turns", "4", "--output", "32", "--json")
    ended, left = run("-m", "benchmarks.turns", *small)
    assert ended.returncode == 0 and not left, ended.stderr
    found = json.loads(ended.stdout)["colocated"]
    assert found["turns"] == 3 and found["begins"] > 0.98 and min(found["cached"], found["responses"]) > 0.8


@pytest.mark.battery
def test_the_benchmark_of_timed_steps_reports_the_loads_that_it_sent() -> None:
    sizes = ("--splits", "1:1", "--shares", "0.2,0.4", "--seconds", "4", "--slower", "1.5")
    ended, left = run("benchmarks/timed_cluster.py", "--json", "--detailed", *sizes)
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    assert left == []
    told = json.loads(ended.stdout)
    assert ended.returncode == any(found["differ"] for found in told["runs"])
    assert [(found["prefill"], found["decode"]) for found in told["runs"]] == [(1, 1), (1, 1)]
    for found in told["runs"]:
        assert found["completed"] == found["load"]["num_requests"] == len(found["details"]["ttfts"])
        values = told["values"]
        step_s = values["engine.timed_steps.fixed_s"] + 768 * values["engine.timed_steps.prompt_token_s"]
        assert found["p50_ttft_ms"] > 1000 * step_s and found["predicted"]["p50_ttft_ms"] > 1000 * step_s
