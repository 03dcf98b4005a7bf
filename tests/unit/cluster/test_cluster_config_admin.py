"""Where the AdminService may listen: not where everybody who reaches it may change the cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config.load import parse_config
from cluster.config.schema import ServingConfig
from cluster.errors import ConfigError

TLS = "    tls: {cert: c.pem, key: k.pem}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the files that the following name; what is in them is for others to read."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    for name in ("c.pem", "k.pem", "a.pem", "keys.yaml"):
        (tmp_path / name).write_text("")
    return tmp_path


def parse(folder: Path, serving: str) -> ServingConfig:
    text = "metadata:\n  serving:\n    model: {path: m}\n" + serving
    return parse_config(text, str(folder / "cluster.yaml"))


def test_an_admin_port_beyond_loopback_is_not_open_to_everybody_for_being_encrypted(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(folder, TLS + "    admin: {host: 0.0.0.0}\n")
    assert ":5:19: metadata.serving.admin.host: refusing to let everybody who reaches 0.0.0.0" in caught.value.message
    assert "set auth.keys_file or tls.client_ca" in caught.value.message


@pytest.mark.parametrize(
    "serving",
    [
        TLS + "    admin: {host: 0.0.0.0}\n    auth: {keys_file: keys.yaml}\n",
        "    tls: {cert: c.pem, key: k.pem, client_ca: a.pem}\n    admin: {host: 0.0.0.0}\n",
        TLS + "    admin: {host: 0.0.0.0, insecure: true}\n",
        TLS,
    ],
)
def test_an_admin_port_is_allowed_where_callers_are_known_or_the_operator_says_so(folder: Path, serving: str) -> None:
    assert parse(folder, serving).tls.cert is not None
