"""Several routers as one: what their answers come to."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.errors import ConfigError
from cluster.pb import admin_pb2, worker_pb2
from controller.router_link import RouterLink, merged
from controller.supervisor import Supervisor, SupervisorState

READY = admin_pb2.WorkerStatus.STATE_READY
LOST = admin_pb2.WorkerStatus.STATE_LOST
PREFILL, DECODE = worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE


def answer(*workers: admin_pb2.WorkerStatus, version: int = 3, running: int = 0) -> admin_pb2.GetStatusResponse:
    router = admin_pb2.RouterStatus(num_running=running, pid=1)
    return admin_pb2.GetStatusResponse(workers=workers, config_version=version, router=router)


def worker(
    state: admin_pb2.WorkerStatus.State = READY, role: worker_pb2.Role = DECODE, num_requests: int = 0
) -> admin_pb2.WorkerStatus:
    return admin_pb2.WorkerStatus(worker_id="w", state=state, role=role, num_requests=num_requests)


def test_one_router_is_itself() -> None:
    assert merged([answer(worker(num_requests=2), running=4)]) == answer(worker(num_requests=2), running=4)


def test_requests_are_added_up_and_the_oldest_version_counts() -> None:
    both = merged([answer(worker(num_requests=2), running=4), answer(worker(num_requests=1), version=2, running=5)])
    assert (both.workers[0].num_requests, both.router.num_running, both.config_version) == (3, 9, 2)


def test_a_worker_is_ready_and_has_its_role_only_where_all_see_it() -> None:
    assert merged([answer(worker()), answer(worker(LOST))]).workers[0].state == LOST
    assert merged([answer(worker()), answer()]).workers[0].state != READY
    assert merged([answer(worker()), answer(worker(role=PREFILL))]).workers[0].role == worker_pb2.ROLE_UNSPECIFIED
    draining = worker()
    draining.is_draining = True
    assert merged([answer(worker()), answer(draining)]).workers[0].is_draining


def test_requests_on_a_worker_count_although_another_router_does_not_reach_it() -> None:
    for views in ((worker(num_requests=2), worker(LOST)), (worker(LOST, num_requests=7), worker(num_requests=2))):
        (whole,) = merged([answer(view) for view in views]).workers
        assert (whole.state, whole.num_requests) == (LOST, 2)
    for one, two in ((answer(), answer(worker(num_requests=2))), (answer(worker(num_requests=2)), answer())):
        (whole,) = merged([one, two]).workers
        assert whole.state != READY and whole.num_requests == 2


def test_a_router_has_nothing_on_a_worker_that_it_does_not_reach() -> None:
    assert merged([answer(worker(LOST, num_requests=7))]).workers[0].num_requests == 0


class Life:
    """A router that is up and where no call gets through."""

    state = SupervisorState.READY
    num_starts = 1
    card = {"control_address": "127.0.0.1:1"}  # noqa: RUF012


@pytest.mark.parametrize("error", [ConfigError("internal_tls.cert: cannot be read"), OSError("out of descriptors")])
async def test_a_call_that_cannot_be_made_is_one_that_was_not_heard(error: Exception) -> None:
    def fall(*_: object, **__: object) -> Any:
        raise error

    life: Any = Life()
    router: Supervisor = life
    link = RouterLink(router, admin_pb2.SetWorkersRequest, open_channel=fall)
    assert not await link.try_to_update()
    assert await link.status() is None
    assert await link.demand() == []
