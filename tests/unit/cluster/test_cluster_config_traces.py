"""`router.trace_endpoint` and `trace_sample`: which are taken and told to the router, and that no URL is repeated."""

from __future__ import annotations

import pytest

from cluster.config.checks import check
from cluster.config.schema import ModelSection, RouterSection, ServingConfig
from controller.plan import plan_cluster


def config_of(endpoint: str | None) -> ServingConfig:
    return ServingConfig(ModelSection("m"), router=RouterSection(trace_endpoint=endpoint, trace_sample=0.25))


@pytest.mark.parametrize(
    "url", [None, "http://localhost:4318", "https://u:p@collector/v1/traces", "http://[::1]:4318/", "http://c"]
)
def test_the_url_of_a_collector_is_taken_and_told_to_the_router(url: str | None) -> None:
    assert list(check(config_of(url))) == []
    router = plan_cluster(config_of(url), num_gpus=0, num_cores=1).router
    assert (router.router.trace_endpoint, router.router.trace_sample) == (url, 0.25)


@pytest.mark.parametrize(
    "url", ["", "collector:4317", "grpc://c:4317", "http://", "http://c:port", "http://c:0", "http://u:secret@c/?x=1"]
)
def test_another_url_is_refused_without_being_repeated(url: str) -> None:
    (finding,) = check(config_of(url))
    assert finding.key == "router.trace_endpoint" and "http://HOST:PORT" in finding.what
    assert "secret" not in finding.what
