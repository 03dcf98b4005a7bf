"""Checks of the running cluster that only read: the router, versions, workers, transports, KV pools, clocks."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping

from cluster.address import address_here
from cluster.config.schema import ROLES
from cluster.errors import FailedPrecondition, PermissionDenied, Unauthenticated
from cluster.pb import admin_pb2, worker_pb2
from cluster.program import ExitCode
from cluster.text import count_of, state_name
from cluster.transports import pick
from tools.doctor.check import Finding, Half, baton_version, check, ok, problem, skipped, warning
from tools.doctor.subject import Subject, fetch

_READY = admin_pb2.WorkerStatus.STATE_READY
_MAX_SKEW_S = 1.0
_TIERS = {"host": "host memory", "disk": "its disk's file", "store": "the store that workers share"}
_SEE_LOG = "look at `baton status` and at its log (log_dir)"


@check(Half.CLUSTER, needs_config=False, exit_code=ExitCode.NOT_REACHABLE)
def router(subject: Subject) -> Iterator[Finding]:
    """Whether a router answers, takes the API key, and serves."""
    cluster = subject.cluster
    if cluster.why_not and not cluster.is_asked_for:
        yield skipped(cluster.why_not)
    elif cluster.why_not:
        remedy = "start a cluster with `baton serve`, or name another --address; one with TLS needs --tls-ca"
        yield problem(cluster.why_not, remedy)
    elif isinstance(cluster.status_error, Unauthenticated | PermissionDenied):
        remedy = "name one of the scope `admin` with --api-key or BATON_API_KEY"
        yield problem(f"the router at {cluster.address} wants an API key: {cluster.status_error.message}", remedy)
    elif cluster.status_error is not None:
        yield problem(
            f"the router at {cluster.address} does not report its status: {cluster.status_error.message}", _SEE_LOG
        )
    elif cluster.health != "SERVING":
        yield problem(
            f"the router at {cluster.address} answers, but does not serve: its health is {cluster.health}",
            "it needs a ready decode worker, and a prefill worker where the roles name one; see `workers`",
        )
    else:
        assert cluster.status is not None
        running = cluster.status.router
        yield ok(
            f"{cluster.status.model} at {cluster.address}, up {running.uptime_s} s, {running.num_running} running, "
            f"{running.num_queued} queued",
            address=cluster.address,
        )


@check(Half.CLUSTER, needs_config=False)
def versions(subject: Subject) -> Iterator[Finding]:
    """Whether all workers have the same weights, the model folder here has them too, and Baton is the same."""
    status = subject.status
    infos = {w.worker_id: w.info for w in sorted(status.workers, key=lambda w: w.worker_id) if w.HasField("info")}
    revisions: dict[str, list[str]] = {}
    for worker_id, info in infos.items():
        revisions.setdefault(f"{info.model}@{info.weights_revision}", []).append(worker_id)
    if len(revisions) > 1:
        split = "; ".join(f"{', '.join(ids)}: {name}" for name, ids in revisions.items())
        remedy = "wait if they are being changed; else put one model folder on every machine, and restart the others"
        yield problem(f"workers serve different weights: {split}", remedy)
    elif revisions:
        yield ok(f"{next(iter(revisions))} on {count_of(len(infos), 'worker')}")
    ours = subject.machine("checkpoint") if subject.config is not None else None
    theirs = {info.weights_revision.partition("+")[0] for info in infos.values()}  # without type and rounding
    if (
        ours
        and "found" in ours
        and theirs
        and ours["found"]["revision"] not in theirs
        and subject.cluster.is_configured
    ):
        yield warning(
            f"the model folder here has revision {ours['found']['revision']}, and none of the workers has it",
            "restart the cluster to serve what is in the folder now",
        )
    yield from _baton_versions(subject)


@check(Half.CLUSTER, needs_config=False)
def workers(subject: Subject) -> Iterator[Finding]:
    """Whether each worker is ready, how often it was started and why, and whether there are as many as named."""
    status, state = subject.status, subject.cluster.state
    processes = {} if state is None else {p.name: p for p in state.processes}
    num_ready = 0
    for worker in status.workers:
        process = processes.get(worker.worker_id)
        why = f" ({process.why})" if process is not None and process.why else ""
        if worker.state != _READY:
            found = f"{worker.worker_id} at {worker.address} is {state_name(worker)}, not ready{why}"
            yield problem(found, f"{_SEE_LOG}; `baton serve` starts it again by itself")
            continue
        num_ready += 1
        if process is not None and process.num_starts > 1:
            found = f"{worker.worker_id} has been started {process.num_starts} times{why}"
            yield warning(found, _SEE_LOG)
    known = {worker.worker_id for worker in status.workers}
    absent = [p for p in processes.values() if p.role and p.name not in known and p.state != "stopped"]
    for process in absent:
        found = f"{process.name} is {process.state}" + (f" ({process.why})" if process.why else "")
        yield problem(f"{found}: the router has no such worker", f"wait for it, or {_SEE_LOG}")
    if not status.workers and not absent:
        yield problem("the router knows no worker", "look at the controller's log; `baton serve` names its workers")
    if not absent:
        yield from _missing(subject, status)
    if num_ready:
        yield ok(f"{num_ready} of {count_of(len(status.workers) + len(absent), 'worker')} ready")


@check(Half.CLUSTER, needs_config=False)
def transports(subject: Subject) -> Iterator[Finding]:
    """Whether each prefill worker has a transport in common with each decode worker, and which."""
    by_role: dict[int, list[admin_pb2.WorkerStatus]] = {worker_pb2.ROLE_PREFILL: [], worker_pb2.ROLE_DECODE: []}
    for worker in subject.status.workers:
        if worker.state == _READY and worker.role in by_role:
            by_role[worker.role].append(worker)
    used: dict[str, int] = {}
    for sender in by_role[worker_pb2.ROLE_PREFILL]:
        for receiver in by_role[worker_pb2.ROLE_DECODE]:
            ours, theirs = (tuple(filter(None, w.info.transport.split(","))) for w in (sender, receiver))
            is_near = sender.info.node == receiver.info.node
            layouts = [(w.info.block_size, w.info.dtype, len(w.info.ranks)) for w in (sender, receiver)]
            unequal = "" if layouts[0] == layouts[1] else "block sizes, types or ranks differ"
            try:
                fit, _ = pick(ours, theirs, is_same_host=is_near, page_obstacle=unequal)
            except FailedPrecondition:
                where = "one host" if is_near else "different hosts"
                yield problem(
                    f"no transport connects {sender.worker_id} ({sender.info.transport or 'none'}) and "
                    f"{receiver.worker_id} ({receiver.info.transport or 'none'}) on {where}: nothing is handed over "
                    "between them",
                    "set transfer.transport: auto for all workers, and restart them",
                )
            else:
                used[fit] = used.get(fit, 0) + 1
    if used:
        yield ok("pairs by transport: " + ", ".join(f"{count} {name}" for name, count in used.items()))
    elif not all(by_role.values()):
        yield skipped("there are no ready workers of both roles to connect")


@check(Half.CLUSTER, needs_config=False)
def kv_pools(subject: Subject) -> Iterator[Finding]:
    """Room in each worker's KV pool, what the tiers below it keep and whether copies failed, and slots of pairs that do
    not close."""
    there = [w for w in subject.status.workers if w.state == _READY and w.stats.blocks_total]
    for worker in there:
        info, stats = worker.info, worker.stats
        tokens, free = stats.blocks_total * info.block_size, (stats.blocks_free + stats.blocks_cached) * info.block_size
        found = f"{worker.worker_id}: a KV pool of {tokens:,} tokens, {free:,} free"
        if tokens < info.max_model_len:
            remedy = "raise engine.kv_cache_tokens, or lower model.max_model_len"
            yield warning(f"{found}; one request may have {info.max_model_len:,} and then never fits", remedy)
        elif not free:
            yield warning(f"{found}: requests wait or are preempted", "add decode workers, or raise kv_cache_tokens")
        else:
            yield ok(found, tokens=tokens, free_tokens=free)
        for tier in stats.tiers:
            kept = f"{tier.blocks_kept:,} of {tier.blocks_total:,} blocks kept"
            found = f"{worker.worker_id}: {kept} in {_TIERS.get(tier.tier, tier.tier)}"
            yield ok(f"{found}, {tier.num_hit_tokens:,} tokens found there", hit_tokens=tier.num_hit_tokens)
    addresses = {w.worker_id: w.info.metrics_address for w in there if w.info.metrics_address}
    yield from _troubles(subject, addresses)


@check(Half.CLUSTER, needs_config=False)
def clock_skew(subject: Subject) -> Iterator[Finding]:
    """The clocks of the workers and the router against this one, by the `Date` of their metrics pages.

    The header has whole seconds, so a difference is an interval, whose end nearest to zero counts.
    """
    addresses = {w.worker_id: w.info.metrics_address for w in subject.status.workers if w.state == _READY}
    addresses["router"] = subject.status.router.metrics_address
    looked, errors, is_wrong = 0, [], False
    for name, page in sorted(subject.cluster.pages(addresses).items()):
        try:
            if isinstance(page, str):
                raise ValueError(page)
            low, high = page.skew_s
        except ValueError as error:
            errors.append(f"{name}: {error}")
            continue
        looked += 1
        skew_s = 0.0 if low <= 0 <= high else min((low, high), key=abs)
        if abs(skew_s) >= _MAX_SKEW_S:
            is_wrong = True
            yield problem(
                f"the clock of {name} is {abs(skew_s):.0f} s or more {'ahead of' if skew_s > 0 else 'behind'} this one",
                "run an NTP client, such as chrony, on both machines",
                at_least_s=low,
                at_most_s=high,
            )
    if not looked:
        yield skipped(f"no clock could be read: {'; '.join(errors)}")
    elif not is_wrong:
        yield ok(f"{count_of(looked, 'clock')} within {_MAX_SKEW_S:g} s of this one")


def _missing(subject: Subject, status: admin_pb2.GetStatusResponse) -> Iterator[Finding]:
    """Reports workers that the file names and the cluster lacks. With `mode: auto` Baton chooses the split."""
    if subject.config is None or not subject.cluster.is_configured or subject.config.rebalance.mode == "auto":
        return
    for role, kind in zip(ROLES, (worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE), strict=True):
        wanted = subject.config.role(role).num_workers
        there = sum(w.role == kind for w in status.workers)
        if there != wanted:
            found = f"the file names {count_of(wanted, f'{role} worker')}, and the cluster has {there}"
            yield warning(found, "`baton apply` makes it so; one that was not started waits for room at Ray")


def _baton_versions(subject: Subject) -> Iterator[Finding]:
    """Compares Baton here with the router's, whose HTTP port gives the version without a key."""
    config, ours = subject.config, baton_version()
    if ours is None or config is None or not subject.cluster.is_configured or not config.router.http_port:
        return
    address = address_here(config.router.host, config.router.http_port)
    try:
        theirs = json.loads(fetch(address, "/version", subject.options.tls, subject.cluster.timeout_s)[1])["version"]
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        yield warning(f"the router's HTTP port {address} does not give its version: {error}", "see `ports`")
    else:
        if theirs != ours:
            yield warning(f"the router is Baton {theirs}, this is {ours}", "install the same version everywhere")
        else:
            yield ok(f"the router is Baton {theirs}, as this is")


def _troubles(subject: Subject, addresses: Mapping[str, str]) -> Iterator[Finding]:
    for worker_id, page in subject.cluster.pages(addresses).items():
        if isinstance(page, str):
            found = f"{worker_id}: its metrics page could not be read: {page}"
            yield warning(found, "let this machine reach that port, or call the doctor on the head")
        elif held := page.total("baton_kv_quarantined_bytes"):
            remedy = "if it stays, restart the worker (`baton drain`, then `baton apply`)"
            yield warning(f"{worker_id}: {held:,.0f} bytes of slots belong to pairs that do not close", remedy)
        elif failed := page.total("baton_kv_tier_events_total", event="failed"):
            remedy = "look at its log: the disk may be full, or damaged; prompts are computed instead"
            yield warning(f"{worker_id}: copies of {failed:,.0f} KV blocks between its tiers failed", remedy)
