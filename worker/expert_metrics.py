"""Shows how many tokens each expert of a model gets, and how unevenly, on a worker's page of metrics.

The engine counts where tokens choose their experts; what it has counted is asked of its thread while a page is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from cluster.metrics import Metric
from engine.models.experts import ExpertsConfig

_EXPERTS, _GROUPS = "experts", "groups"
TOKENS = Metric(
    "baton_expert_tokens_total",
    "counter",
    "Tokens that each expert got, all layers together; only of models with experts. A token goes through several.",
    (("expert", ("its number, from 0",)),),
)
IMBALANCE = Metric(
    "baton_expert_imbalance",
    "gauge",
    "Tokens of the busiest one over the mean, of the layers' experts and of the groups of ranks that share them "
    "(`expert_parallel`), on average over the layers since the start; 1: all have the same. In a step the ranks wait "
    "for the busiest group.",
    (("among", (_EXPERTS, _GROUPS)),),
)
EXPERT_METRICS = (TOKENS, IMBALANCE)


class ExpertCollector(Collector):
    """`ask` returns for each layer with experts, by its number, the tokens of each; None: no answer in time."""

    def __init__(self, experts: ExpertsConfig, tp_size: int, ask: Callable[[], dict[int, list[int]] | None]) -> None:
        self._experts = experts
        self._tp_size = tp_size
        self._ask = ask

    def describe(self) -> list[MetricFamily]:
        """Nothing is asked when it is registered."""
        return []

    def collect(self) -> Iterator[MetricFamily]:
        counted = self._ask()
        if counted is None:
            return
        tokens = CounterMetricFamily(TOKENS.name, TOKENS.doc, labels=TOKENS.label_names)
        for expert, total in enumerate(map(sum, zip(*counted.values(), strict=True))):
            tokens.add_metric([str(expert)], total)
        yield tokens
        imbalance = GaugeMetricFamily(IMBALANCE.name, IMBALANCE.doc, labels=IMBALANCE.label_names)
        imbalance.add_metric([_EXPERTS], _mean_imbalance(list(counted.values())))
        imbalance.add_metric([_GROUPS], _mean_imbalance([self._of_groups(*layer) for layer in counted.items()]))
        yield imbalance

    def _of_groups(self, layer: int, tokens: Sequence[int]) -> list[int]:
        slices = self._tp_size // self._experts.num_groups
        ranks = range(0, self._tp_size, slices)
        return [sum(tokens[n] for n in self._experts.held_by(rank, self._tp_size, layer)) for rank in ranks]


def _mean_imbalance(layers: Sequence[Sequence[int]]) -> float:
    """1 before there were any tokens."""
    found = [max(tokens) * len(tokens) / sum(tokens) for tokens in layers if sum(tokens)]
    return sum(found) / len(found) if found else 1.0
