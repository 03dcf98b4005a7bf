"""`baton top`: what it shows of a router that is scripted, and how it lives on a terminal."""

from __future__ import annotations

import io
import os
import pty
import signal
import time
from unittest.mock import Mock

import pytest
from rich.console import Console
from scripted_router import ScriptedRouter, baton, read_until, start_baton

from cli import top
from cli.top_view import Seen, render
from cluster.errors import BatonError, DeadlineExceeded, Unavailable
from cluster.pb import admin_pb2, worker_pb2

LATER_S = 0.3


def cluster() -> admin_pb2.GetStatusResponse:
    stats = worker_pb2.WorkerStats(blocks_free=512, blocks_held=256, blocks_cached=256, blocks_total=1024)
    stats.num_running_seqs, stats.num_waiting_requests = 7, 2
    state = admin_pb2.WorkerStatus
    workers = [
        state(worker_id="decode-0", state=state.STATE_READY, stats=stats, role=worker_pb2.ROLE_DECODE),
        state(worker_id="decode-1", state=state.STATE_LOST, role=worker_pb2.ROLE_DECODE),
        state(worker_id="prefill-0", state=state.STATE_READY, stats=stats, role=worker_pb2.ROLE_PREFILL),
    ]
    router = admin_pb2.RouterStatus(num_queued=3, max_queued=1024, num_running=5, num_finished=40, uptime_s=3725)
    return admin_pb2.GetStatusResponse(
        model="bard", router_address="127.0.0.1:50051", workers=workers, router=router, config_version=4
    )


def life(number: int, *phases: tuple[str, float], **fields: object) -> admin_pb2.RequestLife:
    told = [admin_pb2.LifePhase(state=state, at_s=at_s) for state, at_s in phases]
    return admin_pb2.RequestLife(number=number, outcome=phases[-1][0], phases=told, **fields)  # type: ignore[arg-type]


def activity() -> admin_pb2.GetActivityResponse:
    quantiles = admin_pb2.Quantiles(count=9, p50=0.0421, p95=0.25, p99=1.5)
    seconds = [
        admin_pb2.ActivitySecond(number=n, duration_s=1, num_output_tokens=100 * n, ttft=quantiles) for n in (1, 2, 4)
    ]
    window = admin_pb2.ActivitySecond(
        duration_s=60, num_finished=90, num_failed=1, num_rejected=2, num_output_tokens=12_000, ttft=quantiles
    )
    whole = (("queued", 0.0), ("prefilling", 0.25), ("transferring", 0.5), ("decoding", 0.625), ("finished", 1.0))
    requests = [
        life(1, *whole, prefill_id="prefill-0", decode_id="decode-0", num_output_tokens=44, first_token_s=0.5),
        life(2, ("queued", 0.0), ("rejected", 0.0)),
    ]
    pairs = [
        admin_pb2.PairActivity(prefill_id="prefill-0", decode_id="decode-0", num_handed_over=90, kv_transfer=quantiles)
    ]
    rates = [admin_pb2.WorkerRates(worker_id="decode-0", decode_tokens_per_s=1234.5, kv_received_bytes_per_s=2.5e6)]
    return admin_pb2.GetActivityResponse(
        life="a", seconds=seconds, window=window, requests=requests, pairs=pairs, rates=rates
    )


def words(text: str, beginning: str) -> str:
    lines = (" ".join(line.split()) for line in text.splitlines())
    return next(line for line in lines if line.startswith(beginning))


def test_it_is_printed_once_where_the_output_is_no_terminal(router: ScriptedRouter) -> None:
    router.status, router.activity = cluster(), activity()
    for arguments in ((), ("--once",), ("--interval", "0.2")):
        done = baton("top", "--address", router.address, *arguments)
        assert (done.exit_code, done.stderr) == (0, "")
    out = done.stdout
    assert out.splitlines()[0] == "bard at 127.0.0.1:50051, up 01:02:05, 1:2, configuration 4"
    assert words(out, "requests") == (
        "requests 1.5/s, 5 running, 3 of 1024 queued, 40 finished, 3 failed or rejected in the last minute"
    )
    assert words(out, "tokens") == "tokens 200/s output, 0/s prompt"
    assert words(out, "TTFT p50 █") == "TTFT p50 ███ most 42.1 ms"
    assert words(out, "TTFT p50 42") == "TTFT p50 42.1 ms, p95 250 ms, p99 1.50 s" and words(out, "ITL ") == "ITL -"
    assert words(out, "output/s") == "output/s ▃▅█ most 400"
    assert words(out, "prefill-0 prefill") == "prefill-0 prefill ready ███▒▒▒······ 25% 7 2 0 0 0 B/s 0 B/s"
    assert words(out, "decode-0 decode") == "decode-0 decode ready ███▒▒▒······ 25% 7 2 0 1,234 0 B/s 2.5 MB/s"
    assert words(out, "decode-1") == "decode-1 decode lost - - - 0 0 0 B/s 0 B/s"
    assert words(out, "prefill-0 decode-0") == "prefill-0 decode-0 0 90 0 42.1 ms 250 ms"
    expected = "q" * 8 + "p" * 8 + "h" * 4 + "d" * 12
    assert words(out, "finished") == f"finished {expected} 1.00 s 500 ms 0 0 44 prefill-0 > decode-0"
    assert words(out, "rejected") == "rejected q 0.0 ms - 0 0 0 -"


