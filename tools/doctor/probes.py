"""Checks that send requests: whether the cluster disaggregates, how fast pairs hand over, whether it writes to Redis.

A probe is a prompt of random token ids that bypasses the prefix caches. It asks for a few tokens and is cancelled when
its time is up.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from cluster.errors import BatonError, PermissionDenied, Unauthenticated
from cluster.pb import admin_pb2, generation_pb2, worker_pb2
from cluster.redis_store import RedisStore
from cluster.state import StoreAway
from cluster.text import format_bytes
from cluster.transports import TRANSPORT_NAMES
from tools.client import make_spec
from tools.doctor.bounded import on_thread
from tools.doctor.check import Finding, Half, Result, check, ok, problem, skipped, warning
from tools.doctor.subject import ClusterContact, Subject

_MAX_PROMPT_TOKENS = 4096
_MARGIN = 16
"""Tokens of the context that a probe leaves for its output."""
_FIRST_ID = 10
"""Lower ids are often special tokens."""
_PROBE_S = 15.0
_ROUNDS = 4
_MUCH_SLOWER = 0.25
_HANDED_OVER = re.compile(r"(?:disaggregated|retried [^:]*): (\S+) -> ([^\s,]+)")
_FAILED_BEFORE = re.compile(r"retried|local prefill on \S+ after ")
"""Does not match "local prefill on decode-0: first token predicted after 15 ms", which is no failure."""
_TRIES = 3
"""A router that is busy for a moment may prefer a local prefill once, but hardly three times."""
_SETTLE_S = 1.0
_POLL_S = 0.02
_TRANSPORTS = (*TRANSPORT_NAMES, "other")

Pair = tuple[str, str]
"""Ids of a prefill and a decode worker."""


@dataclass(frozen=True)
class Probe:
    """The result of one probe."""

    num_tokens: int
    placement: str
    """`Timing.placement`."""
    failure: str = ""

    @property
    def pair(self) -> Pair | None:
        """The workers of its hand-off; None: there was none."""
        found = _HANDED_OVER.match(self.placement)
        return None if found is None else (found[1], found[2])

    @property
    def is_handed_over(self) -> bool:
        """The first attempt was disaggregated."""
        return self.pair is not None and self.placement.startswith("disaggregated")

    @property
    def has_failed_before(self) -> bool:
        return _FAILED_BEFORE.match(self.placement) is not None


@dataclass(frozen=True)
class HandoffMeasurement:
    """One pair's hand-offs in one round."""

    sender: str
    receiver: str
    transport: str
    size_bytes: float
    seconds: float
    """Seconds from the reading of the first chunk until the decode worker has everything."""
    exposed_seconds: float
    """The part of `seconds` after the first token."""
    num_at_once: int

    @property
    def bytes_per_s(self) -> float:
        return self.size_bytes / self.seconds


@check(Half.CLUSTER, needs_config=False, is_probe=True)
def disaggregation(subject: Subject) -> Iterator[Finding]:
    """Sends a long prompt: whether one worker computes it and another one decodes, by `Timing.placement`."""
    if (why := _cannot_probe(subject)) is not None:
        yield why
        return
    senders, receivers = (_ready(subject, role) for role in (worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE))
    for _ in range(_TRIES if senders and receivers else 1):
        probe = _send(subject.cluster, _prompt(subject))
        if probe.failure or probe.is_handed_over or probe.has_failed_before:
            break
    found = f"a prompt of {probe.num_tokens:,} tokens: {probe.placement}"
    if probe.failure:
        yield problem(f"a prompt of {probe.num_tokens:,} tokens failed: {probe.failure}", "see the checks before")
    elif probe.pair is not None and probe.is_handed_over:
        yield ok(found, prefill=probe.pair[0], decode=probe.pair[1])
    elif not receivers:
        found = f"the cluster does not disaggregate, no decode worker is ready; {found}"
        yield problem(found, "see `workers`; prefill workers stand in meanwhile")
    elif not senders:
        yield warning(
            f"the cluster does not disaggregate, it has no prefill worker; {found}",
            "set roles.prefill.devices to 1 or more, or `baton rebalance P:D`",
        )
    elif probe.has_failed_before:
        yield problem(f"a hand-off failed; {found}", "see `transports` and `workers`, and the log of both workers")
    else:
        yield warning(
            f"the cluster did not disaggregate, {_TRIES} times: the router predicted that to be faster; "
            f"{found}{_so_far(subject)}",
            "expected where prompts are short for this hardware (docs/routing.md); router.policy: least_loaded hands "
            "every prompt over",
        )


