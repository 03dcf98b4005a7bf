"""Requests that end the worker that decodes them by a real SIGSEGV: two workers at most, no other output changes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
from cluster_fixture import BUNDLED_MODEL, DECODE, PREFILL, PlainCluster, Stream, single_process, token_spec
from poisoned_worker.program import POISON
from workers import Process

from cluster.errors import FailedPrecondition
from cluster.pb import admin_pb2
from engine.sampling.params import SamplingParams

NUM_INNOCENT, NUM_TOKENS = 4, 300
PROMPTS = [[50 + 31 * number + i for i in range(20)] for number in range(NUM_INNOCENT)]


class RestartedCluster(PlainCluster):
    """Poisoned requests end its workers; each is started again at its address as often as that happens."""

    num_crashes = 0

    def watch(self) -> None:
        for worker_id in (PREFILL, DECODE):
            threading.Thread(target=self._restart, args=(worker_id,), daemon=True).start()

    def _restart(self, worker_id: str) -> None:
        port, role = int(self.addresses[worker_id].rpartition(":")[2]), worker_id.partition("-")[0]
        while self.processes[worker_id].popen.wait() == -signal.SIGSEGV:
            with self._lock:
                self.num_crashes += 1
                self.processes[worker_id].stop()
                self.step_log(worker_id).unlink(missing_ok=True)
                self.processes[worker_id] = Process(self.worker_program, self.settings_of(worker_id, role, port=port))
            self.ready(worker_id)

    _lock = threading.Lock()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestartedCluster]:
    folder = tmp_path_factory.mktemp("poison")
    with RestartedCluster(BUNDLED_MODEL, folder, worker_program="poisoned_worker") as running:
        running.watch()
        yield running


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_output_tokens=NUM_TOKENS)
    ends = single_process(PROMPTS, [params] * NUM_INNOCENT)
    return [list(completions[0].token_ids) for completions in ends]


@pytest.mark.parametrize("num_poisoned", [3, *(pytest.param(number, marks=pytest.mark.battery) for number in (1, 20))])
def test_poisoned_requests_fail_by_name_and_nobody_elses_output_changes(
    num_poisoned: int, cluster: RestartedCluster, reference: list[list[int]]
) -> None:
    num_before = cluster.num_crashes
    innocent = [Stream(cluster, token_spec(prompt, NUM_TOKENS)) for prompt in PROMPTS]
    for stream in innocent:
        stream.wait_for_tokens(3)
    poisoned = [Stream(cluster, token_spec([POISON, 30 + i], 50)) for i in range(num_poisoned)]
    for stream in poisoned:
        stream.join()
        assert isinstance(stream.error, FailedPrecondition), stream.error
        assert "workers ended by themselves while they computed this request" in str(stream.error)
        assert stream.num_tokens <= 2
    for stream, expected in zip(innocent, reference, strict=True):
        stream.result()
        assert stream.token_ids() == expected
    assert cluster.num_crashes - num_before <= 2 * num_poisoned
    Stream(cluster, token_spec(PROMPTS[0], 5)).result()
    cluster.wait_for(lambda status: all(w.state == admin_pb2.WorkerStatus.STATE_READY for w in status.workers))
