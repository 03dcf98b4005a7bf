"""The settings of one process: who it is, and the sections of the configuration that it goes by.

The controller reads cluster.yaml and gives each process its settings as JSON, so that no process reads that file. What
a section leaves open is resolved there (`controller.plan`): the device, a role's own block size. By hand, the flags of
`python -m worker` and `python -m router` are the same values.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import os
import typing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from cluster.address import PortSharing
from cluster.config.access import AuthSection, InternalTlsSection, TlsSection
from cluster.config.diff import run_time_keys
from cluster.config.read import alternatives
from cluster.config.schema import (
    ROLES,
    EngineSection,
    MetricsSection,
    ModelSection,
    RouterSection,
    ServingConfig,
    SloSection,
    TransferSection,
)

log = logging.getLogger(__name__)

TOKEN_VARIABLE = "BATON_CLUSTER_TOKEN"
"""Environment variable with the token of the cluster, for a process or a command that is started by hand."""


class JsonSettings:
    """JSON round trip for a frozen dataclass and the sections in it. From another process an unknown key is left out,
    since that may be a later build; everywhere else it is a TypeError that names it.

    A value of a section has a short name: its own where no other section has it (`max_num_seqs`), and always with the
    section's in front (`model_path`, `tls_cert`).
    """

    @classmethod
    def from_json(cls, text: str) -> Self:
        settings: Self = _build(cls, _known(cls, json.loads(text)))
        return settings

    def to_json(self) -> str:
        return json.dumps(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        assert dataclasses.is_dataclass(self)
        return dataclasses.asdict(self)

    def with_run_time(self, text: str) -> Self:
        """A copy with the values that `run_time_json` made, as far as it has their sections."""
        sections = {name: section for name, section in json.loads(text).items() if hasattr(self, name)}
        return self.with_values(**_known(type(self), sections))

    @classmethod
    def from_values(cls, **values: Any) -> Self:
        """Settings from fields and short names; the rest has its default."""
        settings: Self = _build(cls, _put(cls, {}, values))
        return settings

    def with_values(self, **values: Any) -> Self:
        """A copy with other values, by fields and short names."""
        settings: Self = _build(type(self), _put(type(self), self.as_dict(), values))
        return settings


@dataclass(frozen=True)
class WorkerSettings(JsonSettings):
    """One tensor-parallel rank of one worker."""

    worker_id: str
    """Name of the worker, the same on each of its ranks, such as `prefill-0`."""
    role: str
    """`prefill` or `decode`: the kind of new work the router sends here."""
    model: ModelSection
    """The model as its role serves it."""
    weight_forms: str = ""
    """The forms of both roles' weights, where they differ: requests go from one to the other all the same.
    Empty: all workers have them in one form."""
    engine: EngineSection = field(default_factory=EngineSection)
    """The engine settings of its role."""
    transfer: TransferSection = field(default_factory=TransferSection)
    slo: SloSection = field(default_factory=SloSection)
    metrics: MetricsSection = field(default_factory=MetricsSection)
    """Peaks of the device; whether there is a page is said by `metrics_port`."""
    internal_tls: InternalTlsSection = field(default_factory=InternalTlsSection)
    gpu: int | None = None
    """Number of its GPU among those that the process sees; None: that of its rank, where it sees several."""
    tp_rank: int = 0
    tp_size: int = 1
    expert_parallel: int = 1
    """Groups of the ranks among which whole experts are divided."""
    split_latents: bool = False
    """Each rank keeps an equal part of every block's tokens."""
    leader: str | None = None
    """host:port of rank 0's rank server; None on rank 0 itself."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """gRPC port of rank 0; 0: any free one."""
    rank_port: int = 0
    """Port at which rank 0 awaits the other ranks; 0: any free one."""
    node: str = ""
    """Name of the machine, for status; empty: the host name."""
    metrics_port: int | None = None
    """Port of the Prometheus page; 0: any free one; None: no page."""
    step_log: str | None = None
    """File that gets one JSON line for each step: who joined, ran and left."""
    transfer_faults: float = 0.0
    """The share of transfers that fail on purpose, in ways that are drawn at random; for tests."""
    insecure: bool = False
    """Allow an address other than loopback without TLS."""
    cluster_token: str = field(default_factory=lambda: os.environ.get(TOKEN_VARIABLE, ""))
    """The token that routers, other workers and ranks must show; empty: they need none. By hand it is
    BATON_CLUSTER_TOKEN, since others see flags."""
    has_keys: bool = False
    """The cluster has API keys, so that a page of metrics beyond loopback has TLS."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that the page of metrics answers to, as in `router.allowed_hosts`."""