@check(Half.CLUSTER, needs_config=False, is_probe=True)
def bandwidth(subject: Subject) -> Iterator[Finding]:
    """Sends long prompts: how fast each pair hands over, by the sender's metrics; a lower bound of the link, as the
    prompt is computed meanwhile."""
    if (why := _cannot_probe(subject)) is not None:
        yield why
        return
    senders, receivers = (_ready(subject, role) for role in (worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE))
    wanted = set(itertools.product(senders, receivers))
    if not wanted:
        yield skipped("there are no ready workers of both roles")
        return
    pages = {w.worker_id: w.info.metrics_address for w in subject.status.workers if w.worker_id in senders}
    if not all(pages.values()):
        yield skipped("workers have no metrics pages to read it from; set metrics.workers: true")
        return
    measured: dict[Pair, HandoffMeasurement] = {}
    until = time.monotonic() + _PROBE_S
    for num_at_once in (1, *[max(len(senders), len(receivers))] * (_ROUNDS - 1)):
        if wanted <= measured.keys() or time.monotonic() > until:
            break
        try:
            for found in _round(subject, pages, num_at_once):
                measured.setdefault((found.sender, found.receiver), found)
        except OSError as error:
            yield skipped(f"a worker's metrics page could not be read: {error}")
            return
    yield from _judge(subject, measured, sorted(wanted - measured.keys()))


@check(Half.CLUSTER, is_probe=True)
def journal(subject: Subject) -> Iterator[Finding]:
    """Sends a request that may be resumed: whether the router writes it into the Redis of `state`."""
    url = subject.serving.redis
    if url is None:
        yield skipped("state names no Redis: the journal is in a file of the routers' machine, or in their memory")
        return
    if (why := _cannot_probe(subject)) is not None:
        yield why
        return
    spec = _spec(_prompt(subject)[:_MARGIN], 64)
    spec.resume.SetInParent()
    generation_id = ""
    try:
        with subject.cluster.client.stream(spec, timeout_s=_PROBE_S) as stream:
            for event in stream:
                generation_id = generation_id or event.started.generation_id
                if event.HasField("delta"):
                    break
        is_there = asyncio.run(_is_recorded(url, generation_id, subject.options.call_s))
    except (BatonError, StoreAway, TimeoutError) as error:
        yield problem(f"it could not be seen whether the router writes to Redis: {error}", "see `redis` and `router`")
        return
    finally:
        if generation_id:
            subject.cluster.client.cancel(generation_id)
    if is_there:
        yield ok("the router writes to the configured Redis: a probe's record is there")
    else:
        yield problem(
            "the router does not write to the configured Redis: it holds no record of a probe that began",
            "let the router's machine reach Redis (its log says when the store is away), and restart the cluster after "
            "a change of `state`",
        )


def _cannot_probe(subject: Subject) -> Finding | None:
    if subject.cluster.health != "SERVING":
        return skipped("the cluster is not serving at present; see `router`")
    try:
        subject.cluster.client.models()
    except (PermissionDenied, Unauthenticated) as error:
        return skipped(f"this API key may send no request ({error.message}); name one of the scope `generate`")
    return None


def _ready(subject: Subject, role: int) -> list[str]:
    """Ids of the workers of a role that take requests."""
    return [
        w.worker_id
        for w in subject.status.workers
        if w.state == admin_pb2.WorkerStatus.STATE_READY and w.role == role and not w.is_draining
    ]


def _prompt(subject: Subject) -> list[int]:
    """Random token ids, as many as the model and every KV pool allow."""
    infos = [w.info for w in subject.status.workers if w.state == admin_pb2.WorkerStatus.STATE_READY]
    longest = min((i.max_model_len for i in infos), default=0) - _MARGIN
    pool = min((i.num_blocks * i.block_size for i in infos), default=0) // 2
    length = max(1, min(_MAX_PROMPT_TOKENS, longest, pool))
    most = subject.cluster.client.models()[0].vocab_size
    return [random.randrange(min(_FIRST_ID, most - 1), most) for _ in range(length)]


def _spec(token_ids: Sequence[int], max_output_tokens: int) -> generation_pb2.GenerationSpec:
    spec = make_spec(
        token_ids, max_output_tokens=max_output_tokens, temperature=0.0, ignore_eos=True, include_timing=True
    )
    spec.cache.bypass_prefix_cache = True
    return spec


def _send(cluster: ClusterContact, token_ids: Sequence[int]) -> Probe:
    try:
        with cluster.client.stream(_spec(token_ids, 2), timeout_s=_PROBE_S) as stream:
            timing = next((e.completed.timing for e in stream if e.HasField("completed")), None)
    except BatonError as error:
        return Probe(len(token_ids), "", error.message)
    if timing is None:
        return Probe(len(token_ids), "", "the stream ended without its last message")
    return Probe(len(token_ids), timing.placement)


def _so_far(subject: Subject) -> str:
    """Tells how the router has placed other requests, if its metrics page can be read."""
    address = subject.status.router.metrics_address
    try:
        page = subject.cluster.page(address)
        handed = page.total("baton_placements_total", kind="disaggregated")
        return f"; of all its {page.total('baton_placements_total'):,.0f} placements {handed:,.0f} were disaggregated"
    except (OSError, ValueError, http.client.HTTPException):
        return ""


@dataclass(frozen=True)
class _SenderTotals:
    """Counters of a sender since its start."""

    num_handoffs: float
    seconds: float
    exposed_seconds: float
    size_bytes: Mapping[str, float]
    """Bytes sent by transport."""


