"""What a controller that begins anew keeps of what it finds, and what it was left by the one before; no processes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from admin_world import FILE, config_of

from cluster.config.schema import EngineSection
from cluster.errors import IncompatibleProtocol
from controller.adoption import (
    STEADY_S,
    FoundProcess,
    NodePlacement,
    ProcessIdentity,
    SavedCluster,
    SavedRouter,
    SavedWorker,
    choose,
)
from controller.config_file import ConfigFile
from controller.plan import plan_cluster


def process(
    group: str, rank: int = 0, size: int = 1, epoch: int = 1, *, serves: bool = True, protocol: str = ""
) -> FoundProcess:
    identity = ProcessIdentity(group, rank, size, epoch, config_version=epoch)
    placement = NodePlacement("127.0.0.1", 1, protocol)
    return FoundProcess(identity, placement, "{}", '{"address": "a"}' if serves else "")


WANTED = {"router": 1, "prefill-0": 1, "decode-0": 2}


def test_what_is_wanted_and_serves_is_kept_with_its_ranks_in_order() -> None:
    found = [process("decode-0", 1, 2), process("router"), process("decode-0", 0, 2)]
    adoption = choose(WANTED, found)
    assert adoption.kept == {"router": (found[1],), "decode-0": (found[2], found[0])}
    assert adoption.orphans == ()


@pytest.mark.parametrize(
    "found",
    [
        [process("prefill-1")],
        [process("decode-0", 0, 2)],
        [process("decode-0", 0, 2), process("decode-0", 1, 2, serves=False)],
        [process("decode-0", 0, 2, epoch=1), process("decode-0", 1, 2, epoch=2)],
        [process("decode-0", 0, 1)],
        [process("prefill-0", 0, 2), process("prefill-0", 1, 2)],
        [process("prefill-0", serves=False)],
    ],
    ids=[
        "nobody wants it",
        "a rank is missing",
        "a rank does not serve yet",
        "ranks of two lives",
        "it has fewer ranks than wanted",
        "it has more ranks than wanted",
        "it has ended",
    ],
)
def test_what_cannot_be_kept_whole_is_ended(found: list[FoundProcess]) -> None:
    adoption = choose(WANTED, found)
    assert adoption.kept == {}
    assert adoption.orphans == tuple(found)


def test_of_two_lives_of_a_worker_the_later_is_kept_and_the_other_ended() -> None:
    old, new, half = process("prefill-0"), process("prefill-0", epoch=10), process("prefill-0", epoch=11, serves=False)
    adoption = choose(WANTED, [new, half, old])
    assert adoption.kept == {"prefill-0": (new,)}
    assert set(map(id, adoption.orphans)) == {id(old), id(half)}
    assert adoption.newest_version == 10


def test_without_anything_found_nothing_is_kept() -> None:
    adoption = choose(WANTED, [])
    assert (adoption.kept, adoption.orphans, adoption.newest_version) == ({}, (), 0)


@pytest.mark.parametrize("config", [config_of(2, 3), ConfigFile(FILE).load()], ids=["plain", "shipped file"])
def test_what_is_saved_is_read_back_equal(config: object) -> None:
    saved = SavedCluster(
        config,  # type: ignore[arg-type]
        EngineSection(device="cpu", threads=2),
        version=7,
        num_devices_asked=5,
        is_changing=True,
        journal="/tmp/journal-free-1.db",
        admin_port=50052,
        has_served=True,
        workers=(SavedWorker("prefill-0", "decode", is_draining=True), SavedWorker("decode-0", "decode")),
        routers=(SavedRouter(50061, 8010), SavedRouter()),
        began_at=12.5,
    )
    assert SavedCluster.from_json(saved.to_json()) == saved


def test_the_first_controller_begins_with_its_plan() -> None:
    config = config_of(1, 2)
    plan = plan_cluster(config, num_gpus=0, num_cores=6)
    first = SavedCluster.first(config, plan, 1.0)
    assert [(worker.worker_id, worker.role) for worker in first.workers] == [
        ("prefill-0", "prefill"),
        ("decode-0", "decode"),
        ("decode-1", "decode"),
    ]
    assert (first.engine.device, first.engine.threads) == ("cpu", 2)
    assert (first.life, first.version, first.has_served) == (1, 1, False)


def test_of_a_state_that_a_later_controller_has_saved_what_is_known_here_is_read() -> None:
    saved = SavedCluster(config_of(), EngineSection(), workers=(SavedWorker("prefill-0", "prefill"),), protocol="1-2")
    values = saved.as_dict() | {"later_key": 1}
    values["workers"][0]["later_key"] = 2
    assert SavedCluster.from_json(json.dumps(values)) == saved


def test_a_saved_state_that_is_not_understood_is_refused_by_name() -> None:
    values = SavedCluster(config_of(), EngineSection(), protocol="2-3").as_dict()
    with pytest.raises(IncompatibleProtocol, match="the controller before speaks protocol 2 to 3; this controller sp"):
        SavedCluster.from_json(json.dumps(values))


@pytest.mark.parametrize("protocol", ["", "1-1", "1-4"])
def test_a_process_of_the_next_version_is_kept_where_both_speak_one(protocol: str) -> None:
    found = process("prefill-0", protocol=protocol)
    assert choose(WANTED, [found]).kept == {"prefill-0": (found,)}


def test_nothing_is_chosen_where_one_process_speaks_another_protocol() -> None:
    """What is not chosen would be ended, and serves."""
    found = [process("prefill-0"), process("decode-0", 1, 2, protocol="2-3")]
    why = "decode-0 rank 1 speaks protocol 2 to 3; this controller speaks 1: upgrade this controller first"
    with pytest.raises(IncompatibleProtocol, match=why):
        choose(WANTED, found)


def test_a_controller_that_dies_again_and_again_begins_at_growing_intervals() -> None:
    saved, now, delays = SavedCluster(config_of(), EngineSection(), began_at=0.0), 0.0, []
    for _ in range(9):
        now += 1.0
        saved = saved.next_life(now)
        delays.append(saved.delay_s)
    assert delays == [0.0, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert saved.life == 10
    steady = saved.next_life(now + STEADY_S)
    assert (steady.delay_s, steady.life) == (0.0, 11)
    assert replace(steady, began_at=now + 2 * STEADY_S).next_life(now).delay_s == 0.0, "the clock was set back"
