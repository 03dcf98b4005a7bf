"""The rank protocol's connections under TLS: frames in both directions at one time, and peers that are refused."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from certificates import Authority

from cluster.errors import Unavailable
from cluster.pb import rank_pb2
from cluster.tls import InternalTls
from worker.rank_socket import RankConnection, TlsConnection, accept, connect, hello, read_frame, write_frame

SOON_S = 20.0


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def met(server: InternalTls | None, client: InternalTls | None) -> tuple[RankConnection, RankConnection]:
    """Both ends; raises what the server's side raised, else the client's."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(SOON_S)
        host, port = listener.getsockname()
        dialling = pool.submit(connect, f"{host}:{port}", SOON_S, client)
        try:
            here = accept(listener, server)
            here.settimeout(None)
        except BaseException:
            if dialling.exception() is None:
                dialling.result().close()
            raise
        return here, dialling.result()


def test_frames_go_both_ways_at_one_time(ours: Authority) -> None:
    """Neither side waits for the other to have read: one reading thread and two writing ones on each end."""
    here, there = met(ours.internal(), ours.internal())
    assert isinstance(here, TlsConnection)
    num_frames, size = 40, 300_000
    heard: dict[str, list[tuple[int, bytes]]] = {"here": [], "there": []}

    def write(connection: RankConnection, first: int, lock: threading.Lock) -> None:
        for number in range(first, first + num_frames):
            frame = rank_pb2.RankCommand(number=number, step=bytes([number % 256]) * size)
            with lock:
                write_frame(connection, frame)

    def read(name: str, connection: RankConnection) -> None:
        for _ in range(2 * num_frames):
            command = read_frame(connection, rank_pb2.RankCommand)
            heard[name].append((command.number, command.step))

    jobs: list[Callable[[], None]] = []
    for name, connection in (("here", here), ("there", there)):
        lock = threading.Lock()
        jobs.append(lambda name=name, connection=connection: read(name, connection))  # type: ignore[misc]
        for first in (0, num_frames):
            jobs.append(lambda c=connection, f=first, k=lock: write(c, f, k))  # type: ignore[misc]
    with ThreadPoolExecutor(len(jobs)) as pool:
        for job in [pool.submit(job) for job in jobs]:
            job.result(60)
    for frames in heard.values():
        assert sorted(number for number, _ in frames) == list(range(2 * num_frames))
        assert all(step == bytes([number % 256]) * size for number, step in frames)
    here.close()
    with pytest.raises(Unavailable, match="closed its connection"):
        read_frame(there, rank_pb2.RankReply)
    there.close()


def test_what_travels_is_not_what_was_written(ours: Authority) -> None:
    """Between two connections a tap that passes bytes on and keeps them."""
    a, tap_a = socket.socketpair()
    b, tap_b = socket.socketpair()
    seen = bytearray()

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(BrokenPipeError):  # TLS sends its tickets late: the end may be shut by then
            while data := source.recv(65536):
                seen.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    secret = b"what rank 0 said to rank 1"
    with ThreadPoolExecutor(3) as pool:
        taps = [pool.submit(pass_on, tap_a, tap_b), pool.submit(pass_on, tap_b, tap_a)]
        dialling = pool.submit(TlsConnection, a, ours.internal(), is_server=False)
        there = TlsConnection(b, ours.internal(), is_server=True)
        here = dialling.result(SOON_S)
        write_frame(here, rank_pb2.RankCommand(step=secret))
        assert read_frame(there, rank_pb2.RankCommand).step == secret
        a.shutdown(socket.SHUT_RDWR)
        b.shutdown(socket.SHUT_RDWR)
        for tap in taps:
            tap.result(SOON_S)
    assert len(seen) > 1000 and secret not in seen
    for end in (a, b, tap_a, tap_b):
        end.close()


@pytest.mark.parametrize("kind", ["plain", "theirs", "expired", "other name"])
def test_a_server_or_client_that_is_not_of_the_cluster_is_refused(kind: str, ours: Authority, tmp_path: Path) -> None:
    theirs = Authority(tmp_path)
    other = {
        "plain": lambda: None,
        "theirs": lambda: InternalTls(*theirs.issue("baton"), ours.file),
        "expired": lambda: ours.internal(is_expired=True),
        "other name": lambda: ours.internal("somebody"),
    }[kind]()
    with pytest.raises(Unavailable, match="no TLS with a peer"):
        _, there = met(other, ours.internal()) if other is not None else plain_server(ours.internal())
        read_frame(there, rank_pb2.RankReply)
    if kind != "other name":  # a client's name is nobody's address; its authority signs for the cluster only
        with pytest.raises(Unavailable, match="no TLS with a peer"):
            met(ours.internal(), other) if other is not None else met_by_bytes(ours.internal())


def plain_server(client: InternalTls) -> tuple[RankConnection, RankConnection]:
    """A peer that answers with bytes of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        dialling = pool.submit(connect, "{}:{}".format(*listener.getsockname()), SOON_S, client)
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            return sock, dialling.result()


def met_by_bytes(server: InternalTls) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SOON_S)
        with socket.create_connection(listener.getsockname()) as sock:
            sock.sendall(b"\0\0\0\x10GET / HTTP/1.1\r\n")
            accept(listener, server)


@pytest.mark.parametrize("has_tls", [True, False])
def test_a_peer_that_says_nothing_is_given_up(has_tls: bool, ours: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent stranger at the rank port once stopped a worker's start for ever."""
    monkeypatch.setattr("worker.rank_socket.HELLO_S", 0.2)
    why = "timed out" if has_tls else r"said nothing for 0\.2 s; it is turned away"
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
        pytest.raises(Unavailable, match=why),
    ):
        hello(accept(listener, ours.internal() if has_tls else None))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (rank_pb2.RankHello(tp_rank=1, token="a guess"), "without the token of this cluster"),
        (rank_pb2.RankHello(tp_rank=1), "without the token of this cluster"),
        (rank_pb2.RankHello(tp_rank=1, host="h" * 70_000), "over the limit of 65536"),
        (None, "closed its connection"),
    ],
    ids=["wrong token", "no token", "large", "hangs up"],
)
def test_a_peer_that_is_not_of_the_cluster_is_turned_away(said: rank_pb2.RankHello | None, why: str) -> None:
    here, there = met(None, None)
    if said is None:
        there.close()
    else:
        write_frame(there, rank_pb2.RankReply(hello=said))
    with pytest.raises(Unavailable, match=why):
        hello(here, "the token")
    assert isinstance(here, socket.socket) and here.fileno() == -1, "it is closed"
    there.close()


def test_a_peer_with_the_token_is_heard_for_as_long_as_it_takes() -> None:
    here, there = met(None, None)
    here.settimeout(0.2)
    write_frame(there, rank_pb2.RankReply(hello=rank_pb2.RankHello(tp_rank=1, token="the token")))
    assert hello(here, "the token").tp_rank == 1
    assert isinstance(here, socket.socket) and here.gettimeout() is None
    for end in (here, there):
        end.close()


def test_without_tls_it_is_the_socket_itself() -> None:
    here, there = met(None, None)
    write_frame(here, rank_pb2.RankReply(number=7))
    assert read_frame(there, rank_pb2.RankReply).number == 7
    here.close()
    there.close()