def test_tiers_below_the_pools_have_a_column_each(router: ScriptedRouter) -> None:
    router.status, router.activity = cluster(), activity()
    router.status.workers[0].stats.tiers.add(tier="host", blocks_kept=30, blocks_total=40)
    out = baton("top", "--address", router.address).stdout
    assert words(out, "worker role").endswith(" host")
    assert words(out, "decode-0 decode").endswith(" 75%") and words(out, "prefill-0 prefill").endswith(" -")


@pytest.mark.parametrize("command", ["top", "status"])
def test_a_cluster_without_its_controller_says_what_that_means(router: ScriptedRouter, command: str) -> None:
    router.status, router.activity = cluster(), activity()
    router.status.router.controller_silent_s = 2.0
    assert "no controller" not in baton(command, "--address", router.address).stdout
    router.status.router.controller_silent_s = 61.4
    out = " ".join(baton(command, "--address", router.address).stdout.split())
    assert "no controller for 61 s: requests are served, but nothing that ends is started again" in out


def test_a_router_without_workers_and_one_that_nobody_answers_for(router: ScriptedRouter, nobody: str) -> None:
    done = baton("top", "--once", "--address", router.address)
    assert done.exit_code == 0 and "0:0" in done.stdout and "worker" in done.stdout
    gone = baton("top", "--address", nobody)
    assert (gone.exit_code, gone.stdout) == (4, "") and f"nobody answers at {nobody}" in gone.stderr
    assert baton("top", "--interval", "0").exit_code == 2


def test_a_restarted_router_begins_anew_and_others_are_asked_for_what_is_new() -> None:
    seen = Seen()
    assert seen.since() == admin_pb2.GetActivityRequest()
    seen.note(cluster(), activity())
    assert seen.since() == admin_pb2.GetActivityRequest(life="a", after_second=4, after_request=2)
    seen.note(cluster(), admin_pb2.GetActivityResponse(life="a", requests=[life(3, ("queued", 0), ("failed", 1))]))
    assert [request.number for request in seen.requests] == [1, 2, 3] and len(seen.seconds) == 3
    seen.note(cluster(), admin_pb2.GetActivityResponse(life="b"))
    assert not seen.requests and not seen.seconds


@pytest.mark.parametrize("width", [40, 80, 111, 112, 200])
def test_it_fits_the_terminal(width: int) -> None:
    seen = Seen()
    seen.note(cluster(), activity())
    console = Console(width=width, height=30, force_terminal=True, color_system="standard")
    with console.capture() as captured:
        console.print(render(seen, console))
    assert ("KV in" in captured.get()) == (width >= 112)
    plain = Console(width=width, color_system=None)
    with plain.capture() as captured:
        plain.print(render(seen, plain))
    assert max(map(len, captured.get().splitlines())) <= width
    assert ("…" in captured.get()) == (width < 80), "what is cut off cannot be read"


@pytest.mark.parametrize("error", [Unavailable("gone"), DeadlineExceeded("gone")])
def test_a_router_that_is_gone_or_hangs_is_asked_again(monkeypatch: pytest.MonkeyPatch, error: BatonError) -> None:
    monkeypatch.setattr(top, "poll", Mock(side_effect=[error, KeyboardInterrupt()]))
    seen, output = Seen(), io.StringIO()
    seen.note(cluster(), activity())
    top._watch(Console(file=output, force_terminal=True, width=100), Mock(), seen, 0.0)
    assert "no answer, this is how it was: gone" in output.getvalue()


def test_on_a_terminal_it_is_drawn_again_says_when_nobody_answers_and_ctrl_c_ends_it(router: ScriptedRouter) -> None:
    router.status = cluster()
    master, slave = pty.openpty()
    try:
        arguments = ("top", "--address", router.address, "--interval", str(LATER_S))
        with start_baton(*arguments, stdin=slave, stdout=slave, stderr=slave) as process:
            os.close(slave)
            read_until(master, b"40 finished")
            router.status.router.num_finished = 41
            seen = read_until(master, b"41 finished")
            assert b"Traceback" not in seen
            begun = time.monotonic()
            process.send_signal(signal.SIGINT)
            rest = read_until(master, b"\x1b[?1049l")  # the terminal's own screen is back
            assert process.wait(20) == 0 and b"Traceback" not in rest
            assert time.monotonic() - begun < 15
    finally:
        os.close(master)
