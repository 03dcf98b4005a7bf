"""`baton status`: the workers as one router sees them, as a table or as JSON.

The JSON is a contract for programs: its keys are made here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cli.common import AsJson, RouterOptions, outcome, table_console

if TYPE_CHECKING:
    from rich.table import Table

    from cluster.pb.admin_pb2 import GetStatusResponse, RouterStatus, WorkerStatus

SILENT_S = 6.0
"""A controller that is silent for longer is taken to be gone: three times the interval at which it speaks."""
_COLUMNS = ("worker", "state", "role", "node", "ranks (pid, device)", "free", "held", "cached", "total", "seqs", "wait")


def status(router: RouterOptions, as_json: AsJson = False) -> None:
    """Show the workers, their KV blocks and the queue."""
    with outcome(), router.connect() as client:
        described = describe(client.status())
        if as_json:
            import json

            print(json.dumps(described, indent=2, ensure_ascii=False))
        else:
            _print_table(described)


def describe(status: GetStatusResponse) -> dict[str, Any]:
    """Returns the document that `--json` prints."""
    router = status.router
    return {
        "model": status.model,
        "config_version": status.config_version or None,
        "protocol": status.protocol or None,
        "router": {
            "address": status.router_address,
            "pid": router.pid,
            "uptime_s": router.uptime_s,
            "metrics_address": router.metrics_address or None,
            "queued": router.num_queued,
            "max_queued": router.max_queued,
            "running": router.num_running,
            "finished": router.num_finished,
            "cancelled": router.num_cancelled,
            "failed": router.num_failed,
            "rejected": router.num_rejected,
            "controller_silent_s": silent_s(router),
        },
        "workers": [_describe_worker(worker) for worker in status.workers],
    }


def silent_s(router: RouterStatus) -> float | None:
    """Seconds since the router's controller last named the workers; None: it never had one."""
    return router.controller_silent_s if router.HasField("controller_silent_s") else None


def no_controller(silent_s: float | None) -> str:
    """Returns the consequences of a controller that has been silent for so long; empty while it is there."""
    if silent_s is None or silent_s <= SILENT_S:
        return ""
    return (
        f"no controller for {silent_s:.0f} s: requests are served, but nothing that ends is started again and nothing "
        "can be changed until it is back"
    )


def different_weights(described: dict[str, Any]) -> str:
    """Returns which workers have which weights; empty while all have the same."""
    by_revision: dict[str, list[str]] = {}
    for worker in described["workers"]:
        if worker["weights_revision"]:
            by_revision.setdefault(worker["weights_revision"], []).append(worker["worker_id"])
    if len(by_revision) < 2:
        return ""
    parts = "; ".join(f"{', '.join(ids)}: {revision}" for revision, ids in by_revision.items())
    return f"workers have different weights, and share no request with the others: {parts}"


def _describe_worker(worker: WorkerStatus) -> dict[str, Any]:
    from cluster.text import role_name, state_name

    info, stats = worker.info, worker.stats
    return {
        "worker_id": worker.worker_id or info.worker_id,
        "address": worker.address,
        "state": state_name(worker),
        "protocol": info.protocol or None,
        "refusal": worker.refusal or None,
        "role": role_name(worker.role) or "unknown",
        "is_draining": worker.is_draining,
        "is_slow": worker.is_slow,
        "requests_on_it": worker.num_requests,
        "node": info.node,
        "incarnation": info.incarnation,
        "ranks": [
            {"tp_rank": rank.tp_rank, "pid": rank.pid, "host": rank.host, "device": rank.device} for rank in info.ranks
        ],
        "weights_revision": info.weights_revision,
        "dtype": info.dtype,
        "transport": info.transport,
        "metrics_address": info.metrics_address or None,
        "block_size": info.block_size,
        "max_model_len": info.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "kv_blocks": {
            "free": stats.blocks_free,
            "held": stats.blocks_held,
            "cached": stats.blocks_cached,
            "total": stats.blocks_total,
        },
        "kv_tiers": list(_tiers(worker)),
        "running_sequences": stats.num_running_seqs,
        "waiting_requests": stats.num_waiting_requests,
        "requests": stats.num_requests,
        "steps": stats.num_steps,
        "prefill_tokens": stats.num_prefill_tokens,
        "decode_tokens": stats.num_decode_tokens,
        "preemptions": stats.num_preemptions,
        "kv_bytes_sent": stats.kv_bytes_sent,
        "kv_bytes_received": stats.kv_bytes_received,
    }


