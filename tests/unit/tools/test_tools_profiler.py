"""`baton profile`: what is measured through a router and read off pages, what is taken again, and the file that a plan
reads."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_router import baton

from cluster.errors import ConfigError, FailedPrecondition
from cluster.pb import admin_pb2, generation_pb2, worker_pb2
from cluster.step_cost import StepCost
from simulate.worker_profile import read_profile
from tools import profiler
from tools.profiler import MOST_ROUNDS, Profiler, ProfileSizes, errors_of

COST = StepCost(2e-3, 5e-5, 1e-9, 1e-4, 1e-7)
HOST_S = 0.012
"""What a request takes beside its steps."""
SIZES = ProfileSizes(prompts=(64, 512, 4096), sequences=(1, 4, 16), lengths=(32, 256), num_steps=16, rounds=1)


class TimedCluster:
    """One worker whose steps take the time of a cost, with its page, as its clients and profilers see it."""

    def __init__(
        self,
        *,
        page: str = "127.0.0.1:1",
        extra_steps: int = 0,
        role: worker_pb2.Role = worker_pb2.ROLE_DECODE,
        rank: worker_pb2.RankInfo | None = None,
    ) -> None:
        info = worker_pb2.WorkerInfo(
            worker_id="decode-0",
            role=role,
            ranks=[rank or worker_pb2.RankInfo(device="cpu")],
            model="timed",
            block_size=16,
            num_blocks=256,
            max_model_len=2048,
            max_num_seqs=64,
            dtype="float32",
            metrics_address=page,
        )
        stats = worker_pb2.WorkerStats(num_steps=5, step_cost=COST.to_proto())
        ready = admin_pb2.WorkerStatus.STATE_READY
        self._status = admin_pb2.GetStatusResponse(
            workers=[admin_pb2.WorkerStatus(worker_id="decode-0", state=ready, info=info, stats=stats)]
        )
        self.noise: Callable[[], float] = lambda: 1.0
        """How many times longer a step takes than its cost."""
        self._extra_steps = extra_steps
        """Steps of others in each request."""
        self._sums: dict[tuple[str, str], float] = defaultdict(float)
        self.now = 0.0

    @property
    def busy_s(self) -> float:
        return sum(seconds for (name, _), seconds in self._sums.items() if name == "step_seconds")

    def status(self) -> admin_pb2.GetStatusResponse:
        return self._status

    def models(self) -> list[Any]:
        return [SimpleNamespace(vocab_size=100)]

    def generate(self, spec: generation_pb2.GenerationSpec, *, timeout_s: float) -> generation_pb2.GenerateResponse:
        assert spec.cache.bypass_prefix_cache
        num_tokens, count = len(spec.token_ids.ids), spec.sampling.n
        self.now += HOST_S
        self._add("prefill", num_tokens, COST.of_prompt(num_tokens, 0))
        for step in range(1, spec.stopping.max_output_tokens):
            self._add("decode", count, COST.of_sequences(count, count * (num_tokens + step)))
        for _ in range(self._extra_steps):
            self._add("decode", 1, 1.0)
            self._add("prefill", 1, 1.0)
        return generation_pb2.GenerateResponse(ends=[generation_pb2.SequenceEnd(index=n) for n in range(count)])

    def _add(self, kind: str, tokens: int, seconds: float) -> None:
        seconds *= self.noise()
        for name, value in (("steps", 1), ("step_tokens", tokens), ("step_seconds", seconds)):
            self._sums[name, kind] += value
        self.now += seconds

    def fetch(self, *_: object) -> tuple[str, str]:
        lines = [f'baton_{name}_total{{step="{kind}"}} {value!r}' for (name, kind), value in self._sums.items()]
        names = sorted({name for name, _ in self._sums})
        return "", "\n".join([*(f"# TYPE baton_{name}_total counter" for name in names), *sorted(lines), ""])


def profiled(monkeypatch: pytest.MonkeyPatch, cluster: TimedCluster, sizes: ProfileSizes = SIZES) -> dict[str, Any]:
    client: Any = cluster
    monkeypatch.setattr(profiler, "fetch", cluster.fetch)
    monkeypatch.setattr(profiler, "_SETTLE_S", 0.0)
    monkeypatch.setattr(profiler, "time", SimpleNamespace(monotonic=lambda: cluster.now, sleep=lambda _: None))
    return Profiler(client, sizes).measure()


def test_each_size_that_the_worker_allows_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    document = profiled(monkeypatch, TimedCluster())
    steps = [(s["prompt_tokens"], s["sequences"], s["kv_tokens"]) for s in document["steps"]]
    assert steps == [(64, 0, 0), (512, 0, 0), *((0, n, kv + 8) for n in (1, 4, 16) for kv in (32, 256))]
    assert document["fitted_error"]["p90"] < 0.01
    assert document["reported_error"]["p90"] < 0.01
    assert document["worker"]["kv_tokens"] == 4096
    assert errors_of(document) == (
        "a linear cost fits them within 0% (median) and 0% (p90); the worker's own within 0% and 0%; 3.00 ms for each "
        "message to a first token"
    )


def test_a_hand_off_takes_two_messages_more_to_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for role, num_messages in ((worker_pb2.ROLE_DECODE, 4), (worker_pb2.ROLE_PREFILL, 6)):
        document = profiled(monkeypatch, TimedCluster(role=role))
        assert document["message_s"] == pytest.approx(HOST_S / num_messages)


def test_a_profile_is_read_as_a_curve_and_planned_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(profiled(monkeypatch, TimedCluster())))
    found = read_profile(file)
    assert found.curve.kind == "interpolated"
    assert found.worker.max_num_seqs == 64
    options = ("--model", "models/tiny-shakespeare", "--device", "cpu", "--prompt", "200", "--output", "50")
    done = baton("plan", *options, "--profile", str(file), "--json")
    told = json.loads(done.stdout)
    assert told["disaggregated"]["ttft_p50_ms"] == pytest.approx(1000 * COST.of_prompt(200, 0), rel=0.1)
    assert "those of the profile" in baton("plan", *options, "--profile", str(file)).stdout
    load = ("--input-len", "200", "--output-len", "2", "--num-prompts", "5", "--request-rate", "0.1", "--ratio", "0:1")
    done = baton("simulate", *options[:4], *load, "--profile", str(file), "--json")
    assert json.loads(done.stdout)["ttft_s"]["mean"] == pytest.approx(COST.of_prompt(200, 0) + HOST_S, rel=0.05)


def test_sizes_are_measured_until_their_medians_are_steady(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those that are steady are not measured again, and what is left of the noise is pooled away."""
    sizes = replace(SIZES, num_steps=4, rounds=3)
    numbers, errors = [], []
    for noise in (0.0, 0.15):
        cluster, draw = TimedCluster(), random.Random(1)
        cluster.noise = lambda draw=draw, noise=noise: draw.uniform(1 - noise, 1 + noise)  # type: ignore[misc]
        document = profiled(monkeypatch, cluster, sizes)
        file = tmp_path / "profile.json"
        file.write_text(json.dumps(document))
        numbers.append(Counter((s["prompt_tokens"], s["sequences"], s["kv_tokens"]) for s in document["steps"]))
        errors.append(read_profile(file).curve.error.p90)
    quiet, noisy = numbers
    assert set(quiet.values()) == {3}
    assert max(noisy.values()) == 3 * MOST_ROUNDS and 3 <= min(noisy.values()) < 3 * MOST_ROUNDS
    assert errors[0] < 1e-9 and errors[1] < 0.1


