"""API keys as an operator keeps them: a file that holds the SHA-256 of each key, never a key.

    keys:
    - id: key-5f1c0a9e
      sha256: 8d96…               # of the key, as `baton keys create` shows it once
      tenant: acme
      scopes: [generate]          # generate, admin
      weight: 1.0
      quota: {requests_per_min: 600}

A key is 256 random bits behind `baton-`, so a plain hash is as good as a slow one: there is nothing to guess. Owns the
format and its mistakes; knows no router and no request. Errors name the line but never show it.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import yaml

from cluster.config.read import ConfigReader, bounded
from cluster.config.source import (
    ConfigSource,
    clip,
    compose,
    entries,
    join,
    nearest,
    place_of,
    read_text,
    report_doubled_keys,
)
from cluster.errors import ConfigError

Scope = Literal["generate", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

PREFIX = "baton-"
"""Every key begins with it, so that people and scanners recognise one."""
OWNER_ONLY = 0o600
"""Mode of a keys file."""
_KEY_BYTES = 32
_ROOT = "keys"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,63}")
_NAMING = "must be 1 to 64 letters, digits or ._:@/- and begin with a letter or digit"
_MOST_A_MIN = 10**12


@dataclass(frozen=True)
class KeyQuota:
    """Limits of one key; null: none."""

    requests_per_min: int | None = bounded(None, at_least=1, at_most=_MOST_A_MIN)
    """Requests that begin within a minute."""
    prompt_tokens_per_min: int | None = bounded(None, at_least=1, at_most=_MOST_A_MIN)
    """Tokens of their prompts."""
    output_tokens_per_min: int | None = bounded(None, at_least=1, at_most=_MOST_A_MIN)
    """Tokens that are generated for them."""
    max_concurrent: int | None = bounded(None, at_least=1, at_most=_MOST_A_MIN)
    """Requests that are queued or running at one time."""


@dataclass(frozen=True)
class ApiKey:
    """One entry of the file."""

    id: str
    """Names the key in logs and to `baton keys revoke`; unique in the file."""
    sha256: str
    """SHA-256 of the key with its prefix: 64 hexadecimal digits, lower case."""
    tenant: str
    """The tenant whose requests these are. Prefix caches are not shared between tenants."""
    scopes: tuple[Scope, ...]
    """generate: the GenerationService; admin: the AdminService."""
    weight: float = bounded(1.0, above=0, at_most=1e6)
    """Share that the tenant gets beside others of weight 1."""
    quota: KeyQuota = field(default_factory=KeyQuota)
    """Limits of this key."""
    note: str | None = None
    """A remark for people."""


def digest_of(key: str) -> str:
    """The hash that stands for a key in the file."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def new_key() -> str:
    """256 random bits."""
    return PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def new_id(taken: Iterable[str]) -> str:
    used = set(taken)
    return next(name for name in iter(lambda: f"key-{secrets.token_hex(4)}", "") if name not in used)


def load_keys(path: str | Path) -> tuple[ApiKey, ...]:
    """The keys of a file. Raises ConfigError with every mistake in it, as `file:line:column: keys[0].tenant: what`."""
    return parse_keys(read_text(path), str(path))


def parse_keys(text: str, filename: str) -> tuple[ApiKey, ...]:
    """The keys in a text, as `load_keys` reads them; `filename` is shown in errors."""
    source = ConfigSource(filename, text, shows_lines=False)
    remedy = "write `keys: []` for a file without keys, or add one with `baton keys create`"
    root = compose(source, text, remedy)
    report_doubled_keys(source, root)
    reader = ConfigReader(source, ApiKey)
    found = [
        reader.read_section(ApiKey, f"{_ROOT}[{number}]", node) for number, node in enumerate(_items(source, root))
    ]
    _check(source, reader, found)
    if source.num_problems:
        raise ConfigError(source.render())
    return tuple(found)


def render_keys(keys: Iterable[ApiKey]) -> str:
    """A file that `parse_keys` reads as these keys."""
    return _HEAD + yaml.safe_dump({_ROOT: [_as_dict(key) for key in keys]}, sort_keys=False, allow_unicode=True)


_HEAD = """\
# Baton's API keys, by their hashes. `baton keys create` and `baton keys revoke` write this file anew and keep no
# comments: use `note`. The router takes a changed file up within about a second.
"""


def _items(source: ConfigSource, root: yaml.MappingNode) -> list[yaml.Node]:
    """The nodes of the entries."""
    items: list[yaml.Node] | None = None
    for key, key_node, value in entries(root):
        if key != _ROOT:
            close = f'; did you mean "{_ROOT}"?' if nearest(key, (_ROOT,)) else f"; known here: {_ROOT}"
            source.report(place_of(key_node), clip(key), f"unknown key{close}")
        elif isinstance(value, yaml.SequenceNode):
            items = value.value
        else:
            source.report(place_of(value), _ROOT, "must be a list of keys; write `keys: []` for none")
    if items is None and not source.num_problems:
        source.report(None, _ROOT, "is missing; write `keys: []` for a file without keys")
    return items or []


def _check(source: ConfigSource, reader: ConfigReader, found: list[ApiKey]) -> None:
    """Reports mistakes beyond the types. A value that may be a key by mistake is never shown."""
    ids: dict[str, int] = {}
    digests: dict[str, int] = {}
    for number, key in enumerate(found):
        path = f"{_ROOT}[{number}]"

        def report(name: str, what: str, path: str = path) -> None:
            if not source.has_problem(join(path, name)):
                source.report(reader.places.get(join(path, name), reader.places[path]), join(path, name), what)

        for name, value in (("id", key.id), ("tenant", key.tenant)):
            if not _NAME.fullmatch(value):
                report(name, _NAMING)
        if not _SHA256.fullmatch(key.sha256):
            hint = "; this looks like the key itself: revoke it and create another" if PREFIX in key.sha256 else ""
            report("sha256", f"must be 64 hexadecimal digits in lower case, the SHA-256 of the key{hint}")
        if not key.scopes and not source.has_problem(f"{path}.scopes[0]"):
            report("scopes", f"must name at least one of {', '.join(SCOPES)}")
        if ids.setdefault(key.id, number) != number:
            report("id", f"is that of keys[{ids[key.id]}], too; ids must differ")
        if digests.setdefault(key.sha256, number) != number:
            report("sha256", f"is that of keys[{digests[key.sha256]}], too; a key belongs to one entry")


def _as_dict(key: ApiKey) -> dict[str, object]:
    """Without what is as it would be anyway."""
    given: dict[str, object] = {
        "id": key.id,
        "sha256": key.sha256,
        "tenant": key.tenant,
        "scopes": list(key.scopes),
        "weight": key.weight,
    }
    quota = {name: limit for name, limit in vars(key.quota).items() if limit is not None}
    return given | ({"quota": quota} if quota else {}) | ({"note": key.note} if key.note else {})