@dataclass(frozen=True)
class RouterSettings(JsonSettings):
    """One router process."""

    model: ModelSection
    """The router reads the folder's tokenizer, chat template and generation_config.json, never weights."""
    router: RouterSection = field(default_factory=lambda: RouterSection(http_port=None))
    """`batch_store` may be a redis:// or rediss:// URL here; None: in memory, until the router ends; empty: files and
    batches are refused."""
    engine: EngineSection = field(default_factory=EngineSection)
    """The engine settings of decode workers, whose `num_seqs` bounds `n`."""
    transfer: TransferSection = field(default_factory=TransferSection)
    """A worker whose session is silent for `dead_after_s` is taken as lost."""
    slo: SloSection = field(default_factory=SloSection)
    auth: AuthSection = field(default_factory=AuthSection)
    tls: TlsSection = field(default_factory=TlsSection)
    internal_tls: InternalTlsSection = field(default_factory=InternalTlsSection)
    state: str | None = None
    """Store in which generations outlive a router: a redis:// or rediss:// URL, or a file that the routers of this
    machine share; None: in memory, so that they end with their router."""
    node_host: str = ""
    """Address of this machine for the controller and for readers of metrics; empty: they are on this machine."""
    control_port: int = 0
    """Port on which the controller names the workers, at `node_host`, else on loopback; 0: any free one."""
    workers: tuple[str, ...] = ()
    """Workers known at the start, as `prefill:ID=HOST:PORT` or `decode:ID=HOST:PORT`."""
    shares_ports: bool = False
    """Other routers of its cluster listen at its ports, too, or will: whoever started it keeps everybody else away."""
    is_successor: bool = False
    """Takes over the ports of a router that still listens there: shares them, once it is connected to `workers`."""
    needs_prefill: bool = True
    """Waits for a prefill worker before it serves; False: decode workers compute prompts while there is none."""
    drain_timeout_s: float = 5.0
    """At shutdown, running requests get this long to end."""
    metrics_port: int | None = None
    """Port of the Prometheus page; 0: any free one; None: no page."""
    cluster_token: str = field(default_factory=lambda: os.environ.get(TOKEN_VARIABLE, ""))
    """The token that workers want to be shown, and that the control port wants; empty: none. By hand, use
    BATON_CLUSTER_TOKEN: other users see flags."""

    @property
    def port_sharing(self) -> PortSharing:
        """The way in which it listens at its ports."""
        return PortSharing.JOINED if self.shares_ports or self.is_successor else PortSharing.FIRST


S = TypeVar("S", bound=JsonSettings)


def run_time_json(config: ServingConfig) -> str:
    """The run-time values of a configuration, for processes that are running; under `roles` those in which a role
    differs."""
    values: dict[str, Any] = {
        "slo": dataclasses.asdict(config.rebalance.slo),
        "drain_timeout_s": config.rebalance.drain_timeout_s,
    }
    own: dict[str, Any] = {}
    for name, leaf in (key.split(".") for key in run_time_keys() if key.count(".") == 1):
        common = values.setdefault(name, {})[leaf] = getattr(getattr(config, name), leaf)
        for role in ROLES if name == "engine" else ():
            if (value := getattr(config.engine_of(role), leaf)) != common:
                own.setdefault(role, {}).setdefault(name, {})[leaf] = value
    return json.dumps({**values, "roles": own} if own else values)


def run_time_json_of(role: str, text: str) -> str:
    """Returns what `run_time_json` made, with what a role's workers have of their own in place of what is common."""
    values = json.loads(text)
    for name, section in values.pop("roles", {}).get(role, {}).items():
        values[name] = {**values.get(name, {}), **section}
    return json.dumps(values)


