"""A Ray head with Ray's own autoscaler, whose nodes are further raylets on this machine.

`python tests/support/autoscaled_ray.py ADDRESS CPUS` holds that many CPUs of the cluster until its standard input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from controller.local_ray import base_folder

ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""In the environment of everybody who joins; the name is Ray's."""
START_S = 60.0
END_S = 40.0
_HEAD_ID = "f" * 51 + "0" * 5
"""That Ray's provider of such nodes takes the head to have."""
_EMPTY = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")


def _autoscaling(address: str, more_nodes: int) -> dict[str, object]:
    """As Ray reads it; a node is given back 6 s after it has become idle."""
    return {
        "cluster_name": "grows",
        "max_workers": more_nodes,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.1,
        "provider": {"type": "fake_multinode", "use_node_id_as_ip": True, "gcs_address": address},
        "auth": {},
        "docker": {},
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "more": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": more_nodes},
        },
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
        "head_node": {},
        "worker_nodes": {},
        **{name: [] for name in _EMPTY},
    }


@contextlib.contextmanager
def autoscaled_ray(more_nodes: int = 1) -> Iterator[str]:
    """Its address. The head has one CPU, and so has each node that may come."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (
        tempfile.TemporaryDirectory(prefix="grows-", dir=base_folder()) as folder,
        _head(Path(folder), address, more_nodes),
    ):
        yield address


@contextlib.contextmanager
def _head(folder: Path, address: str, more_nodes: int) -> Iterator[None]:
    file = folder / "autoscaling.json"
    file.write_text(json.dumps(_autoscaling(address, more_nodes)))
    command = ["start", "--head", "--block", f"--port={address.rpartition(':')[2]}", "--node-ip-address=127.0.0.1"]
    command += ["--num-cpus=1", "--include-dashboard=false", f"--temp-dir={folder}", f"--autoscaling-config={file}"]
    environment = {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID,
    }
    ray = subprocess.Popen(
        [str(Path(sys.executable).parent / "ray"), *command, "--object-store-memory=80000000"],
        env={**os.environ, **ON_LOOPBACK, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert ray.stdout is not None
        told = ""
        for line in ray.stdout:
            told += line
            if "Ray runtime started" in line:
                break
        else:
            raise AssertionError(f"Ray did not start:\n{told}")
        yield
    finally:
        everybody = [psutil.Process(ray.pid), *psutil.Process(ray.pid).children(recursive=True)]
        for process in everybody:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        ray.communicate(timeout=END_S)
        psutil.wait_procs(everybody, timeout=END_S)


@contextlib.contextmanager
def occupied(address: str, num_cpus: float) -> Iterator[None]:
    """Somebody else holds so much of the cluster."""
    other = subprocess.Popen(
        [sys.executable, __file__, address, str(num_cpus)],
        env={**os.environ, **ON_LOOPBACK, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == "held\n"
        yield
    finally:
        other.communicate(timeout=END_S)


def _hold(address: str, num_cpus: float) -> None:
    import ray
    from ray.util.placement_group import placement_group

    ray.init(address=address, log_to_driver=False)
    assert placement_group([{"CPU": num_cpus}]).wait(START_S)
    print("held", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _hold(sys.argv[1], float(sys.argv[2]))
