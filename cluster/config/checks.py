"""Conditions between keys, beyond each one's own type and limits.

A check is pure: a config in, findings out. A finding names the key to blame and the others it rests on, so that a
reader can leave out what only follows from a mistake it has reported already.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from cluster.address import ANY_HOST, is_loopback
from cluster.config.roles import SHORT_NAMES
from cluster.config.schema import ROLES, RoleName, ServingConfig
from cluster.config.timed import timed_obstacles
from cluster.transports import transports_of

_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL = re.compile(
    rf"(?:[a-z0-9](?:[a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_WORD}=(?:!?{_WORD}|!?in\({_WORD}(?:,{_WORD})*\))"
)
"""A label as Ray and Kubernetes spell it; the value as Ray selects by it."""


@dataclass(frozen=True)
class ConfigFinding:
    """`key` is relative to metadata.serving."""

    key: str
    what: str
    rests_on: tuple[str, ...] = ()


def check(config: ServingConfig) -> Iterator[ConfigFinding]:
    """Everything that is wrong between the keys of `config`."""
    yield from dict.fromkeys(_check_workers(config))  # what both roles share is wrong once
    yield from _check_growth(config)
    yield from _check_timers(config)
    yield from _check_tls(config)
    yield from _check_state(config)
    yield from _check_traces(config)
    yield from _check_batch_store(config)
    yield from _check_spread(config)
    for name, listener in (("router", config.router), ("admin", config.admin)):
        if not listener.insecure and config.tls.cert is None and not is_loopback(listener.host):
            yield ConfigFinding(
                f"{name}.host",
                f"refusing to listen on {listener.host} without TLS; set tls.cert and tls.key, use 127.0.0.1, or set "
                f"{name}.insecure: true where the network keeps strangers out",
                (f"{name}.insecure", "tls.cert"),
            )
    yield from _check_strangers(config)
    yield from _check_ports(config)


def _check_workers(config: ServingConfig) -> Iterator[ConfigFinding]:
    for look in (_check_role, _check_labels, _check_engine, _check_device):
        for role in ROLES:
            yield from look(config, role)
    yield from _check_agreement(config)
    yield from _check_timed(config)


def _check_strangers(config: ServingConfig) -> Iterator[ConfigFinding]:
    """TLS keeps out those who listen, not those who call."""
    admin = config.admin
    is_closed = config.auth.keys_file is not None or config.tls.client_ca is not None
    # Without TLS that address is refused already.
    if not (is_closed or admin.insecure or config.tls.cert is None or is_loopback(admin.host)):
        yield ConfigFinding(
            "admin.host",
            f"refusing to let everybody who reaches {admin.host} change the cluster; set auth.keys_file or "
            "tls.client_ca, use 127.0.0.1, or set admin.insecure: true where the network keeps strangers out",
            ("admin.insecure", "auth.keys_file", "tls.client_ca", "tls.cert"),
        )


def _check_ports(config: ServingConfig) -> Iterator[ConfigFinding]:
    http_port = config.router.http_port
    for name, port in (("router.port", config.router.port), ("admin.port", config.admin.port)):
        if http_port and http_port == port:
            message = f"{http_port} is {name} as well; use 8000, 0 for any free one, or null for no HTTP"
            yield ConfigFinding("router.http_port", message, (name,))
    if config.admin.port and config.admin.port == config.router.port:
        yield ConfigFinding(
            "admin.port",
            f"{config.admin.port} is router.port as well; use {config.admin.port + 1}, or 0 for any free one",
            ("router.port",),
        )


def _check_tls(config: ServingConfig) -> Iterator[ConfigFinding]:
    """A certificate is of no use without its key, nor either without the authority where both sides verify."""
    for section, names in (("tls", ("cert", "key")), ("internal_tls", ("cert", "key", "ca"))):
        values = vars(getattr(config, section))
        given = [name for name, path in values.items() if path is not None]
        missing = [name for name in names if values[name] is None]
        if given and missing:
            yield ConfigFinding(
                f"{section}.{missing[0]}",
                f"is missing beside {section}.{given[0]}; name {' and '.join(names)}, or leave all of {section} null",
                tuple(f"{section}.{name}" for name in given),
            )


def _check_state(config: ServingConfig) -> Iterator[ConfigFinding]:
    """The URL itself is not repeated, as it may hold a password."""
    if config.redis is None:
        return
    try:
        url = urlsplit(config.redis)
        is_good = url.scheme in ("redis", "rediss") and bool(url.hostname) and url.port != 0
        is_good = is_good and re.fullmatch(r"(/\d*)?", url.path) is not None
    except ValueError:  # a port that is none
        is_good = False
    if not is_good:
        yield ConfigFinding(
            "state", "is not of the form redis://HOST:PORT[/DB]; use that, rediss:// for TLS, memory, or null"
        )


def _check_traces(config: ServingConfig) -> Iterator[ConfigFinding]:
    """The URL itself is not repeated, as it may hold a password."""
    if config.router.trace_endpoint is None:
        return
    try:
        url = urlsplit(config.router.trace_endpoint)
        is_good = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        is_good = is_good and not url.query and not url.fragment
    except ValueError:  # a port that is none
        is_good = False
    if not is_good:
        yield ConfigFinding("router.trace_endpoint", "is not of the form http://HOST:PORT; use that, https://, or null")


def _check_batch_store(config: ServingConfig) -> Iterator[ConfigFinding]:
    """The URL is not repeated here, either."""
    if "://" in (config.router.batch_store or ""):
        yield ConfigFinding(
            "router.batch_store", "must be a file; to keep batches in Redis, name it in state and use null"
        )


def _check_spread(config: ServingConfig) -> Iterator[ConfigFinding]:
    """Routers on several machines cannot use the address or a file of one."""
    if config.placement.routers != "spread":
        return
    host, others = config.router.host, ("placement.routers",)
    if host not in ANY_HOST:
        yield ConfigFinding(
            "router.host", f"{host} is one machine's, and placement.routers is spread; use 0.0.0.0", others
        )
    if config.router.batch_store is not None:
        message = "is a file of one machine, and placement.routers is spread; name a Redis in state, and use null"
        yield ConfigFinding("router.batch_store", message, others)


def _check_role(config: ServingConfig, name: RoleName) -> Iterator[ConfigFinding]:
    role, prefix = config.role(name), f"roles.{name}"
    if name == "decode" and not role.devices:
        yield ConfigFinding(
            f"{prefix}.devices", "must be at least 1, since only decode workers generate tokens (got 0)"
        )
    elif role.devices % role.tensor_parallel:
        below = role.devices - role.devices % role.tensor_parallel
        choices = f"{below} or {below + role.tensor_parallel}" if below else f"{role.tensor_parallel}"
        yield ConfigFinding(
            f"{prefix}.devices",
            f"{role.devices} is not a multiple of tensor_parallel {role.tensor_parallel}; use {choices}",
            (f"{prefix}.tensor_parallel",),
        )
    elif role.num_workers < role.min_workers:
        yield ConfigFinding(
            f"{prefix}.min_workers",
            f"{role.min_workers} is more than the {role.num_workers} that {role.devices} devices make with "
            f"tensor_parallel {role.tensor_parallel}; use {role.num_workers}",
            (f"{prefix}.devices", f"{prefix}.tensor_parallel"),
        )
    if role.tensor_parallel % role.expert_parallel:
        sizes = [str(n) for n in range(1, role.tensor_parallel + 1) if role.tensor_parallel % n == 0]
        yield ConfigFinding(
            f"{prefix}.expert_parallel",
            f"{role.expert_parallel} does not divide tensor_parallel {role.tensor_parallel}; use {' or '.join(sizes)}",
            (f"{prefix}.tensor_parallel",),
        )
    yield from _check_short_names(config, name)
    engine = config.engine_of(name)
    tokens, block_size = engine.kv_cache_tokens, engine.block_size
    if role.split_latents and block_size != "auto" and block_size % role.tensor_parallel:
        yield ConfigFinding(
            f"{prefix}.split_latents",
            f"each of {role.tensor_parallel} devices (tensor_parallel) keeps an equal part of a block, which has "
            f"{block_size} tokens; use false, or a block_size that they divide",
            (f"{prefix}.tensor_parallel", f"{prefix}.block_size", "engine.block_size"),
        )
    if tokens is not None and block_size != "auto" and tokens < block_size:
        yield ConfigFinding(
            _key_of(config, name, "engine.kv_cache_tokens"),
            f"{tokens} tokens do not make one block of the {name} workers, which has {block_size}",
            (f"{prefix}.kv_cache_tokens", f"{prefix}.block_size", "engine.block_size"),
        )


def _check_short_names(config: ServingConfig, name: RoleName) -> Iterator[ConfigFinding]:
    for key in SHORT_NAMES:
        short, value = getattr(config.role(name), key), getattr(config.role(name).engine, key)
        if short is not None and value is not None and short != value:
            why = f"{short}, and roles.{name}.engine.{key} is {value}: they are one setting; leave one of them out"
            yield ConfigFinding(f"roles.{name}.{key}", why, (f"roles.{name}.engine.{key}",))


def _key_of(config: ServingConfig, role: RoleName, key: str) -> str:
    """The key that decides a setting of a role's workers: the role's own where that is set, else the common one."""
    section, _, name = key.partition(".")
    if getattr(getattr(config.role(role), section), name) is not None:
        return f"roles.{role}.{key}"
    is_short = section == "engine" and name in SHORT_NAMES and getattr(config.role(role), name) is not None
    return f"roles.{role}.{name}" if is_short else key


def _check_growth(config: ServingConfig) -> Iterator[ConfigFinding]:
    most, named = config.rebalance.auto.max_devices, sum(config.role(role).devices for role in ROLES)
    if most is not None and most < named:
        yield ConfigFinding(
            "rebalance.auto.max_devices",
            f"{most} is less than the {named} that the roles name; use {named} or more, or null",
            tuple(f"roles.{role}.devices" for role in ROLES),
        )


def _check_labels(config: ServingConfig, role: RoleName) -> Iterator[ConfigFinding]:
    labels, where = config.labels_of(role), _key_of(config, role, "placement.labels")
    for text in labels:
        if _LABEL.fullmatch(text) is None:
            yield ConfigFinding(
                where,
                f"{text} is not KEY=VALUE, such as ray.io/accelerator-type=H100; VALUE may be !VALUE or in(ONE,OTHER)",
            )
    keys = [text.partition("=")[0] for text in labels]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        yield ConfigFinding(where, f"{twice} is there twice; for either of two values: {twice}=in(ONE,OTHER)")


_NEEDS = (("kv_disk_bytes", "kv_host_bytes"), ("kv_store_bytes", "kv_host_bytes"), ("kv_store_bytes", "kv_store_path"))
_STORE = "a folder that every node has, or a URL such as s3://BUCKET/FOLDER"
_OF_ONE_PROCESS = ("memory://", "file://", "local://", "data:")
"""File systems of fsspec that are no place for what workers share; folders are written without a protocol."""


def _check_engine(config: ServingConfig, role: RoleName) -> Iterator[ConfigFinding]:
    engine = config.engine_of(role)
    if engine.max_num_batched_tokens < engine.num_seqs:
        yield ConfigFinding(
            _key_of(config, role, "engine.max_num_batched_tokens"),
            f"must be at least max_num_seqs ({engine.num_seqs}), since decoding computes one token of each "
            f"sequence in a step (got {engine.max_num_batched_tokens})",
            (_key_of(config, role, "engine.max_num_seqs"),),
        )
    for size, other in _NEEDS:
        if getattr(engine, size) and not getattr(engine, other):
            needy, needed = (_key_of(config, role, f"engine.{name}") for name in (size, other))
            why = _STORE if other == "kv_store_path" else "KV comes there by way of host memory"
            yield ConfigFinding(needy, f"needs {other}: {why}", (needed,))
    if (engine.kv_store_path or "").startswith(_OF_ONE_PROCESS):
        yield ConfigFinding(
            _key_of(config, role, "engine.kv_store_path"), f"{engine.kv_store_path} is not shared; use {_STORE}"
        )
    if "://" in (engine.kv_disk_path or ""):
        yield ConfigFinding(
            _key_of(config, role, "engine.kv_disk_path"),
            f"must be a folder on each node's own disk (got {engine.kv_disk_path}); a URL can be kv_store_path",
        )


def _check_device(config: ServingConfig, role: RoleName) -> Iterator[ConfigFinding]:
    engine, transport = config.engine_of(role), config.transfer.transport
    device, of_device = engine.device, _key_of(config, role, "engine.device")
    if device != "auto" and transport != "auto" and transport not in transports_of(device):
        memory = "GPU" if device == "cpu" else "CPU"
        kinds = {config.engine_of(each).device for each in ROLES} - {"auto"}
        fitting = [name for name in transports_of(device) if all(name in transports_of(kind) for kind in kinds)]
        choices = ", ".join(("auto", *fitting[:-1])) + f" or {fitting[-1]}"
        yield ConfigFinding(
            "transfer.transport",
            f"{transport} moves {memory} memory, and {of_device} is {device}; use {choices}",
            (of_device,),
        )
    kv_dtype, of_kv_dtype = engine.kv_cache_dtype, _key_of(config, role, "engine.kv_cache_dtype")
    if kv_dtype != "auto" and config.transfer.wire_format != "native":
        yield ConfigFinding(
            "transfer.wire_format",
            f"KV of {of_kv_dtype} {kv_dtype} is not rounded to {config.transfer.wire_format} once more; use native",
            (of_kv_dtype,),
        )
    of_gpus = "runs on a GPU only, and {} is cpu; use cpu or auto"
    for key, value, unfit, why in (
        ("engine.attention", engine.attention, ("cpu", "flash_attn"), of_gpus),
        ("engine.attention", engine.attention, ("cpu", "varlen"), of_gpus),
        ("engine.kv_cache_dtype", kv_dtype, ("cpu", "fp8"), "is for GPUs, and {} is cpu; use int8"),
        ("engine.kernels", engine.kernels, ("cuda", "native"), "are for the CPU, and {} is cuda; use auto"),
    ):
        if (device, value) == unfit:
            yield ConfigFinding(_key_of(config, role, key), f"{value} {why.format(of_device)}", (of_device,))
    if engine.deterministic:
        yield from _check_deterministic(config, role)


def _check_deterministic(config: ServingConfig, role: RoleName) -> Iterator[ConfigFinding]:
    """Yields what is known to break the promise before a device is looked at."""
    engine = config.engine_of(role)
    if engine.expert_rebalance_tokens:
        yield ConfigFinding(
            _key_of(config, role, "engine.expert_rebalance_tokens"),
            f"{engine.expert_rebalance_tokens}: experts that change places are added up in another order, and "
            "engine.deterministic is true; use 0",
            ("engine.deterministic",),
        )
    for key, value, fitting in (
        (_key_of(config, role, "engine.kernels"), engine.kernels, ("auto", "native")),
        (_key_of(config, role, "engine.attention"), engine.attention, ("auto", "triton", "cpu")),
        ("transfer.wire_format", config.transfer.wire_format, ("native",)),
    ):
        if value not in fitting:
            yield ConfigFinding(
                key,
                f"{value} does not give a token the same bits in any step, and engine.deterministic is true; use "
                f"{fitting[0]}",
                ("engine.deterministic",),
            )


def _check_agreement(config: ServingConfig) -> Iterator[ConfigFinding]:
    """Yields settings that must be the same for both roles, where both have workers, or that do not go together."""
    prefill, decode = (config.engine_of(role) for role in ROLES)
    if not config.roles.prefill.devices:
        return
    if prefill.kv_cache_dtype != decode.kv_cache_dtype:
        yield _disagreement(config, "engine.kv_cache_dtype", "KV is handed over as it lies in the pool")
    dtypes = [config.model_of(role).dtype for role in ROLES]
    if dtypes[1] == "float16" and dtypes[0] in ("float32", "bfloat16"):
        yield _disagreement(config, "model.dtype", f"KV of {dtypes[0]} reaches beyond the range of float16")
    if config.engine.deterministic:
        for key in ("model.dtype", "model.quantization", "engine.device", "engine.attention", "engine.kernels"):
            one, other = (_value_of(config, role, key) for role in ROLES)
            if one != other:
                why = "engine.deterministic is true, and they do not give a token the same bits"
                yield _disagreement(config, key, why, ("engine.deterministic",))
        for key, parts in (("tensor_parallel", "ranks"), ("expert_parallel", "groups of ranks")):
            sizes = [getattr(config.role(role), key) for role in ROLES]
            if sizes[0] != sizes[1]:
                yield ConfigFinding(
                    f"roles.prefill.{key}",
                    f"{sizes[0]} {parts} add other sums than decode's {sizes[1]}, and engine.deterministic is true; "
                    f"use {sizes[1]}",
                    (f"roles.decode.{key}", "engine.deterministic"),
                )


def _disagreement(config: ServingConfig, key: str, why: str, rests_on: tuple[str, ...] = ()) -> ConfigFinding:
    """Blames the role that sets the key for itself, decode where both do, and tells it to use the other's value."""
    keys = [_key_of(config, role, key) for role in ROLES]
    blamed: RoleName = "decode" if keys[1] != key else "prefill"
    other: RoleName = "prefill" if blamed == "decode" else "decode"
    value, theirs = (_value_of(config, role, key) for role in (blamed, other))
    return ConfigFinding(
        _key_of(config, blamed, key),
        f"{value}, where {other} workers have {theirs} ({_key_of(config, other, key)}): {why}; use {theirs}",
        (_key_of(config, other, key), *rests_on),
    )