def parse_flags(kind: type[S], program: str, arguments: Sequence[str] | None = None) -> S:
    """Settings from flags, one for each value (`--tp-rank 1`, `--model-path m`), on top of `--settings JSON` where it
    is given.

    A wrong flag ends the process with exit code 2 and a usage line.
    """
    parser = argparse.ArgumentParser(prog=program, description=kind.__doc__, allow_abbrev=False)
    parser.add_argument("--settings", default="{}", metavar="JSON", help="all settings as JSON; flags override it")
    names = _short_names(kind)
    for path, value in _values(kind):
        flags = [f"--{name.replace('_', '-')}" for name, where in names.items() if where == path]
        parser.add_argument(*flags, dest="_".join(path), default=argparse.SUPPRESS, **_options(value.type))
    flagged = vars(parser.parse_args(arguments))
    try:
        given = _put(kind, json.loads(flagged.pop("settings")), flagged)
        for path, value in _values(kind):
            if value.is_required and path[-1] not in (given if len(path) == 1 else given.get(path[0], {})):
                parser.error(f"--{'-'.join(path).replace('_', '-')} is required")
        settings: S = _build(kind, given)
        return settings
    except (TypeError, ValueError) as error:
        parser.error(str(error).replace(".__init__()", "").replace("_", "-"))


@dataclass(frozen=True)
class _Value:
    """A field that is no section."""

    type: Any
    is_required: bool


_TYPES: dict[type[Any], dict[str, Any]] = {}
"""Types that were looked up, by their dataclass: each look-up takes a millisecond."""


def _types_of(kind: type[Any]) -> dict[str, Any]:
    """The types of a dataclass's fields."""
    if kind not in _TYPES:
        _TYPES[kind] = typing.get_type_hints(kind)
    return _TYPES[kind]


def _values(kind: type[Any]) -> Iterator[tuple[tuple[str, ...], _Value]]:
    """Every value with the path to it."""
    types_of = _types_of(kind)
    for each in dataclasses.fields(kind):
        if dataclasses.is_dataclass(types_of[each.name]):
            for path, value in _values(types_of[each.name]):
                yield (each.name, *path), value
        else:
            has_default = each.default is not dataclasses.MISSING or each.default_factory is not dataclasses.MISSING
            yield (each.name,), _Value(types_of[each.name], not has_default)


def _short_names(kind: type[Any]) -> dict[str, tuple[str, ...]]:
    """The paths by the names that lead to them."""
    paths = [path for path, _ in _values(kind)]
    names = {"_".join(path): path for path in paths}
    counts = Counter(path[-1] for path in paths)
    return {path[-1]: path for path in paths if counts[path[-1]] == 1} | names


def _put(kind: type[Any], whole: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`whole` with these values, by their short names, at their places."""
    names = _short_names(kind)
    for name, value in values.items():
        *sections, last = names.get(name, (name,))
        inside = whole
        for section in sections:
            inside = inside.setdefault(section, {})
        is_part = isinstance(value, Mapping) and isinstance(inside.get(last), dict)
        inside[last] = {**inside[last], **value} if is_part else value
    return whole


def _known(kind: type[Any], values: Mapping[str, Any], of: str = "") -> dict[str, Any]:
    """The values that the dataclass and its sections have fields for."""
    hints, known = _types_of(kind), {}
    for name, value in values.items():
        if name not in kind.__dataclass_fields__:
            _report_unknown(f"{of}{name}")
        elif isinstance(value, Mapping) and dataclasses.is_dataclass(hints[name]):
            known[name] = _known(typing.cast(type[Any], hints[name]), value, f"{of}{name}.")
        else:
            known[name] = value
    return known


@functools.cache
def _report_unknown(key: str) -> None:
    """Once: run-time settings come again and again."""
    log.warning("the setting %s is not known to this build and has no effect: it is of another one", key)


def _build(kind: Any, values: Mapping[str, Any]) -> Any:
    """The dataclass; a section that is given in part keeps the rest of its default. Raises TypeError for an unknown
    key."""
    hints = _types_of(kind)
    factories = {each.name: each.default_factory for each in dataclasses.fields(kind)}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    for name, value in given.items():
        if isinstance(value, Mapping) and dataclasses.is_dataclass(hints.get(name)):
            factory = factories[name]
            rest = {} if factory is dataclasses.MISSING else vars(factory())
            given[name] = _build(hints[name], {**rest, **value})
    return kind(**given)


def _whole_number_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _options(hint: Any) -> dict[str, Any]:
    """Arguments of `add_argument` for a value of this type; `X | None` reads as X."""
    types_of = alternatives(hint)
    if typing.Literal["auto"] in types_of:
        return {"type": _whole_number_or_auto}
    hint = next(t for t in types_of if t is not type(None))
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is tuple:
        return {"action": "extend", "nargs": "*", "type": str}
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": typing.get_args(hint)}
    return {"type": hint}
