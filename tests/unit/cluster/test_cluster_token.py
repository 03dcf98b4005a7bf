"""The token of a cluster: who must show it, where commands find it, and what they are told without it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cluster import rpc
from cluster.errors import PermissionDenied
from cluster.settings import TOKEN_VARIABLE, RouterSettings, WorkerSettings
from cluster.token import find_token, is_token, leave_token, token_file, token_gates, token_metadata

HEALTH: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    yield tmp_path


@pytest.mark.parametrize(
    ("shown", "open_services", "is_let_in"),
    [("the token", (), True), ("a guess", (), False), ("", (), False), ("", (HEALTH,), True)],
    ids=["token", "guess", "nothing", "open service"],
)
async def test_a_call_without_the_token_is_refused_before_it_is_read(
    shown: str, open_services: tuple[str, ...], is_let_in: bool
) -> None:
    server, port = rpc.create_server(interceptors=token_gates("the token", "a worker", open_services))
    servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await server.start()
    async with rpc.create_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        call = stub.Check(health_pb2.HealthCheckRequest(), metadata=token_metadata(shown))
        if is_let_in:
            await call
        else:
            with pytest.raises(Exception, match="a worker wants the token of its cluster") as refused:
                await call
            assert isinstance(rpc.from_rpc_error(refused.value), PermissionDenied)  # type: ignore[arg-type]
    await server.stop(None)


def test_without_a_token_nothing_is_asked_or_shown() -> None:
    assert (token_gates("", "a worker"), token_metadata("")) == ((), ())
    assert is_token("", "anything") and not is_token("a", "") and is_token("a", b"a")


def test_the_file_can_be_read_by_its_user_only_and_is_found_by_the_port(home: Path) -> None:
    leave_token(50052, "first")
    leave_token(50052, "second")
    file = token_file(50052)
    assert file.is_relative_to(home)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [find_token(address) for address in ("127.0.0.1:50052", "localhost:50052", "[::1]:50052")] == ["second"] * 3
    assert find_token("127.0.0.1:50053") == "", "another cluster"
    assert find_token("10.0.0.1:50052") == "", "another machine, which is not told what it need not know"
    assert find_token("nonsense") == ""


def test_the_environment_has_a_token_for_what_is_started_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_token(50052, "of the file")
    assert WorkerSettings.from_values(worker_id="w", role="decode", model_path="m").cluster_token == ""
    monkeypatch.setenv(TOKEN_VARIABLE, "by hand")
    assert WorkerSettings.from_values(worker_id="w", role="decode", model_path="m").cluster_token == "by hand"
    assert RouterSettings.from_values(model_path="m").cluster_token == "by hand"
    assert find_token("127.0.0.1:50052") == find_token("10.0.0.1:50052") == "by hand"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_of_another_user_counts_as_none(home: Path) -> None:
    leave_token(50052, "theirs")
    token_file(50052).chmod(0)
    assert find_token("127.0.0.1:50052") == ""
