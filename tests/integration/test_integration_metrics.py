"""The pages of two real workers: what they say of hand-offs that worked, of a cancelled one, of one whose peer died."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families
from workers import ROOT, Process, Worker, hand_off, running, sampling

from cluster.pb import generation_pb2, worker_pb2
from engine.model_cost import ModelFlops, WeightForm
from engine.models.folder import read_model

MODEL = str(ROOT / "models" / "tiny-shakespeare")
NUM_HANDOFFS = 20
NUM_SLOTS = 3
BLOCKS = 128
PROMPT = [(i * 37) % 1000 + 5 for i in range(101)]
LONG = [(i * 13) % 1000 + 4 for i in range(1500)]
PREFILLING = generation_pb2.Heartbeat.PHASE_PREFILL

Page = dict[tuple[str, ...], float]
"""(metric without `baton_kv_`, values of its labels...) -> value."""


def worker(role: str, **settings: object) -> Worker:
    defaults = {"kv_cache_tokens": BLOCKS * 16, "max_num_batched_tokens": 48, "chunk_tokens": 32, "metrics_port": 0}
    more = {"num_slots": NUM_SLOTS, **settings}
    return Worker(worker_id=f"{role}-0", role=role, model_path=MODEL, **{**defaults, **more})


def read(one: Worker) -> Page:
    try:
        with urllib.request.urlopen(f"http://{one.info.metrics_address}/metrics", timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    except OSError as error:
        raise AssertionError(f"{error}; the worker says {one.ranks[0].stderr()}") from error
    samples = [sample for family in families for sample in family.samples]
    return {(s.name.removeprefix("baton_kv_"), *s.labels.values()): s.value for s in samples}


def settled(one: Worker, condition: Callable[[Page], object]) -> Page:
    """The page as soon as `condition` holds of it; one without blocks was read while the worker was too busy to say
    what it holds."""
    deadline, never = time.monotonic() + 20, threading.Event()
    while ("blocks", "held") not in (page := read(one)) or not condition(page):
        assert time.monotonic() < deadline, page
        never.wait(0.01)
    return page


def is_quiet(page: Page) -> bool:
    """Nothing under way, nothing held, every slot of the open pairs free."""
    handoffs = page["handoffs", "send"] + page["handoffs", "receive"]
    states = [("slots", "send", s) for s in ("gathering", "offered", "sending", "quarantined")]
    states += [("slots", "receive", s) for s in ("posted", "landed", "quarantined")]
    return (
        not handoffs
        and not page["blocks", "held"]
        and not any(page[state] for state in [*states, ("quarantined_bytes",)])
    )


def knows_its_peak(page: Page) -> bool:
    """Quiet, and read once with no step under way, which is when a CPU's peak is measured."""
    return is_quiet(page) and ("baton_device_peak_flops",) in page


def failures(page: Page) -> dict[str, float]:
    return {key[1]: value for key, value in page.items() if key[0] == "transfer_failures_total" and value}


@pytest.mark.timeout(180)
def test_the_pages_of_two_workers_tell_of_hand_offs_a_cancel_and_a_death() -> None:
    with running(worker("prefill"), worker("decode")) as (prefill, decode):
        assert decode.info.metrics_address != prefill.info.metrics_address
        for number in range(NUM_HANDOFFS):
            key = hand_off(
                f"r{number}", PROMPT, prefill, decode, sampling(max_output_tokens=4), bypass_prefix_cache=True
            )
            decode.wait_for(lambda key=key: decode.outputs[key].finished)
        sender, receiver = settled(prefill, knows_its_peak), settled(decode, knows_its_peak)
        check_twenty(prefill, sender, receiver)
        check_steps(sender, receiver)

        long = hand_off("cancelled", LONG, prefill, decode, sampling(max_output_tokens=4), bypass_prefix_cache=True)
        prefill.wait_for(lambda: PREFILLING in prefill.outputs[long].phases)
        assert read(prefill)["handoffs", "send"] == 1
        for one in (prefill, decode):
            one.send(cancel=worker_pb2.Cancel(key=long.to_proto()))
        sender, receiver = settled(prefill, is_quiet), settled(decode, is_quiet)
        assert set(failures(sender)) <= {"aborted"}  # the decode worker may have been quicker
        assert failures(receiver) == {}
        assert sender["transfer_seconds_count",] == NUM_HANDOFFS
        assert (sender["pairs", "open"], receiver["pairs", "open"]) == (1, 1)

        lost = hand_off("lost", LONG, prefill, decode, sampling(max_output_tokens=4), bypass_prefix_cache=True)
        prefill.wait_for(lambda: PREFILLING in prefill.outputs[lost].phases)
        popen = decode.ranks[0].popen
        os.kill(popen.pid, signal.SIGKILL)
        assert popen.wait(10) == -signal.SIGKILL
        prefill.wait_for(lambda: prefill.outputs[lost].failed)
        sender = settled(prefill, is_quiet)
        assert failures(sender)["peer_lost"] == 1
        assert sender["pairs_retired_total", "peer_lost"] == 1
        assert [sender["pairs", state] for state in ("opening", "open", "suspect", "closing")] == [0, 0, 0, 0]
        assert sender["slots", "send", "free"] == 0


