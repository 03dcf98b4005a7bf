"""The operator's file while a cluster runs: what a look at it means, and how a change from elsewhere gets into it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from admin_world import FILE, ReconfigurerStage

from cluster.config.diff import differences
from cluster.config.schema import ServingConfig
from cluster.errors import ConfigError, FailedPrecondition
from controller.config_file import ConfigFile, ConfigWatch
from controller.events import EventKind


@pytest.fixture
def file(tmp_path: Path) -> ConfigFile:
    """A copy of the shipped one."""
    (tmp_path / "models").symlink_to(FILE.parent / "models")
    shutil.copy(FILE, tmp_path / "cluster.yaml")
    return ConfigFile(tmp_path / "cluster.yaml")


class Heard:
    """A watch and what it said."""

    def __init__(self, file: ConfigFile) -> None:
        self.applied: list[ServingConfig] = []
        self.refused: list[str] = []
        self.watch = ConfigWatch(file, self.applied.append, self.refused.append)
        self.looks(2)
        self.applied.clear()

    def looks(self, count: int) -> None:
        for _ in range(count):
            self.watch.look()


def edit(file: ConfigFile, old: str, new: str) -> None:
    text = file.path.read_text(encoding="utf-8")
    assert old in text
    file.path.write_text(text.replace(old, new, 1), encoding="utf-8")


def with_devices(config: ServingConfig, prefill: int, decode: int) -> ServingConfig:
    roles = config.roles
    return replace(
        config,
        roles=replace(
            roles, prefill=replace(roles.prefill, devices=prefill), decode=replace(roles.decode, devices=decode)
        ),
    )


def test_a_valid_edit_counts_once(file: ConfigFile) -> None:
    heard = Heard(file)
    edit(file, "devices: 1", "devices: 3")
    heard.looks(3)
    assert [config.roles.prefill.devices for config in heard.applied] == [3]


def test_an_edit_during_the_start_counts(file: ConfigFile) -> None:
    applied: list[ServingConfig] = []
    edit(file, "devices: 1", "devices: 3")
    watch = ConfigWatch(file, applied.append, lambda _: None)
    watch.look()
    watch.look()
    assert len(applied) == 1


def test_a_mistake_is_told_once_with_its_place_and_only_when_it_stays(file: ConfigFile) -> None:
    heard = Heard(file)
    edit(file, "devices: 1", "devices: one")
    heard.looks(4)
    assert not heard.refused
    heard.looks(20)
    assert len(heard.refused) == 1
    assert heard.refused[0].startswith(f"{file.path}:")
    assert "metadata.serving.roles.prefill.devices: must be a whole number (got one)" in heard.refused[0]
    edit(file, "devices: one", "devices: 1")
    heard.looks(2)
    assert len(heard.applied) == 1, "the mended file was not looked at"


@pytest.mark.parametrize("share", [0, 2])
def test_a_file_that_is_half_written_at_one_look_is_no_edit(file: ConfigFile, share: int) -> None:
    heard = Heard(file)
    whole = file.path.read_text(encoding="utf-8")
    file.path.write_text(whole[: len(whole) * share // 4], encoding="utf-8")
    heard.looks(1)
    file.path.write_text(whole, encoding="utf-8")
    heard.looks(2)
    assert (heard.refused, heard.applied) == ([], [])


def test_a_file_that_is_gone_is_told_once_and_its_return_is_read(file: ConfigFile) -> None:
    heard = Heard(file)
    away = file.path.rename(file.path.with_suffix(".away"))
    heard.looks(20)
    assert [what.partition(": ")[2] for what in heard.refused] == ["cannot be read: No such file or directory"]
    away.rename(file.path)
    heard.looks(2)
    assert len(heard.applied) == 1


def test_what_serve_was_told_beside_the_file_holds_for_every_reading_of_it(file: ConfigFile) -> None:
    told = replace(file, router_port=7001, admin_port=7002)
    config = told.load()
    assert (config.router.port, config.admin.port) == (7001, 7002)
    assert set(differences(file.load(), config)) == {"router.port", "admin.port"}


def test_a_change_from_elsewhere_is_written_into_the_file_and_is_no_edit_of_it(file: ConfigFile) -> None:
    heard = Heard(file)
    running = file.load()
    wanted = with_devices(running, 3, 2)
    file.path.chmod(0o640)
    heard.watch.save(wanted, differences(running, wanted))
    assert file.load() == wanted
    assert "# A role has devices / tensor_parallel workers." in file.read()
    assert file.path.stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in file.path.parent.iterdir()) == ["cluster.yaml", "models"]
    heard.looks(3)
    assert not heard.applied, "what was written is taken for an edit"
    edit(file, "devices: 3", "devices: 2")
    heard.looks(2)
    assert heard.applied == [with_devices(running, 2, 2)], "an edit after it was not looked at"


async def test_a_change_that_failed_is_not_begun_again_for_standing_in_the_file(file: ConfigFile) -> None:
    running = file.load()
    file.save(with_devices(running, 1, 3), differences(running, with_devices(running, 1, 3)))
    stage = ReconfigurerStage(file.load())

    def apply(wanted: ServingConfig) -> None:
        stage.reconfigurer.propose(wanted, "the file was edited")

    watch = ConfigWatch(file, apply, pytest.fail)
    stage.steps.broken = "flip decode-2 to prefill"
    stage.reconfigurer.propose(stage.reconfigurer.with_split(3, 1), "rebalance 3:1", save=watch.save)
    await stage.reconfigurer.settled()
    assert (stage.split(), file.load().roles.prefill.devices) == ((2, 2), 3)
    for _ in range(3):
        watch.look()
    assert stage.reconfigurer.changing is None and stage.kinds()[-1] is EventKind.FAILED


def test_a_file_that_says_the_change_already_is_left_alone(file: ConfigFile) -> None:
    before = file.path.stat().st_mtime_ns
    file.save(file.load(), {"roles.decode.devices": 1})
    assert file.path.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("max_num_seqs: auto ", "max_num_seqs: 32 ", "says something else than what runs about engine.max_num_seqs"),
        ("block_size: auto ", "block_size: x ", "must be a whole number or auto"),
        ("        devices: 1\n", "", "does not spell out metadata.serving.roles.prefill.devices"),
    ],
)
def test_a_file_that_would_not_agree_afterwards_is_not_written(
    file: ConfigFile, old: str, new: str, problem: str
) -> None:
    running = file.load()
    edit(file, old, new)
    text = file.read()
    wanted = with_devices(running, 2, 1)
    with pytest.raises(FailedPrecondition, match=problem):
        file.save(wanted, differences(running, wanted))
    assert file.read() == text


async def test_a_drain_is_written_down_after_auto_has_moved_and_its_move_was_not(file: ConfigFile) -> None:
    edit(file, "mode: fixed", "mode: auto")
    edit(file, "devices: 1", "devices: 2")
    edit(file, "devices: 1", "devices: 2")
    stage = ReconfigurerStage(file.load())
    stage.reconfigurer.propose(stage.reconfigurer.with_split(1, 3), "mode auto 1:3")
    await stage.reconfigurer.settled()
    stage.reconfigurer.propose(
        stage.reconfigurer.without("decode-1"), "drain decode-1", leaving=["decode-1"], save=file.save
    )
    await stage.reconfigurer.settled()
    assert stage.split() == (1, 2)
    assert file.load() == stage.reconfigurer.config


async def test_a_drain_is_written_down_after_a_plan_of_which_only_the_first_step_was_done(file: ConfigFile) -> None:
    running = file.load()
    file.save(with_devices(running, 1, 3), differences(running, with_devices(running, 1, 3)))
    stage = ReconfigurerStage(file.load())
    stage.steps.broken = "flip decode-2 to prefill"
    stage.reconfigurer.propose(stage.reconfigurer.with_split(3, 1), "rebalance 3:1", save=file.save)
    await stage.reconfigurer.settled()
    assert (stage.split(), file.load().roles.prefill.devices) == ((2, 2), 3)
    stage.reconfigurer.propose(
        stage.reconfigurer.without("decode-0"), "drain decode-0", leaving=["decode-0"], save=file.save
    )
    await stage.reconfigurer.settled()
    assert stage.split() == (2, 1)
    assert file.load() == stage.reconfigurer.config


def test_a_file_that_is_not_utf8_is_a_mistake_that_names_the_byte(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match=r"c.yaml: is not UTF-8 text \(byte 3\)"):
        ConfigFile(tmp_path / "c.yaml").load()
