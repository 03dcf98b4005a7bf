"""What host memory and a disk below the KV pool save: prompt tokens computed, and the time to the first token.

    python -m benchmarks.kv_tiers --rounds 3 --json
    python -m benchmarks.kv_tiers --model DIR --sessions 24 --turns 4
    python -m benchmarks.kv_tiers --rolling --sessions 12 --turns 3
    python -m benchmarks.kv_tiers --restart --sessions 12 --turns 3
    python -m benchmarks.kv_tiers --held 10000

Sessions of agents in turn, so that each comes back after all others: one of a few system prompts, a context that grows
with each answer and each addition, one request at a time. Their contexts together are `--times` the pool of the one
worker. The same requests go to clusters with nothing below the pool, with host memory for all, and with little host
memory above a disk, or a store, for all; then, where the pool holds everything, to one without and one with host
memory. The clusters of a round are measured one after the other, in an order that turns. For each:

    computed   prompt tokens that were computed, of all
    cached     prompt tokens that were cached, of those that a cache without bounds would have had
    ttft       milliseconds to the first token, of turns after the first: median and nine tenths

With `--rolling`, clusters of `baton serve` with prefill and decode workers (`--workers`) that are replaced, one by one,
by a change of a rolling key under that load: what was cached of what could be, in the last turn of all sessions before
the change, in those during it, and in the first one after it. With `--restart`, everything but the store is stopped and
started anew before the last turn. With `--held`, so many sessions of 12 blocks come over HTTP with a `session_id` to a
`baton serve` with 1 GB of host memory and 10 GB of disk, and some of them come back: resident bytes of the worker (of
what is served, the process with the most) and of its file on the disk, before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import httpx2
import psutil

from benchmarks.plain_cluster import ROOT, running_router, running_workers
from benchmarks.served_cluster import ServedCluster
from cli.change import parse_split, ready_workers
from cluster.config.diff import set_values
from cluster.config.load import load_config
from cluster.pb.admin_pb2 import ListSessionsRequest
from controller.plan import plan_cluster
from engine.memory import kv_bytes_per_token
from engine.models.folder import read_model
from tools.client import AdminClient, BatonClient, make_spec

BLOCK = 16
MODEL = ROOT / "models" / "tiny-shakespeare"


@dataclass(frozen=True)
class Load:
    """The requests of all sessions, and the most tokens that a cache can have of each."""

    num_sessions: int
    num_turns: int
    first: int
    more: int
    output: int
    seed: int

    @property
    def num_tokens(self) -> int:
        """Of all contexts at their end."""
        return self.num_sessions * self.most_tokens

    @property
    def most_tokens(self) -> int:
        """Of one context."""
        return self.first + (self.num_turns - 1) * (self.more + self.output) + self.output


@dataclass
class Measured:
    """One run of the load."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    known_tokens: int = 0
    """Prompt tokens that the same session, or another one with its system prompt, had before."""
    ttft_s: tuple[float, ...] = ()

    @property
    def share(self) -> float:
        """What was cached of what could be."""
        return self.cached_tokens / self.known_tokens

    @classmethod
    def of(cls, parts: Sequence[Measured]) -> Measured:
        sums = (
            sum(getattr(part, name) for part in parts) for name in ("prompt_tokens", "cached_tokens", "known_tokens")
        )
        return cls(*sums, tuple(chain.from_iterable(part.ttft_s for part in parts)))


