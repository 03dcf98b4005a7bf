"""`metadata.serving.state`: which URLs are taken, and that none is repeated."""

from __future__ import annotations

import pytest

from cluster.config.checks import check
from cluster.config.schema import ModelSection, RouterSection, ServingConfig
from controller.plan import plan_cluster


def config_of(state: str | None) -> ServingConfig:
    return ServingConfig(ModelSection("m"), state=state, router=RouterSection(resume_window_s=7.0))


@pytest.mark.parametrize(
    "url", [None, "redis://localhost", "redis://127.0.0.1:6379", "rediss://u:p@h:1/3", "redis://[::1]:6379/0"]
)
def test_a_redis_url_is_taken_and_told_to_the_router(url: str | None) -> None:
    assert list(check(config_of(url))) == []
    router = plan_cluster(config_of(url), num_gpus=0, num_cores=1).router
    assert (router.state, router.router.resume_window_s) == (url, 7.0)


@pytest.mark.parametrize(
    "url",
    ["", "localhost:6379", "http://localhost", "redis://", "redis://h:port", "redis://h:70000", "redis://h:0",
     "redis://u:secret@h/x", "unix:///redis.sock"],
)  # fmt: skip
def test_another_url_is_refused_without_being_repeated(url: str) -> None:
    (finding,) = check(config_of(url))
    assert finding.key == "state" and "redis://HOST:PORT" in finding.what and "secret" not in finding.what
