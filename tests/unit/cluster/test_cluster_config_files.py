"""Files that metadata.serving names: where they are looked for, and what is told of those that are not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.load import parse_config
from cluster.config.schema import ServingConfig
from cluster.errors import ConfigError
from controller.plan import plan_cluster


def parse(folder: Path, serving: str) -> ServingConfig:
    return parse_config(f"metadata:\n  serving:\n    model: {{path: m}}\n{serving}", str(folder / "cluster.yaml"))


def test_files_are_found_beside_the_configuration(folder: Path) -> None:
    for name in ("keys.yaml", "c", "k", "ca"):
        (folder / name).write_text("")
    config = parse(
        folder,
        "    auth: {keys_file: keys.yaml}\n    tls: {cert: c, key: k, client_ca: null}\n"
        "    internal_tls: {cert: c, key: k, ca: ca}\n    router: {host: 0.0.0.0}\n",
    )
    plan = plan_cluster(config, num_gpus=0, num_cores=1)
    here = {name: str(folder / name) for name in ("keys.yaml", "c", "k", "ca")}
    router, rank = plan.router, plan.workers[0].ranks[0]
    assert (router.auth.keys_file, router.tls.cert, router.tls.key) == (here["keys.yaml"], here["c"], here["k"])
    assert router.tls.client_ca is None
    for process in (router, rank):
        files = process.internal_tls
        assert (files.cert, files.key, files.ca) == (here["c"], here["k"], here["ca"])


@pytest.mark.parametrize(("path", "found"), [("kv", "{}/kv"), ("~/kv", "~/kv"), ("s3://b/kv", "s3://b/kv")])
def test_a_store_is_a_folder_beside_the_configuration_or_a_url(folder: Path, path: str, found: str) -> None:
    config = parse(folder, f"    engine: {{kv_host_bytes: 9, kv_store_bytes: 9, kv_store_path: '{path}'}}\n")
    assert config.engine.kv_store_path == found.format(folder)


@pytest.mark.parametrize(
    ("store", "key", "expected"),
    [
        (
            "kv_store_bytes: 9",
            "kv_store_bytes",
            "needs kv_store_path: a folder that every node has, or a URL such as s3",
        ),
        ("kv_store_bytes: 9, kv_store_path: 'memory://kv'", "kv_store_path", "memory://kv is not shared"),
        (
            "kv_disk_bytes: 9, kv_disk_path: 's3://b/kv'",
            "kv_disk_path",
            "must be a folder on each node's own disk (got s3",
        ),
    ],
)
def test_a_place_for_kv_that_cannot_be_one_is_refused(folder: Path, store: str, key: str, expected: str) -> None:
    with pytest.raises(ConfigError) as failure:
        parse(folder, f"    engine: {{kv_host_bytes: 9, {store}}}\n")
    assert f" metadata.serving.engine.{key}: {expected}" in str(failure.value)


def test_a_chat_template_goes_to_routers_alone(folder: Path) -> None:
    (folder / "own.jinja").write_text("")
    text = "metadata:\n  serving:\n    model: {path: m, tool_format: hermes, chat_template: %s}\n"
    config = parse_config(text % "own.jinja", str(folder / "cluster.yaml"))
    plan = plan_cluster(config, num_gpus=0, num_cores=1)
    assert plan.router.model == config.model and config.model.chat_template == str(folder / "own.jinja")
    assert plan.workers[0].ranks[0].model == replace(config.model, tool_format="auto", chat_template=None)
    with pytest.raises(ConfigError, match=r"no such file: .*owm.jinja; did you mean .own.jinja."):
        parse_config(text % "owm.jinja", str(folder / "cluster.yaml"))


def test_a_chat_template_given_from_outside_wins_and_another_model_has_its_own(folder: Path) -> None:
    (folder / "own.jinja").write_text("")
    text, name = (
        "metadata:\n  serving:\n    model: {path: m, chat_template: m/config.json}\n",
        str(folder / "cluster.yaml"),
    )
    model, template = str(folder / "m"), str(folder / "own.jinja")
    assert parse_config(text, name, chat_template=template).model.chat_template == template
    assert parse_config(text, name, model_path=model).model.chat_template is None
    assert parse_config(text, name, model_path=model, chat_template=template).model.chat_template == template
    with pytest.raises(ConfigError, match=r"^--chat-template: no such file: .*nope; name a Jinja file"):
        parse_config(text, name, chat_template=str(folder / "nope"))


@pytest.mark.parametrize(
    ("serving", "expected"),
    [
        ("    auth: {keys_file: nowhere.yaml}\n", "metadata.serving.auth.keys_file: no such file: "),
        ("    tls: {cert: m/config.json}\n", "metadata.serving.tls.key: is missing beside tls.cert; name cert and key"),
        ("    tls: {client_ca: m/config.json}\n", "metadata.serving.tls.cert: is missing beside tls.client_ca"),
        ("    internal_tls: {cert: m/config.json, key: m/config.json}\n", "internal_tls.ca: is missing beside"),
        ("    tls: {cert: m/none, key: m/config.json}\n", "tls.cert: no such file: "),
    ],
)
def test_half_of_tls_and_files_that_are_not_there_are_refused(folder: Path, serving: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(folder, serving)
    assert expected in caught.value.message
