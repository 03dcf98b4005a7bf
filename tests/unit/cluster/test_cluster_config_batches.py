"""Where batches are kept: what the configuration says, what is told to routers, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.load import parse_config
from cluster.config.schema import ModelSection, PlacementSection, RouterSection, ServingConfig
from cluster.errors import ConfigError
from controller.plan import plan_cluster
from router.batches.redis_store import RedisBatchStore
from router.batches.sqlite_store import SqliteStore
from router.http_server import open_batch_store


def store_of(state: str | None = None, placement: PlacementSection | None = None, **router: object) -> list[str | None]:
    section = replace(RouterSection(replicas=2), **router)  # type: ignore[arg-type]
    config = ServingConfig(ModelSection("m"), state=state, router=section, placement=placement or PlacementSection())
    plan = plan_cluster(config, num_gpus=0, num_cores=None)
    return [settings.router.batch_store for _, settings in plan.named_routers()]


def test_without_a_word_routers_share_a_file_at_home_that_is_named_after_the_port() -> None:
    assert store_of() == ["~/.local/state/baton/batches-8000.db"] * 2
    assert store_of(http_port=9000) == ["~/.local/state/baton/batches-9000.db"] * 2


def test_a_redis_that_is_there_is_used_unless_a_file_is_named() -> None:
    assert store_of("redis://host:1") == ["redis://host:1"] * 2
    assert store_of("redis://host:1", batch_store="/b.db") == ["/b.db"] * 2


@pytest.mark.parametrize("http_port", [0, None])
def test_a_cluster_that_nobody_can_come_back_to_keeps_them_in_memory(http_port: int | None) -> None:
    assert store_of(http_port=http_port) == [None, None]


def parse(folder: Path, where: str, more: str = "") -> ServingConfig:
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text("{}")
    serving = f"    model: {{path: m}}\n    router: {{batch_store: {where}}}\n"
    return parse_config(f"metadata:\n  serving:\n{serving}{more}", str(folder / "cluster.yaml"))


@pytest.mark.parametrize(("where", "found"), [("b.db", "{}/b.db"), ("/x/b.db", "/x/b.db"), ("~/b.db", "~/b.db")])
def test_a_file_is_found_beside_the_configuration_or_at_home(tmp_path: Path, where: str, found: str) -> None:
    assert parse(tmp_path, where).router.batch_store == found.format(tmp_path)


def test_a_url_is_refused_with_the_key_it_belongs_to(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router\.batch_store: must be a file; to keep batches in Redis, name it in"):
        parse(tmp_path, "redis://user:secret@host")


async def test_each_kind_of_place_has_its_store() -> None:
    stores = [open_batch_store(where) for where in (None, "~/b.db", "redis://127.0.0.1:1/0", "rediss://127.0.0.1:1")]
    assert [type(store) for store in stores] == [SqliteStore, SqliteStore, RedisBatchStore, RedisBatchStore]
    for store in stores:
        await store.close()


SPREAD = PlacementSection(routers="spread")


def test_routers_on_several_machines_share_what_is_in_redis_or_nothing() -> None:
    assert store_of("redis://host:1", placement=SPREAD) == ["redis://host:1"] * 2
    assert store_of(placement=SPREAD) == ["", ""]


def test_a_file_of_one_machine_is_refused_to_routers_on_several(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router\.batch_store: is a file of one machine, and placement\.routers is"):
        parse(tmp_path, "b.db, host: 0.0.0.0, insecure: true", "    placement: {routers: spread}\n")


def test_an_address_of_one_machine_is_refused_to_routers_on_several(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router\.host: 127\.0\.0\.1 is one machine's, .* use 0\.0\.0\.0"):
        parse(tmp_path, "null", "    placement: {routers: spread}\n")