def _tiers(worker: WorkerStatus) -> Iterator[dict[str, Any]]:
    """Where a worker keeps KV, its pool first; nothing of one that has not answered."""
    info, stats = worker.info, worker.stats
    sizes = {"device": info.pool_bytes, "host": info.host_bytes, "disk": info.disk_bytes, "store": info.store_bytes}
    used = stats.blocks_held + stats.blocks_cached
    device = ("device", used, stats.blocks_total, stats.num_hit_tokens)
    below = ((t.tier, t.blocks_kept, t.blocks_total, t.num_hit_tokens) for t in stats.tiers)
    for tier, num_kept, num_total, num_hit_tokens in (device, *below):
        if num_total:
            yield {
                "tier": tier,
                "size_bytes": sizes.get(tier) or None,
                "blocks_kept": num_kept,
                "blocks_total": num_total,
                "hit_tokens": num_hit_tokens,
            }


def _print_table(described: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    router = described["router"]
    console = table_console()
    version = described["config_version"]
    console.print(
        f"{described['model']} at {router['address']}, up {router['uptime_s']} s"
        + (f", configuration {version}" if version else "")
    )
    console.print(
        f"requests: {router['running']} running, {router['queued']} of {router['max_queued']} queued, "
        f"{router['finished']} finished, {router['cancelled']} cancelled, {router['failed']} failed, "
        f"{router['rejected']} rejected"
    )
    for remark in (no_controller(router["controller_silent_s"]), different_weights(described)):
        if remark:
            console.print(remark)
    if not described["workers"]:
        console.print("no workers")
        return
    table = Table(box=SIMPLE_HEAD)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _COLUMNS[:5] else "right")
    for worker in described["workers"]:
        table.add_row(*_row(worker))
    console.print(table)
    if any(len(worker["kv_tiers"]) > 1 for worker in described["workers"]):
        console.print(tier_table(described["workers"]))
    for worker in described["workers"]:
        if worker["refusal"]:
            console.print(f"{worker['worker_id']} is not used: {worker['refusal']}")


def tier_table(workers: list[dict[str, Any]]) -> Table:
    """Returns what each worker keeps where, and how many tokens of prompts were found there."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from cluster.text import format_bytes

    table = Table(box=SIMPLE_HEAD)
    for column in ("worker", "KV in", "size", "blocks", "total", "hit tokens"):
        table.add_column(column, justify="left" if column in ("worker", "KV in") else "right")
    for worker in workers:
        for of in worker["kv_tiers"]:
            size = format_bytes(of["size_bytes"]) if of["size_bytes"] else "-"
            numbers = map(str, (of["blocks_kept"], of["blocks_total"], of["hit_tokens"]))
            table.add_row(worker["worker_id"], of["tier"], size, *numbers)
    return table


def _row(worker: dict[str, Any]) -> list[str]:
    """Cells in the order of _COLUMNS; `-` for the numbers of a worker that has not answered."""
    ranks = ", ".join(f"{rank['tp_rank']} ({rank['pid']}, {rank['device']})" for rank in worker["ranks"])
    blocks = worker["kv_blocks"]
    numbers = [*blocks.values(), worker["running_sequences"], worker["waiting_requests"]]
    known = [str(number) if blocks["total"] else "-" for number in numbers]
    marks = [mark for mark in ("draining", "slow") if worker[f"is_{mark}"]]
    state = ", ".join([worker["state"], *marks])
    return [worker["worker_id"], state, worker["role"], worker["node"] or "-", ranks or "-", *known]