def test_a_machine_that_all_workers_share_is_known_by_its_cores_and_by_what_a_step_keeps_busy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Here this process stands for a worker whose steps keep 1.9 of the cores busy."""
    cluster = TimedCluster(rank=worker_pb2.RankInfo(device="cpu", host=socket.gethostname(), pid=os.getpid()))
    monkeypatch.setattr(profiler, "_cpu_seconds", lambda pid: 1.9 * cluster.busy_s if pid == os.getpid() else 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    document = profiled(monkeypatch, cluster)
    assert (document["cores"], document["threads"]) == (3, 2)
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(document))
    found = read_profile(file)
    assert (found.cores, found.num_threads) == (3, 2)
    for rank in (worker_pb2.RankInfo(device="cuda:0", host=socket.gethostname()), worker_pb2.RankInfo(host="other")):
        document = profiled(monkeypatch, TimedCluster(rank=rank))
        assert (document["cores"], document["threads"]) == (None, 1)


def test_the_seconds_of_a_process_are_those_of_all_its_threads() -> None:
    before, until = profiler._cpu_seconds(os.getpid()), time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert 0.08 <= profiler._cpu_seconds(os.getpid()) - before < 1
    with pytest.raises(FailedPrecondition, match="process 99999999 of a worker is not there any more"):
        profiler._cpu_seconds(99999999)


def test_steps_of_others_are_not_taken_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FailedPrecondition, match="other requests run on this cluster"):
        profiled(monkeypatch, TimedCluster(extra_steps=3))


def test_workers_without_pages_cannot_be_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"set metrics\.workers: true"):
        profiled(monkeypatch, TimedCluster(page=""))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"baton_profile": None}, "says nothing of the worker, only its steps: write a profile with `baton profile`"),
        ({"baton_profile": 2}, "baton_profile is 2; this program reads 1: write it again with `baton profile`"),
        ({"worker": {"model": "x"}}, "worker must be an object with model, device"),
        (
            {"steps": [{"prompt_tokens": 1, "sequences": 0, "kv_tokens": 0, "seconds": 0}]},
            "seconds must be a number above",
        ),
        ({"cores": 0}, "cores must be a whole number above 0 (got 0)"),
        ({"threads": None}, "threads must be a whole number above 0 (got None)"),
        ({"message_s": -1}, "message_s must be a number of at least 0, or null (got -1)"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_by_its_field(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({**profiled(monkeypatch, TimedCluster()), **change}))
    with pytest.raises(ConfigError) as caught:
        read_profile(file)
    assert says in str(caught.value)
