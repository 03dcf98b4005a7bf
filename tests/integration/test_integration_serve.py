"""`baton serve` as an operator runs it: the shipped configuration, real signals, and nothing left when it has ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from serve_process import END_S, ROOT, Serve

from tools.client import BatonClient, make_spec
from tools.generation_stream import Transcript

pytestmark = pytest.mark.timeout(240)


def generate(address: str, max_output_tokens: int = 8) -> Transcript:
    transcript = Transcript()
    with (
        BatonClient(address) as client,
        client.stream(make_spec("ROMEO:", max_output_tokens=max_output_tokens)) as stream,
    ):
        for event in stream:
            transcript.add(event)
    return transcript


@pytest.fixture(scope="module")
def cluster() -> Iterator[Serve]:
    serve = Serve("--port", "0")
    try:
        yield serve
    finally:
        serve.close()


def test_the_banner_names_an_address_that_generates(cluster: Serve) -> None:
    address = cluster.address
    assert f'generate --address {address} "ROMEO:"' in cluster.output
    assert generate(address).sequences[0].num_tokens == 8


def test_the_whole_cluster_holds_less_than_two_gigabytes(cluster: Serve) -> None:
    generate(cluster.address)
    processes = [psutil.Process(cluster.process.pid), *cluster.descendants()]
    total = sum(process.memory_full_info().pss for process in processes)
    assert total < 2 * 1024**3, f"{total / 1024**2:.0f} MB in {len(processes)} processes"


def test_ray_starts_nothing_that_one_machine_has_no_use_for(cluster: Serve) -> None:
    assert cluster.address
    programs = {Path(word).name for process in cluster.descendants() for word in process.cmdline()}
    assert {"gcs_server", "raylet"} <= programs
    assert not programs & {"monitor.py", "log_monitor.py", "dashboard.py"}


def test_everything_listens_on_loopback_only(cluster: Serve) -> None:
    generate(cluster.address)
    pids = {cluster.process.pid, *(process.pid for process in cluster.descendants())}
    listening = [c for c in psutil.net_connections("tcp") if c.pid in pids and c.status == psutil.CONN_LISTEN]
    assert listening
    assert {str(next(iter(c.laddr))).removeprefix("::ffff:") for c in listening} <= {"127.0.0.1", "::1"}


def test_a_second_cluster_on_the_same_port_is_refused_with_the_remedy(cluster: Serve) -> None:
    port = int(cluster.address.rpartition(":")[2])
    second = Serve("--port", str(port))
    assert second.wait() == 1
    second.close()
    assert f"cannot listen on 127.0.0.1:{port}" in second.output
    assert f"baton serve --port {port + 10}" in second.output
    assert "Traceback" not in second.output


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A cluster of one decode worker alone."""
    file = tmp_path_factory.mktemp("second") / "one.yaml"
    model = ROOT / "models" / "tiny-shakespeare"
    roles = "{prefill: {devices: 0, min_workers: 0}, decode: {devices: 1}}"
    file.write_text(f"metadata: {{serving: {{model: {{path: {model}}}, roles: {roles}}}}}\n")
    serve = Serve("--config", str(file), "--port", "0")
    try:
        yield serve
    finally:
        serve.close()


@pytest.mark.battery
def test_one_worker_alone_serves_where_prefill_has_none(second: Serve) -> None:
    with BatonClient(second.address) as client:
        result = client.generate(make_spec("ROMEO:", max_output_tokens=8, temperature=0.0, include_timing=True))
    assert result.ends[0].token_count == 8
    assert result.timing.placement == "local prefill on decode-0: there is no prefill worker"


def test_two_clusters_run_side_by_side_and_one_that_is_killed_leaves_nothing(cluster: Serve, second: Serve) -> None:
    assert second.address != cluster.address
    assert [generate(s.address).sequences[0].num_tokens for s in (cluster, second)] == [8, 8]
    left, folder = second.descendants(), second.ray_folder()
    assert folder.exists()
    second.process.kill()
    second.wait()
    assert not psutil.wait_procs(left, timeout=END_S)[1], "processes outlived the serve that was killed"
    assert not folder.exists()


def test_a_killed_decode_worker_comes_back_and_the_next_request_succeeds(cluster: Serve) -> None:
    with BatonClient(cluster.address) as client:
        decode = next(w for w in client.status().workers if w.worker_id == "decode-0")
    printed = len(cluster.output)
    os.kill(decode.info.ranks[0].pid, signal.SIGKILL)
    cluster.until("decode-0 was lost", printed)
    cluster.until("decode-0 is ready", printed)
    assert generate(cluster.address).sequences[0].num_tokens == 8


def test_a_terminated_cluster_ends_cleanly_and_leaves_nothing(cluster: Serve) -> None:
    assert cluster.address
    left, folder = cluster.descendants(), cluster.ray_folder()
    assert folder.exists()
    os.killpg(cluster.process.pid, signal.SIGTERM)  # as `timeout` and a machine that shuts down do
    assert cluster.wait() == 0
    assert not psutil.wait_procs(left, timeout=5.0)[1], "processes outlived a clean stop"
    assert not folder.exists()
    assert cluster.output.endswith("stopped\n")
    assert "Traceback" not in cluster.output


def test_a_second_signal_does_not_wait() -> None:
    serve = Serve("--port", "0")
    try:
        serve.until("router is ready|loading weights")
        left, folder = serve.descendants(), serve.ray_folder()
        assert folder.exists()
        os.killpg(serve.process.pid, signal.SIGINT)
        serve.until("stopping")
        os.killpg(serve.process.pid, signal.SIGINT)
        assert serve.wait() in (0, 1), "0 when the clean end was quicker"
        assert not psutil.wait_procs(left, timeout=END_S)[1]
        assert not folder.exists()
    finally:
        serve.close()


def test_a_folder_without_a_model_ends_at_once_with_its_name(tmp_path: Path) -> None:
    serve = Serve("--port", "0", "--model", str(tmp_path))
    assert serve.wait() == 3
    serve.close()
    assert str(tmp_path) in serve.output
    assert "starting Ray" not in serve.output


def test_a_truncated_checkpoint_is_refused_with_the_file_and_no_retry(tmp_path: Path) -> None:
    source = ROOT / "models" / "tiny-shakespeare"
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    weights = (source / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    serve = Serve("--port", "0", "--model", str(tmp_path))
    assert serve.wait() == 3
    serve.close()
    assert "model.safetensors" in serve.output.partition("error:")[2]
    assert "Traceback" not in serve.output
