"""Versions of the protocol inside a cluster: who understands whom, and how callers are refused."""

from __future__ import annotations

import logging

import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cluster import protocol, rpc
from cluster.errors import IncompatibleProtocol, PermissionDenied
from cluster.protocol import HEADER, ProtocolGate, check_protocol, inside_gates, inside_metadata, spoken
from cluster.token import token_metadata

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("1-1", "1-1"), ("1-2", "1-1"), ("1-1", "1-2"), ("2-4", "1-2"), ("2-4", "4-9"), ("", "1-3"), ("1-3", "")],
)
def test_two_that_have_a_version_in_common_understand_each_other(theirs: str, ours: str) -> None:
    check_protocol("worker decode-1", theirs, "this router", ours)


@pytest.mark.parametrize(
    ("theirs", "ours", "why"),
    [
        ("3-3", "1-2", "worker decode-1 speaks protocol 3; this router speaks 1 to 2: upgrade this router first"),
        (
            "1-2",
            "3-4",
            "worker decode-1 speaks protocol 1 to 2; this router speaks 3 to 4: upgrade worker decode-1 first",
        ),
        ("", "2-2", "worker decode-1 speaks protocol 1; this router speaks 2: upgrade worker decode-1 first"),
        ("x" * 99, "1-1", f"worker decode-1 says that it speaks '{24 * 'x'}', which is no range of protocol versions"),
        ("1", "1-1", "worker decode-1 says that it speaks '1', which is no range of protocol versions"),
    ],
)
def test_one_that_is_not_understood_is_refused_by_name_with_the_one_to_upgrade(
    theirs: str, ours: str, why: str
) -> None:
    with pytest.raises(IncompatibleProtocol) as refused:
        check_protocol("worker decode-1", theirs, "this router", ours)
    assert refused.value.message == why


def test_this_build_speaks_its_own_version_and_no_later_one() -> None:
    assert 1 <= protocol.OLDEST <= protocol.VERSION
    assert spoken() == f"{protocol.OLDEST}-{protocol.VERSION}"
    assert inside_metadata("t") == (*token_metadata("t"), (HEADER, spoken()))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("", None),
        ("1-7", None),
        ("2-7", "worker d speaks protocol 1; its caller speaks 2 to 7: upgrade worker d first"),
        ("0-0", "worker d speaks protocol 1; its caller speaks 0: upgrade its caller first"),
        ("nonsense", "its caller says that it speaks 'nonsense', which is no range of protocol versions"),
    ],
)
async def test_a_server_of_the_inside_refuses_callers_by_name(
    said: str, why: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "cluster.protocol"):
        await called(inside_gates("", "worker d"), ((HEADER, said),) if said else (), why)
    told = [record.getMessage() for record in caplog.records if record.name == "cluster.protocol"]
    assert told == ([f"Check was refused: {why}"] if why else [])


async def test_open_services_and_callers_that_may_be_silent_are_let_in() -> None:
    await called(inside_gates("", "worker d", (HEALTH,)), ((HEADER, "9-9"),), None)
    gate = ProtocolGate("the controller", may_be_silent=True)
    await called((gate,), (), None)
    await called((gate,), ((HEADER, "9-9"),), "the controller speaks protocol 1; its caller speaks 9")


async def test_who_does_not_know_the_token_learns_no_version() -> None:
    with pytest.raises(PermissionDenied, match="wants the token"):
        await call(inside_gates("secret", "worker d"), ((HEADER, "9-9"),))


async def called(gates: object, metadata: tuple[tuple[str, str], ...], why: str | None) -> None:
    """Calls twice; each call goes through, or is refused because of that."""
    if why is None:
        await call(gates, metadata)
    else:
        with pytest.raises(IncompatibleProtocol) as refused:
            await call(gates, metadata)
        assert refused.value.message.startswith(why)


async def call(gates: object, metadata: tuple[tuple[str, str], ...]) -> None:
    """Two calls one after the other; raises the second one's error."""
    server, port = rpc.create_server(interceptors=gates)  # type: ignore[arg-type]
    servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await server.start()
    error = None
    async with rpc.create_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(2):
            try:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), metadata=metadata)
            except Exception as failure:
                error = rpc.from_rpc_error(failure)  # type: ignore[arg-type]
    await server.stop(None)
    if error is not None:
        raise error
