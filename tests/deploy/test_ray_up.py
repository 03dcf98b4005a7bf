"""`ray up cluster.yaml` as an operator says it, on three machines: serving, another ratio, a machine that is cut off,
and the end. The file is the shipped one, with these machines in it.

Long: `make test-deploy`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from machines import UP_S, machines, missing
from ray_up_site import CALL_S, RayUpSite
from waiting import until

pytestmark = [pytest.mark.battery, pytest.mark.timeout(900), pytest.mark.skipif(bool(missing()), reason=missing())]

MOVED_S = 20.0
GONE_S = 150.0
WORKERS = ("one", "two")


@pytest.fixture(scope="module")
def site() -> Iterator[RayUpSite]:
    """`ray stop` ends every Ray that it sees: so first of all it is made sure that it sees none of another."""
    with machines("head", *WORKERS) as there:
        for machine in (there.operator, *there.others.values()):
            seen = machine.run("ps -eo args")
            assert "raylet" not in seen and len(seen.splitlines()) < 12, f"{machine.name} sees others:\n{seen}"
            assert (
                machine.run("find /tmp /dev/shm -mindepth 1 -maxdepth 1 '(' -name 'ray*' -o -path '/dev/*' ')'") == ""
            )
        yield RayUpSite(there)


def test_ray_up_serves_from_the_machines_of_the_file(site: RayUpSite) -> None:
    told = site.ray("up -y cluster.yaml")
    assert "Baton is serving: 1 prefill + 2 decode workers" in told
    answer = site.complete()
    assert answer["usage"]["completion_tokens"] == 16
    assert site.complete() | {"id": "", "created": 0} == answer | {
        "id": "",
        "created": 0,
        "usage": site.complete()["usage"],
    }
    assert site.nodes() <= set(WORKERS), "workers have labels to go by"
    assert [site.complete(at=name)["choices"] for name in WORKERS] == [answer["choices"]] * 2
    assert "baton stop" in told
    generated = site.operator.run(f"baton generate --address {site.address('head')} --max-tokens 8 'JULIET:'")
    assert generated.strip()


def test_ray_up_without_a_restart_applies_the_ratio_of_the_edited_file(site: RayUpSite) -> None:
    before = site.pids()
    site.set_ratio(2, 1)
    site.ray("up --no-restart -y cluster.yaml")
    until(lambda: site.ratio() == (2, 1), "two prefill workers and one for decode", MOVED_S)
    assert site.pids() == before, "a worker changes its role and stays"
    assert "choices" in site.complete()


def test_a_mistake_in_the_file_changes_nothing(site: RayUpSite) -> None:
    before = site.pids()
    site.set_ratio(3, 0)
    site.ray("up --no-restart -y cluster.yaml")
    refused = site.head.run("baton serve --address auto --detach --config ~/ray_bootstrap_config.yaml", check=False)
    assert "must be at least 1, since only decode workers generate tokens" in refused
    assert (site.ratio(), site.pids()) == ((2, 1), before)
    assert "choices" in site.complete()
    site.set_ratio(2, 1)
    site.ray("up --no-restart -y cluster.yaml")


def test_a_second_serve_has_the_cluster_do_what_a_file_says(site: RayUpSite) -> None:
    command = "serve --address auto --detach --config ~/ray_bootstrap_config.yaml"
    assert "nothing differs from what runs" in site.baton(command)
    site.head.run('sed \'s/"devices": 2/"devices": 1/\' ray_bootstrap_config.yaml > other.yaml')
    assert "done: 2:1 to 1:1" in site.baton("serve --address auto --detach --config ~/other.yaml")
    assert site.ratio() == (1, 1)
    site.set_ratio(1, 2)
    site.ray("up --no-restart -y cluster.yaml")
    until(lambda: site.ratio() == (1, 2), "a second decode worker", MOVED_S + UP_S)


def test_the_workers_of_a_machine_that_is_cut_off_come_up_on_another(site: RayUpSite) -> None:
    lost = sorted(site.nodes())[0]
    others = set(WORKERS) - {lost}
    expected = site.complete("KING HENRY:")["choices"]
    given_up = site.raylet(lost)
    site.machines.cut(lost)
    try:
        assert site.complete("KING HENRY:")["choices"] == expected, "it waits for the workers that come"
        until(lambda: (site.nodes(), site.ratio()) == (others, (1, 2)), f"every worker on {others}", CALL_S)
        assert site.complete("KING HENRY:")["choices"] == expected
    finally:
        site.machines.heal(lost)
    until(lambda: site.raylet(lost) not in ("", given_up), "a new Ray on the machine that is back", CALL_S)
    until(lambda: site.answers(lost), "the router of the machine that is back", CALL_S)
    assert site.complete("KING HENRY:", at=lost)["choices"] == expected


def test_stop_ends_what_serves_and_leaves_ray(site: RayUpSite) -> None:
    assert site.baton("stop --address auto").endswith("stopped\n")
    again = site.head.run("baton stop --address auto", check=False)
    assert "nothing serves detached in the Ray cluster at auto" in again
    assert site.num_raylets() == 3
    told = site.baton("serve --address auto --detach --config ~/ray_bootstrap_config.yaml")
    assert "Baton is serving: 1 prefill + 2 decode workers" in told
    assert "choices" in site.complete()


def test_each_role_has_machines_and_settings_of_its_own(site: RayUpSite) -> None:
    expected = site.complete("KING HENRY:")["choices"]
    site.baton("stop --address auto")
    for role, machine, block_size in (("prefill", "one", 32), ("decode", "two", 8)):
        site.serving["roles"][role] |= {
            "placement": {"labels": [f"baton.example/machine={machine}"]},
            "engine": {"block_size": block_size, "max_num_seqs": block_size},
        }
    site.write()
    site.ray("up --no-restart -y cluster.yaml")
    told = site.baton("serve --address auto --detach --config ~/ray_bootstrap_config.yaml")
    assert "Baton is serving: 1 prefill + 2 decode workers" in told
    assert site.complete("KING HENRY:")["choices"] == expected
    where = {(w["role"], w["node"]) for w in site.workers() if w["state"] == "ready"}
    assert where == {("prefill", "one"), ("decode", "two")}
    site.set_ratio(2, 1)
    site.ray("up --no-restart -y cluster.yaml")
    until(lambda: site.ratio() == (2, 1), "a second prefill worker in the place of a decode worker", MOVED_S + UP_S)
    where = {(w["role"], w["node"]) for w in site.workers() if w["state"] == "ready"}
    assert where == {("prefill", "one"), ("decode", "two")}, "a worker took a role whose machines are others"
    assert site.complete("KING HENRY:")["choices"] == expected


def test_ray_down_ends_everything(site: RayUpSite) -> None:
    site.ray("down -y cluster.yaml")
    until(lambda: site.num_raylets() == 0, "no Ray on any machine", GONE_S)
    left = site.head.run("ps -eo args")
    assert "ray::" not in left and "router" not in left, left