def _value_of(config: ServingConfig, role: RoleName, key: str) -> str:
    section, _, name = key.partition(".")
    return str(getattr(config.model_of(role) if section == "model" else config.engine_of(role), name))


def _check_timed(config: ServingConfig) -> Iterator[ConfigFinding]:
    if config.engine.timed_steps.is_on:
        sizes = {f"roles.{role}.tensor_parallel": config.role(role).tensor_parallel for role in ROLES}
        for role in ROLES:
            device = config.engine_of(role).device
            for key, why in timed_obstacles(device, config.transfer.wire_format, sizes):
                where = _key_of(config, role, key) if key == "engine.device" else key
                yield ConfigFinding(where, why, ("engine.timed_steps",))


def _check_timers(config: ServingConfig) -> Iterator[ConfigFinding]:
    """A peer must be able to miss a heartbeat before it is suspect, and to be suspect before it is given up."""
    transfer = config.transfer
    for key, other, why in (
        ("suspect_after_s", "heartbeat_s", "a healthy peer is silent for that long"),
        ("dead_after_s", "suspect_after_s", "a peer is suspect before it is given up"),
    ):
        value, least = getattr(transfer, key), getattr(transfer, other)
        if least >= value:
            what = f"must be longer than {other} ({least:g}), since {why} (got {value:g})"
            yield ConfigFinding(f"transfer.{key}", what, (f"transfer.{other}",))
