"""Shows how many tokens each expert of a model gets, and how unevenly, on a worker's page of metrics.

The engine counts where tokens choose their experts; what it has counted is asked of its thread while a page is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from cluster.metrics import Metric
from engine.expert_placement import busiest_over_mean
from engine.models.experts import ExpertLoad

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
    "Tokens of the busiest one over the mean, of the layers' experts since the start and of the groups of ranks that "
    "share them (`expert_parallel`) since a layer's experts were placed, on average over the layers; 1: all have the "
    "same. In a step the ranks wait for the busiest group.",
    (("among", (_EXPERTS, _GROUPS)),),
)
MOVED = Metric(
    "baton_expert_moves_total",
    "counter",
    "Experts that have gone from one group of ranks to another, all layers together "
    "(`engine.expert_rebalance_tokens`).",
)
EXPERT_METRICS = (TOKENS, IMBALANCE, MOVED)


class ExpertCollector(Collector):
    """`ask` returns None if there is no answer in time."""

    def __init__(self, ask: Callable[[], ExpertLoad | None]) -> None:
        self._ask = ask

    def describe(self) -> list[MetricFamily]:
        """Nothing is asked when it is registered."""
        return []

    def collect(self) -> Iterator[MetricFamily]:
        load = self._ask()
        if load is None:
            return
        tokens = CounterMetricFamily(TOKENS.name, TOKENS.doc, labels=TOKENS.label_names)
        for expert, total in enumerate(map(sum, zip(*load.experts.values(), strict=True))):
            tokens.add_metric([str(expert)], total)
        yield tokens
        imbalance = GaugeMetricFamily(IMBALANCE.name, IMBALANCE.doc, labels=IMBALANCE.label_names)
        imbalance.add_metric([_EXPERTS], _mean_imbalance(load.experts.values()))
        imbalance.add_metric([_GROUPS], _mean_imbalance(load.groups.values()))
        yield imbalance
        yield CounterMetricFamily(MOVED.name, MOVED.doc, load.num_moved)


def _mean_imbalance(layers: Iterable[Sequence[int]]) -> float:
    """1 before there were any tokens."""
    found = [busiest_over_mean(tokens) for tokens in layers if sum(tokens)]
    return fmean(found) if found else 1.0
