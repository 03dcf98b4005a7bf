"""Checks of the running cluster that only look: the router, versions, workers, transports, KV pools, clocks."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from cluster.address import address_here
from cluster.errors import PermissionDenied, Unauthenticated
from cluster.pb import admin_pb2, worker_pb2
from cluster.proto_names import state_name
from cluster.units import count_of
from controller.plan import ROLES
from tools.doctor.contact import fetch
from tools.doctor.findings import Finding, ok, problem, skipped, warning
from tools.doctor.subject import Subject

_READY = admin_pb2.WorkerStatus.STATE_READY
_SAME_HOST = ("shm", "cuda_ipc")
_MOST_SKEW_S = 1.0
_LOOK = "look at `baton status` and at its log (log_dir)"


def router(subject: Subject) -> Iterator[Finding]:
    contact = subject.contact
    if contact.why_not and not contact.is_asked_for:
        yield skipped(contact.why_not)
    elif contact.why_not:
        remedy = "start a cluster with `baton serve`, or name another --address; one with TLS needs --tls-ca"
        yield problem(contact.why_not, remedy)
    elif isinstance(contact.refusal, Unauthenticated | PermissionDenied):
        remedy = "name one of the scope `admin` with --api-key or BATON_API_KEY"
        yield problem(f"the router at {contact.address} wants an API key: {contact.refusal.message}", remedy)
    elif contact.refusal is not None:
        yield problem(f"the router at {contact.address} tells no status: {contact.refusal.message}", _LOOK)
    elif contact.health != "SERVING":
        yield problem(
            f"the router at {contact.address} answers, and serves nobody: its health is {contact.health}",
            "it needs a ready decode worker, and a prefill worker where the roles name one; see `workers`",
        )
    else:
        assert contact.status is not None
        running = contact.status.router
        yield ok(
            f"{contact.status.model} at {contact.address}, up {running.uptime_s} s, {running.num_running} running, "
            f"{running.num_queued} queued",
            address=contact.address,
        )


def versions(subject: Subject) -> Iterator[Finding]:
    """Of Baton here and there, and of the weights that the workers and this folder have."""
    status = status_of(subject)
    infos = {w.worker_id: w.info for w in sorted(status.workers, key=lambda w: w.worker_id) if w.HasField("info")}
    revisions: dict[str, list[str]] = {}
    for worker_id, info in infos.items():
        revisions.setdefault(f"{info.model}@{info.weights_revision}", []).append(worker_id)
    if len(revisions) > 1:
        split = "; ".join(f"{', '.join(ids)}: {name}" for name, ids in revisions.items())
        remedy = "put the same model folder on every machine, and restart the workers that have another"
        yield problem(f"workers serve different weights: {split}", remedy)
    elif revisions:
        yield ok(f"{next(iter(revisions))} on {count_of(len(infos), 'worker')}")
    ours = subject.machine("checkpoint") if subject.config is not None else None
    told = {info.weights_revision for info in infos.values()}
    if ours and "found" in ours and told and ours["found"]["revision"] not in told and subject.contact.is_configured:
        yield warning(
            f"the model folder here has revision {ours['found']['revision']}, and none of the workers has it",
            "restart the cluster to serve what is in the folder now",
        )
    yield from _baton_versions(subject)


def workers(subject: Subject) -> Iterator[Finding]:
    status, contact = status_of(subject), subject.contact
    reasons = {p.name: p for p in contact.cluster.processes} if contact.cluster is not None else {}
    num_ready = 0
    for worker in status.workers:
        state = state_name(worker)
        process = reasons.get(worker.worker_id)
        why = f" ({process.why})" if process is not None and process.why else ""
        if worker.state != _READY:
            found = f"{worker.worker_id} at {worker.address} is {state}, not ready{why}"
            yield problem(found, f"{_LOOK}; `baton serve` starts it again by itself")
            continue
        num_ready += 1
        if process is not None and process.num_starts > 1:
            found = f"{worker.worker_id} has been started {process.num_starts} times{why}"
            yield warning(found, _LOOK)
    known = {worker.worker_id for worker in status.workers}
    absent = [p for p in reasons.values() if p.role and p.name not in known and p.state != "stopped"]
    for process in absent:
        found = f"{process.name} is {process.state}" + (f" ({process.why})" if process.why else "")
        yield problem(f"{found}: the router has no such worker", f"wait for it, or {_LOOK}")
    if not status.workers and not absent:
        yield problem("the router knows no worker", "look at the controller's log; `baton serve` names its workers")
    if not absent:
        yield from _missing(subject, status)
    if num_ready:
        yield ok(f"{num_ready} of {count_of(len(status.workers) + len(absent), 'worker')} ready")


def transports(subject: Subject) -> Iterator[Finding]:
    """For each prefill and decode worker, the one that the pair would use."""
    by_role: dict[int, list[admin_pb2.WorkerStatus]] = {worker_pb2.ROLE_PREFILL: [], worker_pb2.ROLE_DECODE: []}
    for worker in status_of(subject).workers:
        if worker.state == _READY and worker.role in by_role:
            by_role[worker.role].append(worker)
    used: dict[str, int] = {}
    for sender in by_role[worker_pb2.ROLE_PREFILL]:
        for receiver in by_role[worker_pb2.ROLE_DECODE]:
            ours, theirs = (w.info.transport.split(",") for w in (sender, receiver))
            is_near = sender.info.node == receiver.info.node
            fit = next((t for t in ours if t and t in theirs and (is_near or t not in _SAME_HOST)), None)
            if fit is None:
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


def kv_pools(subject: Subject) -> Iterator[Finding]:
    """Room for requests, and slots of pairs that cannot be closed."""
    there = [w for w in status_of(subject).workers if w.state == _READY and w.stats.blocks_total]
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
    yield from _quarantined(subject, {w.worker_id: w.info.metrics_address for w in there if w.info.metrics_address})


def clock_skew(subject: Subject) -> Iterator[Finding]:
    """By the `Date` of metrics pages, which has whole seconds: an interval, of which the nearer end counts."""
    addresses = {w.worker_id: w.info.metrics_address for w in status_of(subject).workers if w.state == _READY}
    addresses["router"] = status_of(subject).router.metrics_address
    looked, errors, is_wrong = 0, [], False
    for name, page in sorted(subject.contact.pages(addresses).items()):
        try:
            if isinstance(page, str):
                raise ValueError(page)
            low, high = page.skew_s
        except ValueError as error:
            errors.append(f"{name}: {error}")
            continue
        looked += 1
        skew_s = 0.0 if low <= 0 <= high else min((low, high), key=abs)
        if abs(skew_s) >= _MOST_SKEW_S:
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
        yield ok(f"{count_of(looked, 'clock')} within {_MOST_SKEW_S:g} s of this one")


def status_of(subject: Subject) -> admin_pb2.GetStatusResponse:
    """Of a check that runs only where there is one."""
    assert subject.contact.status is not None
    return subject.contact.status


def _missing(subject: Subject, status: admin_pb2.GetStatusResponse) -> Iterator[Finding]:
    """Workers that the file names and the cluster does not have. `mode: auto` has a split of its own."""
    if subject.config is None or not subject.contact.is_configured or subject.config.rebalance.mode == "auto":
        return
    for role, kind in zip(ROLES, (worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE), strict=True):
        wanted = subject.config.role(role).num_workers
        there = sum(w.role == kind for w in status.workers)
        if there != wanted:
            found = f"the file names {count_of(wanted, f'{role} worker')}, and the cluster has {there}"
            yield warning(found, "`baton apply` makes it so; one that was not started waits for room at Ray")


def _baton_versions(subject: Subject) -> Iterator[Finding]:
    """By the router's HTTP port, which needs no key for it."""
    config = subject.config
    if config is None or not subject.contact.is_configured or not config.router.http_port:
        return
    address = address_here(config.router.host, config.router.http_port)
    try:
        theirs = json.loads(fetch(address, "/version", subject.asked.tls, subject.contact.timeout_s)[1])["version"]
        ours = version("baton")
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        yield warning(f"the router's HTTP port {address} does not tell its version: {error}", "see `ports`")
    except PackageNotFoundError:
        return
    else:
        if theirs != ours:
            yield warning(f"the router is Baton {theirs}, this is {ours}", "install the same version everywhere")
        else:
            yield ok(f"the router is Baton {theirs}, as this is")


def _quarantined(subject: Subject, addresses: Mapping[str, str]) -> Iterator[Finding]:
    for worker_id, page in subject.contact.pages(addresses).items():
        if isinstance(page, str):
            found = f"{worker_id}: its metrics page could not be read: {page}"
            yield warning(found, "let this machine reach that port, or call the doctor on the head")
        elif held := page.total("baton_kv_quarantined_bytes"):
            remedy = "if it stays, restart the worker (`baton drain`, then `baton apply`)"
            yield warning(f"{worker_id}: {held:,.0f} bytes of slots belong to pairs that do not close", remedy)