def check_twenty(prefill: Worker, sender: Page, receiver: Page) -> None:
    for name in ("transfer", "transfer_exposed", "commit"):
        assert sender[f"{name}_seconds_count",] == NUM_HANDOFFS, name
        assert 0 < sender[f"{name}_seconds_sum",] < NUM_HANDOFFS * 10, name
        assert receiver[f"{name}_seconds_count",] == 0, name
    assert sender["transfer_exposed_seconds_sum",] <= sender["transfer_seconds_sum",]
    assert sender["grant_seconds_count",] >= NUM_HANDOFFS * len(PROMPT) // 32
    transport = "shm" if sender["transfer_bytes_total", "sent", "shm"] else "gloo"
    sent = sender["transfer_bytes_total", "sent", transport]
    assert sent == receiver["transfer_bytes_total", "received", transport] == prefill.stats.kv_bytes_sent > 0
    assert failures(sender) == failures(receiver) == {}
    assert (sender["pairs", "open"], receiver["pairs", "open"]) == (1, 1)
    assert (sender["slots", "send", "free"], receiver["slots", "receive", "free"]) == (NUM_SLOTS, NUM_SLOTS)
    assert [sender["blocks", "free"] + sender["blocks", "cached"], sender["blocks", "held"]] == [BLOCKS, 0]


def check_steps(sender: Page, receiver: Page) -> None:
    """What the model needs for these steps, and that it took time, on a CPU whose peak was measured."""
    work = ModelFlops.of(read_model(MODEL), 1, WeightForm("float32"), "float32")
    assert sum(value for key, value in sender.items() if key[0] == "baton_step_tokens_total") == NUM_HANDOFFS * 101
    assert receiver["baton_step_tokens_total", "decode"] == NUM_HANDOFFS * 3
    pairs = NUM_HANDOFFS * len(work.windows) * sum(len(PROMPT) + i for i in (1, 2, 3)) * work.windows[0][1]
    needed = NUM_HANDOFFS * 3 * (work.layers_flops + work.head_flops) + pairs * work.pair_flops
    assert receiver["baton_step_flops_total", "decode"] == needed
    steps = receiver["baton_steps_total", "decode"]
    weights = steps * (work.layers_bytes + work.head_bytes)
    assert weights < receiver["baton_step_bytes_total", "decode"] < 2 * weights
    for page, kind in ((sender, "prefill"), (receiver, "decode")):
        seconds = page["baton_step_seconds_total", kind]
        assert 0 < seconds < 60
        of_mfu = page["baton_step_flops_total", kind] / seconds / page["baton_device_peak_flops",]
        of_mbu = page["baton_step_bytes_total", kind] / seconds / page["baton_device_peak_bytes_per_second",]
        assert 0 < of_mfu < 10 and 0 < of_mbu < 10, "a share of what was measured beside other work"
        assert page["baton_mfu_ratio", kind] > 0 and page["baton_mbu_ratio", kind] > 0


def test_a_worker_without_a_metrics_port_names_no_page() -> None:
    with running(worker("decode", metrics_port=None)) as (decode,):
        assert decode.info.metrics_address == ""


def test_a_worker_whose_metrics_port_is_taken_does_not_start_and_says_what_to_do() -> None:
    with running(worker("decode")) as (decode,):
        port = int(decode.info.metrics_address.rpartition(":")[2])
        process = Process("worker", decode.settings.with_values(worker_id="decode-1", metrics_port=port).to_json())
        process.expect("prepared")
        assert process.popen.wait(60) == 3
        assert f"cannot serve metrics on 127.0.0.1:{port}" in process.stderr()
        assert "metrics-port" in process.stderr() or "choose another port" in process.stderr()
        assert process.stop() == 3


def test_a_silent_peer_is_shown_as_suspect_then_as_lost() -> None:
    timing = {"heartbeat_s": 0.2, "suspect_after_s": 0.6, "dead_after_s": 1.5}
    peaks = {"peak_tflops": 2.5, "peak_gb_per_s": 50.0}
    with running(worker("prefill", **timing, **peaks), worker("decode", **timing)) as (prefill, decode):
        given = read(prefill)
        assert (given["baton_device_peak_flops",], given["baton_device_peak_bytes_per_second",]) == (2.5e12, 5e10)
        key = hand_off("first", PROMPT, prefill, decode, sampling(max_output_tokens=4))
        decode.wait_for(lambda: decode.outputs[key].finished)
        assert settled(prefill, is_quiet)["pairs", "open"] == 1
        popen = decode.ranks[0].popen
        os.kill(popen.pid, signal.SIGSTOP)
        try:
            suspecting = settled(prefill, lambda page: page["pairs", "suspect"])
            lost = settled(prefill, lambda page: page["pairs_retired_total", "peer_lost"])
        finally:
            os.kill(popen.pid, signal.SIGCONT)
        assert (suspecting["pairs", "open"], suspecting["slots", "send", "free"]) == (0, NUM_SLOTS)
        assert (lost["pairs", "suspect"], failures(lost)) == (0, {})
        settled(decode, lambda page: is_quiet(page) and page["pairs_retired_total", "peer_lost"] == 1)
