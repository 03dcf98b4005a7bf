"""What the page is told, as JSON: made from the messages of StatusService and AdminService. Pure.

The page and this module belong together: its keys are no contract for others, who ask over gRPC.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cluster.pb import admin_pb2
from cluster.proto_names import role_name, state_name

Json = dict[str, Any]


def router_part(status: admin_pb2.GetStatusResponse) -> Json:
    router = status.router
    return {
        "model": status.model,
        "address": status.router_address,
        "pid": router.pid,
        "uptime_s": router.uptime_s,
        "queued": router.num_queued,
        "max_queued": router.max_queued,
        "running": router.num_running,
        "finished": router.num_finished,
        "cancelled": router.num_cancelled,
        "failed": router.num_failed,
        "rejected": router.num_rejected,
    }


def workers_part(status: admin_pb2.GetStatusResponse, rates: Iterable[admin_pb2.WorkerRates]) -> list[Json]:
    by_id = {rate.worker_id: rate for rate in rates}
    return [_worker(worker, by_id.get(worker.worker_id)) for worker in status.workers]


def _worker(worker: admin_pb2.WorkerStatus, rates: admin_pb2.WorkerRates | None) -> Json:
    """`kv` and `rates` are None while the worker has said nothing of them."""
    info, stats = worker.info, worker.stats
    kv = {
        "free": stats.blocks_free,
        "held": stats.blocks_held,
        "cached": stats.blocks_cached,
        "total": stats.blocks_total,
        "block_size": info.block_size,
    }
    told = rates and {
        "prefill_tokens": rates.prefill_tokens_per_s,
        "decode_tokens": rates.decode_tokens_per_s,
        "kv_sent_bytes": rates.kv_sent_bytes_per_s,
        "kv_received_bytes": rates.kv_received_bytes_per_s,
    }
    return {
        "id": worker.worker_id,
        "address": worker.address,
        "state": state_name(worker),
        "role": role_name(worker.role),
        "is_draining": worker.is_draining,
        "requests": worker.num_requests,
        "running": stats.num_running_seqs,
        "waiting": stats.num_waiting_requests,
        "max_running": info.max_num_seqs,
        "node": info.node,
        "dtype": info.dtype,
        "transport": info.transport,
        "ranks": [{"rank": rank.tp_rank, "pid": rank.pid, "device": rank.device} for rank in info.ranks],
        "kv": kv if stats.blocks_total else None,
        "preemptions": stats.num_preemptions,
        "rates": told,
    }


def activity_part(activity: admin_pb2.GetActivityResponse) -> Json:
    return {
        "life": activity.life,
        "seconds": [_second(second) for second in activity.seconds],
        "window": _second(activity.window),
        "requests": [_request(life) for life in activity.requests],
        "pairs": [
            {
                "prefill": pair.prefill_id,
                "decode": pair.decode_id,
                "now": pair.num_now,
                "count": pair.num_handed_over,
                "prompt_tokens": pair.num_prompt_tokens,
                "seconds": _quantiles(pair.kv_transfer),
            }
            for pair in activity.pairs
        ],
    }


def _second(second: admin_pb2.ActivitySecond) -> Json:
    return {
        "number": second.number,
        "time": second.time,
        "duration_s": second.duration_s,
        "finished": second.num_finished,
        "cancelled": second.num_cancelled,
        "failed": second.num_failed,
        "rejected": second.num_rejected,
        "prompt_tokens": second.num_prompt_tokens,
        "output_tokens": second.num_output_tokens,
        "queued": second.num_queued,
        "running": second.num_running,
        "ttft": _quantiles(second.ttft),
        "itl": _quantiles(second.itl),
    }


def _quantiles(quantiles: admin_pb2.Quantiles) -> Json | None:
    """In seconds; None: nothing was measured."""
    if not quantiles.count:
        return None
    p50, p95, p99 = (round(value, 6) for value in (quantiles.p50, quantiles.p95, quantiles.p99))
    return {"count": quantiles.count, "p50": p50, "p95": p95, "p99": p99}


def _request(life: admin_pb2.RequestLife) -> Json:
    return {
        "number": life.number,
        "id": life.generation_id,
        "request_id": life.request_id,
        "tenant": life.tenant,
        "outcome": life.outcome,
        "arrival_time": life.arrival_time,
        "phases": [{"state": p.state, "at_s": round(p.at_s, 6), "why": p.why} for p in life.phases],
        "first_token_s": round(life.first_token_s, 6) if life.HasField("first_token_s") else None,
        "prompt_tokens": life.num_prompt_tokens,
        "cached_tokens": life.num_cached_tokens,
        "output_tokens": life.num_output_tokens,
        "prefill": life.prefill_id,
        "decode": life.decode_id,
        "placement": life.placement,
        "moves": life.num_moves,
    }


def controller_part(cluster: admin_pb2.GetClusterResponse) -> Json:
    return {
        "version": cluster.version,
        "prefill": cluster.num_prefill,
        "decode": cluster.num_decode,
        "config_file": cluster.config_file,
        "changing": plan_part(cluster.changing) if cluster.HasField("changing") else None,
        "auto": {"why": cluster.auto.why, "moves": cluster.auto.num_moves} if cluster.HasField("auto") else None,
        "processes": [
            {
                "name": process.name,
                "state": process.state,
                "starts": process.num_starts,
                "why": process.why,
                "role": role_name(process.role),
            }
            for process in cluster.processes
        ],
        "events": [
            {
                "number": event.sequence,
                "kind": admin_pb2.ClusterEvent.Kind.Name(event.kind).removeprefix("KIND_").lower(),
                "text": event.text,
                "time": event.time,
            }
            for event in cluster.events
        ],
    }


def plan_part(plan: admin_pb2.Plan) -> Json:
    return {"origin": plan.origin, "changes": list(plan.changes), "steps": list(plan.steps), "done": plan.num_done}


def change_part(answer: admin_pb2.ChangeResponse) -> Json:
    return {"version": answer.version, "is_change": answer.is_change, "plan": plan_part(answer.plan)}
