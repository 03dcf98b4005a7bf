"""Differences between two configurations, keys that change at run time, and setting values in a file's text.

Pure: configurations and text in, keys and text out. Keys are dotted paths below `metadata.serving`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from cluster.config.load import ROOT
from cluster.config.read import kinds_of
from cluster.config.schema import ROLES, RoleName, ServingConfig
from cluster.config.source import entries, join
from cluster.errors import FailedPrecondition

_POOL_KEYS = frozenset({"engine.block_size", "engine.kv_cache_tokens"})
"""A worker keeps its KV pool when it changes its role."""
SPLIT_KEYS = frozenset({"roles.prefill.devices", "roles.decode.devices"})
"""The keys that say how many workers each role has."""


@functools.cache
def run_time_keys(section: Any = ServingConfig, path: str = "") -> tuple[str, ...]:
    """The keys, and sections, that running processes take over."""
    found: list[str] = []
    for each in dataclasses.fields(section):
        key, kind = join(path, each.name), kinds_of(section)[each.name].section
        if "is_run_time" in each.metadata:
            found.append(key)
        elif kind is not None:
            found += run_time_keys(kind, key)
    return tuple(found)


def is_run_time(key: str) -> bool:
    return any(f"{key}.".startswith(f"{each}.") for each in run_time_keys())


@functools.cache
def rolling_keys(section: Any = ServingConfig, path: str = "", *, is_inside: bool = False) -> tuple[str, ...]:
    """The keys for which running workers, or routers, give way to new ones, one at a time."""
    found: list[str] = []
    for each in dataclasses.fields(section):
        key, kind = join(path, each.name), kinds_of(section)[each.name].section
        is_rolling = (is_inside or "is_rolling" in each.metadata) and "is_fixed" not in each.metadata
        if kind is not None:
            found += rolling_keys(kind, key, is_inside=is_rolling)
        elif is_rolling and not is_run_time(key):
            found.append(key)
    return tuple(found)


def leaves(section: Any, path: str = "") -> dict[str, Any]:
    """Every key that holds a value."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value, key = getattr(section, field.name), join(path, field.name)
        found |= leaves(value, key) if dataclasses.is_dataclass(value) else {key: value}
    return found


def differences(running: ServingConfig, wanted: ServingConfig) -> dict[str, Any]:
    """The keys whose value is another one, with the one that is wanted."""
    now = leaves(running)
    return {key: value for key, value in leaves(wanted).items() if value != now[key]}


_SIZES = ("tensor_parallel", "expert_parallel", "split_latents")


def role_differences(config: ServingConfig) -> dict[str, tuple[Any, Any]]:
    """The settings in which workers of the two roles differ, so that none can take the other role: prefill's, decode's.
    Another size of the KV pool or of its blocks is no obstacle."""
    prefill, decode = (_of_role(config, role) for role in ROLES)
    return {key: (prefill[key], decode[key]) for key in prefill if prefill[key] != decode[key]}


def _of_role(config: ServingConfig, role: RoleName) -> dict[str, Any]:
    own = config.role(role)
    values: dict[str, Any] = {key: getattr(own, key) for key in _SIZES}
    values["placement.labels"] = config.labels_of(role)
    values |= leaves(config.model_of(role), "model") | leaves(config.engine_of(role), "engine")
    return {key: value for key, value in values.items() if key not in _POOL_KEYS}


def refuse_fixed(changed: Iterable[str]) -> None:
    """Raises FailedPrecondition that names the keys which only a restart changes."""
    rolling = rolling_keys()
    fixed = [key for key in changed if not (is_run_time(key) or key in rolling)]
    if fixed:
        raise FailedPrecondition(
            f"{', '.join(fixed)} cannot change while the cluster runs: restart `baton serve` for "
            f"{'it' if len(fixed) == 1 else 'them'}, or put back what is running; docs/configuration.md marks the keys "
            "that can change at any time: run-time ones, and rolling ones, for which workers or routers are replaced"
        )


def set_values(text: str, values: Mapping[str, Any]) -> str:
    """The file with these values in place of its own; comments and everything else stay as they are.

    Raises FailedPrecondition for a file in which a key does not stand as a plain value.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise FailedPrecondition("the file is not valid YAML; mend it first") from error
    spots = []
    for key, value in values.items():
        node = _find(root, join(ROOT, key))
        if not isinstance(node, yaml.ScalarNode) or node.start_mark.line != node.end_mark.line:
            raise FailedPrecondition(f"the file does not spell out {ROOT}.{key}; write it there, or edit the file")
        spots.append((node.start_mark.index, node.end_mark.index, _plain(value)))
    for start, end, new in sorted(spots, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _find(root: yaml.Node | None, key: str) -> yaml.Node | None:
    node = root
    for name in key.split("."):
        inside = {k: value for k, _, value in entries(node)} if isinstance(node, yaml.MappingNode) else {}
        node = inside.get(name)
    return node


def _plain(value: Any) -> str:
    """The value in YAML's spelling."""
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, float) and "e" in text and "." not in text:
        text = text.replace("e", ".0e")  # 5e-05 would be a string
    is_plain = not isinstance(value, str) or yaml.safe_load(text) == value
    return text if is_plain else json.dumps(value)
