"""Links between two workers: how they begin, how each way of ending is noticed, and that each ends once.

Real gRPC on loopback. Faults are made by a relay between the two that holds bytes back or resets the connection.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from statistics import median
from typing import Any

import grpc
import psutil
import pytest
from connection_harness import LAYOUT, SOON_S, TIMING, End, abort, handshake, two_ends
from relay import relayed

from cluster import rpc
from cluster.errors import IncompatibleProtocol
from cluster.failure_detector import FailureTimeouts
from cluster.pb import handoff_pb2, handoff_pb2_grpc

pytestmark = pytest.mark.asyncio

PATIENT = FailureTimeouts(heartbeat_s=0.5, suspect_after_s=20.0, dead_after_s=60.0)
"""For tests in which silence must not be what ends a link."""
AT_ONCE_S = 2.0
"""On a machine however busy; no silence ends a link before 60 s in these tests."""


def to_receiver(reason: str) -> handoff_pb2.SenderMessage:
    return handoff_pb2.SenderMessage(abort=abort(reason))


def to_sender(reason: str) -> handoff_pb2.ReceiverMessage:
    return handoff_pb2.ReceiverMessage(abort=abort(reason))


async def opened(p: End, d: End, address: str, epoch: str = "e") -> None:
    p.open(epoch, address, d.handshake.incarnation)
    await p.wait_until_said("greeted")
    await d.wait_until_said("called")


async def test_both_sides_learn_what_was_agreed() -> None:
    small = handshake("d", transports=("gloo",), chunk_tokens=64, num_slots=8)
    async with two_ends(receiver=small) as (p, d, address):
        await opened(p, d, address)
        ((epoch, greeting),) = p.said("greeted")
        assert d.said("called") == [("e", p.handshake.hello("e"), greeting)]
        assert epoch == "e"
        assert (greeting.worker_id, greeting.transport, greeting.wire_format) == ("d", "gloo", "native")
        assert (greeting.chunk_tokens, greeting.num_slots) == (64, 4)
        assert "shm" in greeting.transport_reason


@pytest.mark.parametrize(("sender", "receiver"), [("1-2", "1-1"), ("1-1", "1-2"), ("", "1-2"), ("2-3", "3-9")])
async def test_two_versions_that_have_one_protocol_in_common_connect(sender: str, receiver: str) -> None:
    ends = two_ends(sender=handshake("p", protocol=sender), receiver=handshake("d", protocol=receiver))
    async with ends as (p, d, address):
        await opened(p, d, address)


@pytest.mark.parametrize(("sender", "receiver", "older"), [("2-3", "1-1", "d"), ("1-2", "3-3", "p"), ("", "2-2", "p")])
async def test_a_worker_of_another_protocol_is_refused_by_name_for_good(sender: str, receiver: str, older: str) -> None:
    ends = two_ends(sender=handshake("p", protocol=sender), receiver=handshake("d", protocol=receiver))
    async with ends as (p, d, address):
        p.open("e", address, d.handshake.incarnation)
        _, why, is_final = await p.wait_until_said("ended")
        assert is_final and why.startswith("worker p speaks protocol ")
        assert why.endswith(f": upgrade worker {older} first")
        assert not d.said("called")


async def test_a_receiver_of_another_protocol_that_does_not_say_no_is_refused_by_the_sender() -> None:
    """One from before the handshake was made looks at no version."""
    own = handshake("p", protocol="2-2")
    answer = handshake("d", protocol="2-2").answer(own.hello("e"))
    own.check(answer)
    answer.protocol = ""
    with pytest.raises(IncompatibleProtocol, match="worker d speaks protocol 1; worker p speaks 2: upgrade worker d f"):
        own.check(answer)


async def test_messages_arrive_in_order_in_both_directions() -> None:
    async with two_ends() as (p, d, address):
        p.open("e", address, d.handshake.incarnation)
        for number in range(100):
            p.send("e", to_receiver(f"there {number}"))
        await d.wait_for(lambda: len(d.heard()) == 100)
        for number in range(100):
            d.send("e", to_sender(f"back {number}"))
        await p.wait_for(lambda: len(p.heard()) == 100)
        assert d.heard() == [f"there {n}" for n in range(100)]
        assert p.heard() == [f"back {n}" for n in range(100)]


async def test_a_quiet_link_stays_up_by_heartbeats_alone() -> None:
    async with two_ends() as (p, d, address):
        await opened(p, d, address)
        until = p.num_ticks + 2 * TIMING.dead_after_s / TIMING.tick_s
        await p.wait_for(lambda: p.num_ticks >= until)
        p.send("e", to_receiver("still here"))
        await d.wait_for(d.heard)
        assert not p.said("suspected") + d.said("suspected") + p.said("ended") + d.said("ended")


async def test_a_link_closed_on_one_side_is_down_on_both_at_once_and_once() -> None:
    took_s = []
    async with two_ends(timing=PATIENT) as (p, d, address):
        for closer, other in ((p, d), (d, p)) * 3:
            p.events.clear()
            d.events.clear()
            await opened(p, d, address)
            closed_at = time.monotonic()
            closer.close_connection("e")
            await other.wait_until_said("ended")
            took_s.append(other.time_of("ended") - closed_at)
            assert closer.said("ended") == [("e", "it is not needed any more", False)]
            closer.close_connection("e")
            other.send("e", to_sender("too late"))
            assert len(closer.said("ended")) == len(other.said("ended")) == 1
    assert median(took_s) < AT_ONCE_S, took_s


async def test_a_connection_that_is_reset_is_down_on_both_sides_at_once() -> None:
    took_s = []
    async with two_ends(timing=PATIENT) as (p, d, address), relayed(address) as (relay, through):
        for _ in range(3):
            p.events.clear()
            d.events.clear()
            await opened(p, d, through)
            reset_at = time.monotonic()
            relay.reset()
            for end in (p, d):
                await end.wait_until_said("ended")
                took_s.append(end.time_of("ended") - reset_at)
                assert [event[2] for event in end.said("ended")] == [False]
    assert median(took_s) < AT_ONCE_S, took_s


async def test_a_silent_connection_is_suspected_and_then_given_up_by_both_sides() -> None:
    async with two_ends() as (p, d, address), relayed(address) as (relay, through):
        await opened(p, d, through)
        silent_since = time.monotonic()
        relay.hold()
        for end in (p, d):
            await end.wait_until_said("ended")
            assert end.said("suspected") == [("e", True)]
            assert TIMING.suspect_after_s * 0.5 < end.time_of("suspected") - silent_since
            assert end.time_of("ended") - silent_since > TIMING.dead_after_s * 0.5
            assert re.search(r"silent for \d+\.\d", end.said("ended")[0][1])
        assert relay.num_bytes_held > 0


async def test_a_peer_that_speaks_again_is_no_suspect_any_more() -> None:
    patient = dataclasses.replace(TIMING, dead_after_s=60.0)
    async with two_ends(timing=patient) as (p, d, address), relayed(address) as (relay, through):
        await opened(p, d, through)
        relay.hold()
        await p.wait_for(lambda: p.said("suspected"))
        relay.release()
        await p.wait_for(lambda: len(p.said("suspected")) == 2)
        assert p.said("suspected") == [("e", True), ("e", False)]
        p.send("e", to_receiver("fine"))
        await d.wait_for(d.heard)


async def test_a_loop_that_was_stopped_itself_does_not_give_its_peers_up() -> None:
    async with two_ends() as (p, d, address):
        await opened(p, d, address)
        p.is_beating = d.is_beating = False
        for end in (p, d):  # what a tick after SIGCONT sees: the clock is far ahead, and nothing was read yet
            end.streams.tick(100 * TIMING.dead_after_s)
        p.is_beating = d.is_beating = True
        p.send("e", to_receiver("back"))
        await d.wait_for(d.heard)
        assert not p.said("ended") + d.said("ended")


async def test_a_refused_connection_is_down_at_once_and_a_worker_started_there_is_reached_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    p, d = End(handshake("p"), PATIENT), End(handshake("d"), PATIENT)
    p.start_beating()
    try:
        asked_at = time.monotonic()
        for attempt in range(5):  # gRPC would wait longer after each failure, seven seconds in all
            p.open(f"e{attempt}", f"127.0.0.1:{port}", d.handshake.incarnation)
            await p.wait_for(lambda count=attempt + 1: len(p.said("ended")) == count)
        assert time.monotonic() - asked_at < AT_ONCE_S
        assert not any(is_final for _, _, is_final in p.said("ended"))
        await d.serve(port)
        asked_at = time.monotonic()
        await opened(p, d, f"127.0.0.1:{port}", "now")
        assert time.monotonic() - asked_at < AT_ONCE_S
    finally:
        await p.close()
        await d.close()


async def test_an_address_that_never_answers_is_given_up_like_a_silent_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        p = End(handshake("p"))
        p.start_beating()
        try:
            p.open("e", f"127.0.0.1:{mute.getsockname()[1]}", "life")
            _, why, is_final = await p.wait_until_said("ended")
            assert "silent" in why
            assert not is_final
            assert not p.said("suspected")
        finally:
            await p.close()


async def test_a_later_life_of_the_decode_worker_is_not_taken_for_the_chosen_one() -> None:
    async with two_ends() as (p, d, address):
        p.open("e", address, "an earlier life")
        _, why, is_final = await p.wait_until_said("ended")
        assert "restarted" in why
        assert not is_final
        assert not p.said("greeted")
        await d.wait_until_said("ended")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layout": dataclasses.replace(LAYOUT, num_layers=5)}, ["4 layers", "5 layers"]),
        ({"layout": dataclasses.replace(LAYOUT, model="m@2")}, ["m@1", "m@2"]),
        ({"layout": dataclasses.replace(LAYOUT, dtype="float16")}, ["float32", "float16"]),
        ({"transports": ("nccl",)}, ["shm, gloo", "nccl"]),
        ({"transports": ("shm",), "host_id": "elsewhere"}, ["shm", "different hosts"]),
        ({"wire_format": "int8"}, ["native", "int8"]),
    ],
    ids=["layers", "weights", "dtype", "transport", "host", "wire format"],
)
async def test_workers_that_do_not_fit_are_told_so_for_good(change: dict[str, Any], named: list[str]) -> None:
    async with two_ends(receiver=handshake("d", **change)) as (p, d, address):
        p.open("e", address, d.handshake.incarnation)
        epoch, why, is_final = await p.wait_until_said("ended")
        assert epoch == "e"
        assert is_final
        assert all(text in why for text in named), why
        assert not d.events


@asynccontextmanager
async def raw_call(address: str) -> AsyncIterator[Any]:
    """A stream on which a test says whatever it likes."""
    async with rpc.create_channel(address) as channel:
        yield handoff_pb2_grpc.HandoffServiceStub(channel).Connect()


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """The status that ends a call, whatever was said before it."""
    async with asyncio.timeout(SOON_S):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
    return caught.value.code(), caught.value.details()


def hello(epoch: str = "e", number: int = 1) -> handoff_pb2.SenderMessage:
    return handoff_pb2.SenderMessage(number=number, hello=handshake("p").hello(epoch))


async def test_a_message_that_comes_twice_is_heard_once() -> None:
    async with two_ends(timing=PATIENT) as (_, d, address), raw_call(address) as call:
        for number in (1, 1, 2, 2, 1, 3):
            message = hello() if number == 1 else to_receiver(str(number))
            message.number = number
            await call.write(message)
        await d.wait_for(lambda: len(d.heard()) == 2)
        assert d.heard() == ["2", "3"]
        assert len(d.said("called")) == 1


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (handoff_pb2.SenderMessage(number=3, abort=abort("3")), "message 2 of the stream is missing"),
        (handoff_pb2.SenderMessage(number=0, abort=abort("0")), "message 2 of the stream is missing"),
        (handoff_pb2.SenderMessage(number=2), "makes no sense here: an empty one"),
        (hello(number=2), "makes no sense here: hello"),
    ],
    ids=["gap", "no number", "empty", "second hello"],
)
async def test_a_message_that_cannot_be_ends_the_stream(bad: handoff_pb2.SenderMessage, why: str) -> None:
    async with two_ends(timing=PATIENT) as (_, d, address), raw_call(address) as call:
        await call.write(hello())
        await d.wait_until_said("called")
        await call.write(bad)
        assert why in (await d.wait_until_said("ended"))[1]
        code, details = await refusal(call)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert why in details
        assert not d.heard()


async def test_bytes_that_are_no_message_end_the_stream() -> None:
    async with two_ends(timing=PATIENT) as (_, d, address), rpc.create_channel(address) as channel:
        call = channel.stream_stream("/baton.internal.v1.HandoffService/Connect")()
        await call.write(hello().SerializeToString())
        await d.wait_until_said("called")
        await call.write(b"\xff\xff\xff\xff")
        await d.wait_until_said("ended")
        assert not d.heard()


@pytest.mark.parametrize("first", [to_receiver("no hello"), hello(number=2), hello(epoch="")], ids=str)
async def test_a_stream_that_does_not_begin_with_hello_is_refused(first: handoff_pb2.SenderMessage) -> None:
    async with two_ends(timing=PATIENT) as (_, d, address), raw_call(address) as call:
        await call.write(first)
        assert (await refusal(call))[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert not d.events


async def test_a_caller_that_says_nothing_is_refused() -> None:
    async with two_ends() as (_, d, address), raw_call(address) as call:
        assert (await refusal(call))[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert not d.events


async def test_an_epoch_that_is_in_use_is_refused_and_the_link_that_has_it_goes_on() -> None:
    async with two_ends(timing=PATIENT) as (p, d, address), raw_call(address) as call:
        await opened(p, d, address, "e")
        await call.write(hello("e"))
        assert (await refusal(call))[0] is grpc.StatusCode.INVALID_ARGUMENT
        p.send("e", to_receiver("mine"))
        await d.wait_for(d.heard)
        assert len(d.said("called")) == 1


async def test_a_link_closed_before_it_could_begin_is_down_once() -> None:
    async with two_ends() as (p, d, address):
        p.open("e", address, d.handshake.incarnation)
        p.close_connection("e")
        assert p.said("ended") == [("e", "it is not needed any more", False)]
        p.open("e2", address, d.handshake.incarnation)
        await p.wait_until_said("greeted")
        assert len(p.said("ended")) == 1


async def test_at_the_end_every_link_is_down_on_both_sides() -> None:
    async with two_ends(timing=PATIENT) as (p, d, address):
        for number in range(3):
            p.open(f"e{number}", address, d.handshake.incarnation)
        await p.wait_for(lambda: len(p.said("greeted")) == 3)
        await d.streams.close()
        await p.wait_for(lambda: len(p.said("ended")) == 3)
        assert len(d.said("ended")) == 3
        assert all("stopping" in why for _, why, _ in p.said("ended"))


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """In a process full of tensors it comes rarely: what only it would free is as good as leaked."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_links_that_ended_leave_no_task_and_no_connection_behind(no_garbage_collection: None) -> None:
    process = psutil.Process()
    async with two_ends(timing=PATIENT) as (p, d, address):
        await opened(p, d, address, "first")
        num_tasks, num_connections = len(asyncio.all_tasks()), len(process.net_connections("tcp"))
        for number in range(40):
            p.events.clear()
            d.events.clear()
            await opened(p, d, address, f"e{number}")
            (p if number % 2 else d).close_connection(f"e{number}")
            for end in (p, d):
                assert (await end.wait_until_said("ended"))[0] == f"e{number}"
        async with asyncio.timeout(SOON_S):
            while len(asyncio.all_tasks()) > num_tasks or len(process.net_connections("tcp")) > num_connections:
                await p.wait_for_tick()
        p.send("first", to_receiver("untouched"))
        await d.wait_for(d.heard)