class Sessions:
    """Contexts that grow."""

    def __init__(self, load: Load, num_values: int) -> None:
        self._load, self._num_values = load, num_values
        self._draw = random.Random(load.seed)
        systems = [[self._draw.randrange(5, num_values) for _ in range(load.first // 2)] for _ in range(3)]
        self._contexts = [list(systems[number % 3]) for number in range(load.num_sessions)]
        self._turn = 0

    def turn(self, client: BatonClient, *, is_kept: bool = True) -> Measured:
        """One request of each session, one after the other; the next turn begins with it, where it `is_kept`."""
        load, measured, ttft = self._load, Measured(), []
        for number, kept in enumerate(self._contexts):
            context = kept if is_kept else list(kept)
            known = len(context) if self._turn or number >= 3 else 0
            added = load.more if self._turn else load.first - len(context)
            context += [self._draw.randrange(5, self._num_values) for _ in range(added)]
            spec = make_spec(context, max_output_tokens=load.output, ignore_eos=True, token_ids=True, temperature=0.0)
            begun, first = time.perf_counter(), 0.0
            for event in client.stream(spec):
                if event.HasField("delta"):
                    first = first or time.perf_counter() - begun
                    context += event.delta.token_ids
                if event.HasField("completed"):
                    usage = event.completed.usage
                    measured.prompt_tokens += usage.prompt_tokens
                    measured.cached_tokens += usage.cached_tokens
                    measured.known_tokens += known // BLOCK * BLOCK
            ttft.append(first)
        measured.ttft_s = tuple(ttft) if self._turn else ()
        self._turn += 1
        return measured


def run(client: BatonClient, load: Load, num_values: int) -> Measured:
    """Turn by turn, each session once a turn."""
    sessions = Sessions(load, num_values)
    return Measured.of([sessions.turn(client) for _ in range(load.num_turns)])


def roll(args: argparse.Namespace, load: Load, values: Mapping[str, Any], num_values: int) -> dict[str, float]:
    """A cluster whose workers are replaced one by one under the load, after which each session has one more turn."""
    with tempfile.TemporaryDirectory(prefix="baton-tiers-") as folder:
        served = {f"engine.{key}": value for key, value in values.items()}
        served |= {"model.path": str(args.model), "engine.kv_disk_path": folder, "engine.block_size": BLOCK}
        served |= {"model.max_model_len": (-(-load.most_tokens // BLOCK) + 1) * BLOCK}
        num_workers = zip(("prefill", "decode"), parse_split(args.workers), strict=True)
        served |= {f"roles.{role}.{key}": num for role, num in num_workers for key in ("devices", "min_workers")}
        with (
            ServedCluster.running(ROOT / "cluster.yaml", served) as cluster,
            BatonClient(cluster.address) as client,
            AdminClient(cluster.admin_address) as admin,
        ):
            sessions, turns = Sessions(load, num_values), list[Measured]()
            for _ in range(load.num_turns - 1):
                turns.append(sessions.turn(client))
            text = set_values(cluster.file.read_text(encoding="utf-8"), {"transfer.timeout_s": 5.5})
            change = threading.Thread(target=lambda: list(admin.follow(admin.apply(text, filename=str(cluster.file)))))
            change.start()
            during = list[Measured]()
            while change.is_alive():
                during.append(sessions.turn(client, is_kept=False))
            after = [sessions.turn(client)]
            workers = sorted(worker.worker_id for worker in client.status().workers)
            files = sorted(path.name for path in Path(folder).glob("*/*.rank*"))
            print(f"{', '.join(workers)}; files: {', '.join(files)}", file=sys.stderr)
    before = turns[-1].share
    return {
        "before": round(before, 3),
        "during": round(Measured.of(during).share, 3),
        "after": round(after[0].share, 3),
        "of_before": round(after[0].share / before, 3),
    }


def restart(args: argparse.Namespace, load: Load, values: Mapping[str, Any], num_values: int) -> dict[str, float]:
    """Everything is stopped before the last turn, and started anew; what lies in the store is left."""
    sessions = Sessions(load, num_values)
    with tempfile.TemporaryDirectory(prefix="baton-store-") as folder:
        stored = {**values, "kv_store_path": folder}
        with serving(args.model, load, stored) as client:
            turns = [sessions.turn(client) for _ in range(load.num_turns - 1)]
        with serving(args.model, load, stored) as client:
            after = sessions.turn(client)
    return {
        "before": round(turns[-1].share, 3),
        "after": round(after.share, 3),
        "computed": after.prompt_tokens - after.cached_tokens,
        "ttft_p50_ms": round(1000 * statistics.median(after.ttft_s), 1),
    }


def held(num_sessions: int) -> dict[str, float]:
    """Has eight streams bring the sessions; a twentieth of them, drawn at random, come back three tokens longer."""

    def ask(session: int, more: Sequence[int] = ()) -> int:
        prompt = [*random.Random(session).choices(range(1, 60), k=12 * BLOCK), *more]
        body = {"model": MODEL.name, "prompt": prompt, "max_tokens": 1, "session_id": f"session-{session}"}
        answer = client.post("/v1/completions", json=body).raise_for_status()
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    with tempfile.TemporaryDirectory(prefix="baton-tiers-") as folder:
        tiers = {"kv_host_bytes": 10**9, "kv_disk_bytes": 10**10, "kv_disk_path": folder, "kv_session_share": 0.9}
        served: dict[str, Any] = {f"engine.{key}": value for key, value in tiers.items()}
        served |= {"roles.prefill.devices": 0, "roles.prefill.min_workers": 0, "engine.block_size": BLOCK}
        served |= {"router.session_ttl_s": 86400.0, "router.http_port": 0, "admin.port": 0}
        with (
            ServedCluster.running(ROOT / "cluster.yaml", served) as cluster,
            httpx2.Client(base_url=f"http://{cluster.http_address}", timeout=60.0) as client,
            AdminClient(cluster.admin_address) as admin,
            ThreadPoolExecutor(8) as streams,
        ):

            def sizes(when: str) -> dict[str, float]:
                resident = (each.memory_info().rss for each in psutil.Process(cluster.pid).children(recursive=True))
                files = (path.stat().st_size for path in Path(folder).glob("*/*.rank*"))
                return {f"resident_gb_{when}": max(resident) / 1e9, f"file_gb_{when}": sum(files) / 1e9}

            found, begun = sizes("before"), time.monotonic()
            num_cached = sum(streams.map(ask, range(num_sessions)))
            found |= {"seconds": time.monotonic() - begun, "cached_of_new": num_cached, **sizes("held")}
            asked = [ListSessionsRequest(worker_id=each, num_sessions=1) for each in ready_workers(admin)]
            found["sessions"] = sum(admin.on_worker("ListSessions", request).num_total for request in asked)
            back = random.Random(1).sample(range(num_sessions), max(1, num_sessions // 20))
            found["back_whole"] = sum(ask(each, [5, 6, 7]) == 12 * BLOCK for each in back) / len(back)
            return {name: round(value, 3) for name, value in (found | sizes("after")).items()}


@contextmanager
def serving(model: Path, load: Load, values: Mapping[str, Any]) -> Iterator[BatonClient]:
    """One worker for both phases."""
    with tempfile.TemporaryDirectory(prefix="baton-tiers-") as folder:
        file = Path(folder) / "cluster.yaml"
        text = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
        one = {"model.path": str(model), "roles.prefill.devices": 0, "roles.prefill.min_workers": 0}
        file.write_text(set_values(text, one))
        plan = plan_cluster(load_config(file), num_gpus=0, num_cores=len(os.sched_getaffinity(0)))
        more = {"max_model_len": (-(-load.most_tokens // BLOCK) + 1) * BLOCK, "block_size": BLOCK}
        more |= {"kv_disk_path": folder, "kv_store_path": f"{folder}/store", **values}
        (worker,) = plan.workers
        worker = replace(worker, ranks=tuple(rank.with_values(**more) for rank in worker.ranks))
        with (
            running_workers([worker]) as flags,
            running_router(replace(plan.router, workers=flags)) as address,
            BatonClient(address) as client,
        ):
            yield client


def configurations(load: Load, times: float, bytes_per_token: int) -> dict[str, dict[str, Any]]:
    pool = max(int(load.num_tokens / times), 2 * load.most_tokens) // BLOCK * BLOCK
    host = 2 * load.num_tokens * bytes_per_token
    whole = 2 * load.num_tokens // BLOCK * BLOCK
    return {
        "device only": {"kv_cache_tokens": pool},
        "host memory": {"kv_cache_tokens": pool, "kv_host_bytes": host},
        "host and disk": {"kv_cache_tokens": pool, "kv_host_bytes": pool * bytes_per_token, "kv_disk_bytes": 2 * host},
        "host and store": {
            "kv_cache_tokens": pool,
            "kv_host_bytes": pool * bytes_per_token,
            "kv_store_bytes": 2 * host,
        },
        "fits, device only": {"kv_cache_tokens": whole},
        "fits, host memory": {"kv_cache_tokens": whole, "kv_host_bytes": host},
        "fits, host and disk": {"kv_cache_tokens": whole, "kv_host_bytes": host, "kv_disk_bytes": 2 * host},
    }


def row(runs: Sequence[Measured]) -> dict[str, float]:
    """Medians over the rounds."""

    def median(of: Any) -> float:
        return statistics.median(of(each) for each in runs)

    return {
        "computed": median(lambda m: m.prompt_tokens - m.cached_tokens),
        "of": runs[0].prompt_tokens,
        "cached": round(median(lambda m: m.share), 3),
        "ttft_p50_ms": round(median(lambda m: 1000 * statistics.median(m.ttft_s)), 1),
        "ttft_p90_ms": round(median(lambda m: 1000 * statistics.quantiles(m.ttft_s, n=10)[-1]), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--first", type=int, default=800, help="tokens of a first prompt, half of them the system's")
    parser.add_argument("--more", type=int, default=60, help="tokens that each later turn adds")
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--times", type=float, default=5.0, help="contexts of all sessions, in pools")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rolling", action="store_true", help="replace the workers of a served cluster")
    parser.add_argument("--workers", default="1:1", metavar="PREFILL:DECODE", help="of the clusters that are rolled")
    parser.add_argument("--restart", action="store_true", help="stop everything, and start it anew")
    parser.add_argument("--held", type=int, metavar="N", help="sessions that a served cluster is to hold")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.held is not None:
        print(json.dumps(held(args.held)))
        return 0
    load = Load(args.sessions, args.turns, args.first, args.more, args.output, args.seed)
    config = read_model(args.model)
    wanted = configurations(load, args.times, kv_bytes_per_token(config, 1, "float32"))
    if args.rolling:
        for name in ("device only", "host and disk", "fits, host and disk"):
            print(name, json.dumps(roll(args, load, wanted[name], config.vocab_size - 5)))
        return 0
    if args.restart:
        for name in ("device only", "host and disk", "host and store"):
            print(name, json.dumps(restart(args, load, wanted[name], config.vocab_size - 5)))
        return 0
    runs: dict[str, list[Measured]] = {name: [] for name in wanted}
    for number in range(args.rounds):
        names = list(wanted)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with serving(args.model, load, wanted[name]) as client:
                runs[name].append(run(client, load, config.vocab_size - 5))
            print(f"round {number + 1} of {args.rounds}: {name}", file=sys.stderr)
    rows = {name: row(measured) for name, measured in runs.items()}
    if args.json:
        print(json.dumps(rows))
        return 0
    for name, values in rows.items():
        print(f"{name:18}", *(f"{key} {value:g}" for key, value in values.items()), sep="  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