def _totals(subject: Subject, pages: Mapping[str, str]) -> dict[str, _SenderTotals]:
    """The counters of each sender. Raises OSError for one whose page cannot be read."""
    totals = {}
    for worker_id, page in subject.cluster.pages(pages).items():
        if isinstance(page, str):
            raise OSError(f"{worker_id}: {page}")
        totals[worker_id] = _SenderTotals(
            page.total("baton_kv_transfer_seconds_count"),
            page.total("baton_kv_transfer_seconds_sum"),
            page.total("baton_kv_transfer_exposed_seconds_sum"),
            {t: page.total("baton_kv_transfer_bytes_total", direction="sent", transport=t) for t in _TRANSPORTS},
        )
    return totals


def _round(subject: Subject, pages: Mapping[str, str], num_at_once: int) -> Iterator[HandoffMeasurement]:
    """Sends probes and measures each sender that handed over one of them and nothing else."""
    before = _totals(subject, pages)
    pairs = [probe.pair for probe in _send_at_once(subject, num_at_once) if probe.pair is not None]
    senders = {sender for sender, _ in pairs if sender in pages}
    until = time.monotonic() + _SETTLE_S
    after = _totals(subject, pages)
    while any(after[s].num_handoffs == before[s].num_handoffs for s in senders) and time.monotonic() < until:
        time.sleep(_POLL_S)  # the sender is the last to know that everything has arrived
        after = _totals(subject, pages)
    for sender, receiver in pairs:
        if sender in pages and after[sender].num_handoffs - before[sender].num_handoffs == 1:
            yield _between(before[sender], after[sender], sender, receiver, num_at_once)


def _between(
    before: _SenderTotals, after: _SenderTotals, sender: str, receiver: str, num_at_once: int
) -> HandoffMeasurement:
    sizes = {name: size - before.size_bytes[name] for name, size in after.size_bytes.items()}
    return HandoffMeasurement(
        sender,
        receiver,
        max(sizes, key=lambda name: sizes[name]),
        sum(sizes.values()),
        max(after.seconds - before.seconds, 1e-9),
        after.exposed_seconds - before.exposed_seconds,
        num_at_once,
    )


def _send_at_once(subject: Subject, count: int) -> list[Probe]:
    """Sends several probes together: a busy worker makes the router choose another."""
    prompts = [_prompt(subject) for _ in range(count)]
    sent = [on_thread(partial(_send, subject.cluster, prompt), "probe") for prompt in prompts]
    return [future.result() for future in sent]


def _judge(subject: Subject, measured: Mapping[Pair, HandoffMeasurement], missing: Sequence[Pair]) -> Iterator[Finding]:
    unseen = ", ".join(f"{p} -> {d}" for p, d in missing)
    if not measured:
        yield skipped(f"no probe was handed over alone, so nothing was measured ({unseen}); see `disaggregation`")
        return
    tpot_s = None if subject.config is None else subject.config.rebalance.slo.tpot_s
    for pair in measured.values():
        alike = [m.bytes_per_s for m in measured.values() if m.num_at_once == pair.num_at_once]
        yield _judge_pair(pair, max(alike), tpot_s)
    if missing:
        yield Finding(Result.SKIPPED, f"not measured, as the router sent no probe there alone: {unseen}")


def _judge_pair(pair: HandoffMeasurement, fastest: float, tpot_s: float | None) -> Finding:
    rate = format_bytes(round(pair.bytes_per_s))
    beside = "" if pair.num_at_once == 1 else f", with {pair.num_at_once} probes at once"
    found = (
        f"{pair.sender} -> {pair.receiver} by {pair.transport}: {format_bytes(round(pair.size_bytes))} in "
        f"{1000 * pair.seconds:.1f} ms, while the prompt was computed, so {rate}/s at least{beside}; "
        f"{1000 * pair.exposed_seconds:.1f} ms of it after the first token"
    )
    values = {**asdict(pair), "bytes_per_s": pair.bytes_per_s}
    if pair.bytes_per_s < _MUCH_SLOWER * fastest:
        remedy = "compare the links of both machines (ethtool, nvidia-smi topo -m) with those of the fastest pair"
        return warning(f"{found}; the fastest pair does {format_bytes(round(fastest))}/s", remedy, **values)
    if tpot_s is not None and pair.exposed_seconds > tpot_s:
        found += f"; the second token waits longer than rebalance.slo.tpot_ms ({1000 * tpot_s:g} ms) for it"
        return warning(found, "use a faster link, or transfer.wire_format: int8", **values)
    return ok(found, **values)


async def _is_recorded(url: str, generation_id: str, timeout_s: float) -> bool:
    """Whether Redis has a record: the router writes it before it sends a token. Raises StoreAway."""
    store = RedisStore(url)
    try:
        async with asyncio.timeout(timeout_s):
            return await store.read(generation_id) is not None
    finally:
        await store.close()
