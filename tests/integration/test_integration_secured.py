"""`baton serve` with keys and TLS on everything: it comes up under its controller, and only friends are served."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from certificates import Authority
from scripted_router import baton

from cluster.errors import NotReachable, PermissionDenied, Unauthenticated
from tools.client import BatonClient, make_spec

ROOT = Path(__file__).resolve().parents[2]
START_S, END_S = 120.0, 40.0
pytestmark = pytest.mark.timeout(240)


def secured_config(folder: Path, ours: Authority) -> Path:
    """The shipped cluster.yaml, with every lock on; files are named relative to it."""
    document = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    serving = document["metadata"]["serving"]
    public, inside = ours.server(clients=ours), ours.internal()
    serving["model"]["path"] = str(ROOT / "models" / "tiny-shakespeare")
    serving["auth"] = {"keys_file": "keys.yaml"}
    serving["tls"] = {name: Path(path).name for name, path in vars(public).items()}
    serving["internal_tls"] = {name: Path(path).name for name, path in vars(inside).items()}
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def new_key(folder: Path, *scopes: str) -> str:
    asked = [option for scope in scopes for option in ("--scope", scope)]
    made = baton("keys", "create", "--tenant", "acme", *asked, "--file", str(folder / "keys.yaml"), "--json")
    return str(json.loads(made.stdout)["key"])


def test_a_cluster_with_every_lock_on_serves_its_friends_alone(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    key, operator = new_key(tmp_path, "generate"), new_key(tmp_path, "admin")
    command = [sys.executable, "-m", "cli.main", "serve", "--port", "0", "--config"]
    process = subprocess.Popen(
        [*command, str(secured_config(tmp_path, ours))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    said: list[str] = []
    is_up = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if "ready after" in line:
                is_up.set()
        is_up.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert is_up.wait(START_S) and process.poll() is None, "".join(said)
        text = "".join(said)
        assert "--tls-ca FILE --tls-cert FILE --tls-key FILE --api-key KEY" in text
        public, admin = re.search(r"gRPC +(\S+)\n", text), re.search(r"--admin-address (\S+)", text)
        assert public is not None and admin is not None, text
        check(public.group(1), key, operator, ours)
        check_admin(admin.group(1), key, operator, ours)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(END_S)
        reader.join(END_S)
        if process.stdout is not None:
            process.stdout.close()
    assert process.returncode == 0, "".join(said)
    assert key not in "".join(said) and operator not in "".join(said)


def check(address: str, key: str, operator: str, ours: Authority) -> None:
    tls = ours.client(showing=ours)
    spec = make_spec("ROMEO:", max_output_tokens=8)
    with BatonClient(address, api_key=key, tls=tls) as friend:
        assert friend.generate(spec).usage.completion_tokens == 8
        with pytest.raises(PermissionDenied):
            friend.status()
    with BatonClient(address, api_key=operator, tls=tls) as admin:
        assert len(admin.status().workers) == 2
    with BatonClient(address, tls=tls) as nobody, pytest.raises(Unauthenticated):
        nobody.generate(spec)
    with BatonClient(address, api_key=key) as plain, pytest.raises(NotReachable):
        plain.generate(spec)


def check_admin(address: str, key: str, operator: str, ours: Authority) -> None:
    """The controller's port, by the program that operators use."""
    tls = ours.client(showing=ours)
    locks = ("--tls-ca", tls.ca, "--tls-cert", str(tls.cert), "--tls-key", str(tls.key))
    ask = ("rebalance", "1:1", "--dry-run", "--admin-address", address)
    asked = baton(*ask, *locks, "--api-key", operator)
    assert asked.exit_code == 0, asked.stderr
    for refused, why in (
        (baton(*ask, *locks, "--api-key", key), "scope admin"),
        (baton(*ask, *locks), "BATON_API_KEY"),
        (baton(*ask, "--api-key", operator), "--tls-ca"),
    ):
        assert refused.exit_code != 0 and why in refused.stderr, refused.stderr
