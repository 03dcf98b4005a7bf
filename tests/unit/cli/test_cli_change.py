"""`baton apply`, `rebalance` and `drain` against a real AdminService whose workers are only words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from admin_desk import FakeBackend
from scripted_router import baton

from cluster.config.schema import AdminSection
from cluster.errors import ConfigError, FailedPrecondition
from cluster.pb import admin_pb2
from cluster.token import leave_token
from controller.admin_service import start_admin
from tools.client import AdminClient


@pytest.fixture
def backend(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> Iterator[FakeBackend]:
    async def start() -> tuple[FakeBackend, Any]:
        made = FakeBackend(tmp_path)
        server, made.address = await start_admin(AdminSection(port=0), made)
        return made, server

    made, server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield made
    made.stage.steps.gate.set()
    asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(10)


def run(backend: FakeBackend, *arguments: str) -> Any:
    return baton(*arguments, "--admin-address", backend.address)


def test_rebalance_prints_the_plan_then_each_step_and_sets_the_numbers_in_the_file(backend: FakeBackend) -> None:
    done = run(backend, "rebalance", "3:1")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines() == [
        "  roles.prefill.devices: 3",
        "  roles.decode.devices: 1",
        "  1. flip decode-1 to prefill",
        "  2. flip decode-2 to prefill",
        "accepted as configuration 2",
        "flip decode-1 to prefill",
        "flip decode-1 to prefill: done",
        "flip decode-2 to prefill",
        "flip decode-2 to prefill: done",
        "rebalance 3:1: done: 1:3 to 3:1",
    ]
    config = backend.file.load()
    assert (config.roles.prefill.devices, config.roles.decode.devices) == (3, 1)


def test_a_dry_run_changes_neither_the_cluster_nor_the_file(backend: FakeBackend) -> None:
    text = backend.file.read()
    done = run(backend, "rebalance", "3:1", "--dry-run", "--json")
    assert json.loads(done.stdout) == {
        "version": 1,
        "is_change": False,
        "is_dry_run": True,
        "changes": ["roles.prefill.devices: 3", "roles.decode.devices: 1"],
        "steps": ["flip decode-1 to prefill", "flip decode-2 to prefill"],
        "failed": None,
    }
    assert (backend.stage.split(), backend.file.read()) == ((1, 3), text)


def test_apply_has_the_cluster_do_what_the_file_says(backend: FakeBackend) -> None:
    backend.edit("devices: 1", "devices: 2")
    backend.edit("devices: 3", "devices: 2")
    done = run(backend, "apply", str(backend.file.path))
    assert (done.exit_code, done.stdout.splitlines()[-1].rpartition(": ")[2]) == (0, "1:3 to 2:2")
    assert backend.stage.split() == (2, 2)
    again = run(backend, "apply", str(backend.file.path))
    assert (again.exit_code, again.stdout) == (0, "nothing differs from what runs (configuration 2)\n")


def test_apply_leaves_the_split_where_baton_chooses_it(backend: FakeBackend) -> None:
    backend.edit("mode: fixed", "mode: auto")
    assert run(backend, "apply", str(backend.file.path)).exit_code == 0
    begins = backend.file.read()
    assert run(backend, "rebalance", "2:2").exit_code == 0
    backend.file.path.write_text(begins, encoding="utf-8")
    backend.edit("margin: 0.02", "margin: 0.2")
    done = run(backend, "apply", str(backend.file.path))
    assert (done.exit_code, done.stdout.splitlines()[0].strip()) == (0, "rebalance.auto.margin: 0.2")
    assert backend.stage.split() == (2, 2)


def test_apply_of_a_file_with_mistakes_says_where_and_ends_with_3(backend: FakeBackend) -> None:
    backend.edit("devices: 1", "devices: one")
    done = run(backend, "apply", str(backend.file.path))
    assert (done.exit_code, done.stdout) == (3, "")
    assert f"{backend.file.path}:" in done.stderr
    assert "roles.prefill.devices: must be a whole number (got one)" in done.stderr
    assert backend.stage.split() == (1, 3)


def test_apply_refuses_what_only_a_restart_changes(backend: FakeBackend) -> None:
    backend.edit("max_num_seqs: auto ", "max_num_seqs: 32 ")
    done = run(backend, "apply", str(backend.file.path))
    assert done.exit_code == 1
    assert "engine.max_num_seqs cannot change while the cluster runs: restart `baton serve`" in done.stderr


def test_a_stale_version_is_refused_with_the_current_one(backend: FakeBackend) -> None:
    assert run(backend, "rebalance", "2:2", "--expected-version", "1").exit_code == 0
    done = run(backend, "rebalance", "3:1", "--expected-version", "1")
    assert done.exit_code == 1
    assert "version 1 is not current: 2 is" in done.stderr
    assert backend.stage.split() == (2, 2)


def test_a_split_below_min_workers_is_refused_with_the_numbers_that_can_be(backend: FakeBackend) -> None:
    done = run(backend, "rebalance", "4:0")
    assert done.exit_code == 1
    assert "0 decode workers cannot be: roles.decode.min_workers is 1; 1 to 3 of 4 can" in done.stderr


def test_a_step_that_fails_ends_with_1_and_says_what_stays(backend: FakeBackend) -> None:
    backend.stage.steps.broken = "flip decode-2 to prefill"
    done = run(backend, "rebalance", "3:1", "--json")
    assert done.exit_code == 1
    failed = "rebalance 3:1: decode-2 did not; 1 of 2 steps are done, and they stay"
    assert json.loads(done.stdout)["failed"] == failed
    assert failed in done.stderr


def test_drain_takes_a_worker_and_its_device_out(backend: FakeBackend) -> None:
    done = run(backend, "drain", "decode-0")
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "drain decode-0: done: 1:3 to 1:2")
    assert backend.file.load().roles.decode.devices == 2
    last = run(backend, "drain", "prefill-0")
    assert last.exit_code == 1
    assert "0 prefill workers cannot be" in last.stderr
    assert "there is no worker decode-0" in run(backend, "drain", "decode-0").stderr


@pytest.mark.parametrize("split", ["3", "3:1:1", "a:b", "3:", "-1:2"])
def test_a_split_that_is_none_is_a_mistake_of_usage(split: str, nobody: str) -> None:
    done = baton("rebalance", "--admin-address", nobody, "--", split)
    assert (done.exit_code, done.stdout) == (2, "")


def test_nobody_at_the_address_is_exit_code_4(nobody: str) -> None:
    done = baton("rebalance", "3:1", "--admin-address", nobody)
    assert done.exit_code == 4
    assert "--admin-address" in done.stderr


def test_the_state_of_the_cluster_says_what_is_being_carried_out(
    backend: FakeBackend, loop: asyncio.AbstractEventLoop
) -> None:
    loop.call_soon_threadsafe(backend.stage.steps.gate.clear)
    with AdminClient(backend.address) as client:
        answer = client.set_roles(2, 2)
        state = client.cluster()
        assert (state.version, state.config_file) == (2, str(backend.file.path))
        assert state.changing == answer.plan
        assert not state.HasField("router")
        assert [process.name for process in state.processes] == ["router"]
        with pytest.raises(FailedPrecondition, match="another change is being carried out"):
            client.set_roles(3, 1)
        loop.call_soon_threadsafe(backend.stage.steps.gate.set)
        kinds = [event.kind for event in client.follow(answer)]
    event = admin_pb2.ClusterEvent
    # The refusal falls in between.
    assert sorted(set(kinds)) == sorted(
        {event.KIND_PLANNED, event.KIND_STEP, event.KIND_REFUSED, event.KIND_STEP_DONE, event.KIND_CHANGED}
    )
    assert kinds[-1] == event.KIND_CHANGED


def test_a_controller_with_a_token_takes_commands_of_those_who_have_it(
    loop: asyncio.AbstractEventLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file at the port is what the user who started the cluster has, wherever his commands run."""

    async def start() -> tuple[FakeBackend, Any]:
        made = FakeBackend(tmp_path)
        server, made.address = await start_admin(AdminSection(port=0), made, token="the token")
        return made, server

    monkeypatch.setenv("HOME", str(tmp_path))
    backend, server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    port = int(backend.address.rpartition(":")[2])
    for shown in (None, "of an older cluster"):
        if shown is not None:
            leave_token(port, shown)
        refused = run(backend, "rebalance", "--dry-run", "3:1")
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert (
            "the controller wants the token of its cluster: run the command as the user who started" in refused.stderr
        )
    leave_token(port, "the token")
    assert run(backend, "rebalance", "--dry-run", "3:1").exit_code == 0
    asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(10)


async def test_the_service_does_not_listen_for_strangers_without_leave(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without TLS: set up TLS"):
        await start_admin(replace(AdminSection(port=0), host="0.0.0.0"), FakeBackend(tmp_path))
