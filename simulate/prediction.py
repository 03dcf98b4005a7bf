"""Predicts what a cluster would show its clients: a load and a measured step curve in, latencies by percentile out.

A bare cluster is one engine, or several, without Baton's own costs and limits: messages take no time, the router hands
every request to a worker as it comes, and the workers' schedulers alone decide, without a bound on the time of a step.
One bare worker that does both roles steps as vLLM's scheduler does: sequences that decode first, then prompts in their
order, up to the tokens of a step; the youngest is preempted when KV runs out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from cluster.config.choices import RebalanceMode
from cluster.config.schema import RouterSection, SloSection
from cluster.errors import ConfigError
from simulate.client import RequestOutcome
from simulate.controller import ControllerSpec
from simulate.report import RunReport
from simulate.worker import WorkerSpec
from simulate.workload import RequestShape
from simulate.world import Cluster, ClusterSpec, Fidelity

_NO_LIMIT = 2**20
_NO_LIMIT_OF_TOKENS = 2**40
_NO_LIMIT_MS = 1000 * 86_400.0
BARE_ROUTER = RouterSection(
    http_port=None,
    policy="round_robin",
    max_running_requests=_NO_LIMIT,
    max_queued_requests=_NO_LIMIT,
    max_running_tokens=_NO_LIMIT_OF_TOKENS,
    max_queued_tokens=_NO_LIMIT_OF_TOKENS,
    queue_timeout_s=86_400.0,
    max_queue_wait_s=86_400.0,
)
"""Hands every request out at once, and disaggregates each of them where there is a prefill worker."""


@dataclass(frozen=True)
class PredictionQuestion:
    """Workers of each role that are all alike, and objectives."""

    worker: WorkerSpec
    num_prefill: int = 0
    num_decode: int = 1
    slo: SloSection = field(default_factory=SloSection)
    is_bare: bool = False
    message_s: float | None = None
    """Seconds of a message as a profile has it, for those to and from clients, too; None: the simulator's own."""
    fidelity: Fidelity = "full"
    mode: RebalanceMode = "fixed"
    """auto: the split is what it begins with, and the controller moves it."""
    cores: int | None = None
    """Cores of a machine that all programs share; None: none of them waits for another."""

    @property
    def cluster(self) -> ClusterSpec:
        ratio = self.num_prefill, self.num_decode
        if not self.is_bare:
            controller = ControllerSpec() if self.mode == "auto" else None
            spec = ClusterSpec.of_ratio(
                *ratio, self.worker, slo=self.slo, fidelity=self.fidelity, controller=controller, cores=self.cores
            )
            return spec if self.message_s is None else replace(spec, message_s=self.message_s, client_s=self.message_s)
        endless = SloSection(ttft_ms=_NO_LIMIT_MS, tpot_ms=_NO_LIMIT_MS)
        return ClusterSpec.of_ratio(
            *ratio, self.worker, router=BARE_ROUTER, slo=endless, message_s=0.0, fidelity=self.fidelity
        )


def predicted_report(
    question: PredictionQuestion,
    shapes: Sequence[RequestShape],
    seed: int = 0,
    on_end: Callable[[RequestOutcome], None] = lambda outcome: None,
) -> RunReport:
    """Calls `on_end` with each request that has ended. Raises ConfigError for a request that no worker has room for."""
    worker = question.worker
    for number, shape in enumerate(shapes, 1):
        size = shape.num_prompt_tokens + shape.num_output_tokens
        if size > min(worker.kv_tokens, worker.max_model_len):
            raise ConfigError(
                f"request {number} has {size} tokens, and a worker holds {worker.kv_tokens} of requests up to "
                f"{worker.max_model_len}; give more KV tokens, or cut the requests"
            )
    return RunReport.of(Cluster(question.cluster, seed).run(shapes, on_end=on_end), question.slo)
