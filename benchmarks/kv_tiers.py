"""What host memory, a disk, a store and fetches below the KV pool save: prompt tokens computed, and first tokens' time.

    python -m benchmarks.kv_tiers --rounds 3 --json
    python -m benchmarks.kv_tiers --model DIR --sessions 24 --turns 4
    python -m benchmarks.kv_tiers --load conversation_trace.jsonl --requests 300
    python -m benchmarks.kv_tiers --rolling --sessions 12 --turns 3
    python -m benchmarks.kv_tiers --restart --sessions 12 --turns 3
    python -m benchmarks.kv_tiers --held 10000

Agents in turn, so that each comes back after all others: one of a few system prompts, a context that grows with each
answer and each addition. Or conversations as in the Mooncake trace (benchmarks/conversations.py), in the order in which
they come. One request at a time. What all sessions could find again is `--times` the pool of a worker. The same
requests go to one worker with nothing below the pool, with host memory for all, and with little host memory above a
disk, or a store, for all; to a prefill and a decode worker that fetch prefixes from one another, and that do not; then,
where the pool holds everything, to one worker without and with tiers. The clusters of a round are measured one after
the other, in an order that turns. For each:

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
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import httpx2
import psutil

from benchmarks.conversations import EndlessCache, Session, Turn, agents, generate, in_order, read_trace, working_set
from benchmarks.plain_cluster import ROOT, running_cluster
from benchmarks.served_cluster import ServedCluster
from cli.change import parse_split, ready_workers
from cluster.config.diff import set_values
from cluster.pb.admin_pb2 import ListSessionsRequest
from engine.memory import kv_bytes_per_token
from engine.models.folder import read_model
from tools.client import AdminClient, BatonClient, make_spec

BLOCK = 16
MODEL = ROOT / "models" / "tiny-shakespeare"
Values = Mapping[str, Any]
"""Keys of cluster.yaml."""


@dataclass(frozen=True)
class Answer:
    """Of one request. `first_s`: seconds to its first token."""

    token_ids: Sequence[int]
    num_cached: int
    first_s: float


Ask = Callable[[Sequence[int], int], Answer]
"""A prompt, and how many tokens are to follow."""


@dataclass
class Measured:
    """One run of the load."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    known_tokens: int = 0
    """Prompt tokens that a cache without bounds would have had."""
    first_s: tuple[float, ...] = ()

    @property
    def share(self) -> float:
        """What was cached of what could be."""
        return self.cached_tokens / self.known_tokens

    @classmethod
    def of(cls, parts: Sequence[Measured]) -> Measured:
        sums = (
            sum(getattr(part, name) for part in parts) for name in ("prompt_tokens", "cached_tokens", "known_tokens")
        )
        return cls(*sums, tuple(chain.from_iterable(part.first_s for part in parts)))


class Player:
    """Sends the turns of sessions one after the other; contexts grow by what is answered."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self._contexts = defaultdict[str, list[int]](list)
        self._endless = EndlessCache(BLOCK)

    def play(self, turns: Iterable[tuple[Session, Turn]], *, is_kept: bool = True) -> Measured:
        """The next turn of a session begins with these, where they are kept."""
        measured, first_s = Measured(), []
        for session, turn in turns:
            context = [] if session.are_whole else self._contexts[session.session_id]
            prompt = [*context, *turn.token_ids]
            answer = self.ask(prompt, turn.num_output_tokens)
            measured.prompt_tokens += len(prompt)
            measured.cached_tokens += answer.num_cached
            measured.known_tokens += self._endless.num_cached(prompt)
            whole = [*prompt, *answer.token_ids]
            self._endless.add(whole[:-1])
            if is_kept:
                self._contexts[session.session_id] = whole
            if turn is not session.turns[0]:
                first_s.append(answer.first_s)
        measured.first_s = tuple(first_s)
        return measured


def asking(client: BatonClient) -> Ask:
    """Over gRPC."""

    def ask(prompt: Sequence[int], num_output: int) -> Answer:
        spec = make_spec(prompt, max_output_tokens=num_output, ignore_eos=True, token_ids=True, temperature=0.0)
        begun, first_s, token_ids, num_cached = time.perf_counter(), 0.0, list[int](), 0
        for event in client.stream(spec):
            if event.HasField("delta"):
                first_s = first_s or time.perf_counter() - begun
                token_ids += event.delta.token_ids
            if event.HasField("completed"):
                num_cached = event.completed.usage.cached_tokens
        return Answer(token_ids, num_cached, first_s)

    return ask


def asking_over_http(client: httpx2.Client) -> Ask:
    """Over OpenAI's API with the ids of tokens in answers, as vLLM has them; the first model answers."""
    model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    body = {"model": model, "temperature": 0, "stream": True, "ignore_eos": True, "return_token_ids": True}
    body |= {"stream_options": {"include_usage": True}}

    def ask(prompt: Sequence[int], num_output: int) -> Answer:
        begun, first_s, token_ids, num_cached = time.perf_counter(), 0.0, list[int](), 0
        with client.stream(
            "POST", "/v1/completions", json=body | {"prompt": prompt, "max_tokens": num_output}
        ) as lines:
            lines.raise_for_status()
            for line in lines.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                for choice in event["choices"]:
                    first_s = first_s or time.perf_counter() - begun
                    token_ids += choice.get("token_ids") or ()
                details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
                num_cached = details.get("cached_tokens") or num_cached
        if len(token_ids) != num_output:
            raise SystemExit(f"--url: {len(token_ids)} ids of {num_output} tokens came: return_token_ids is not known")
        return Answer(token_ids, num_cached, first_s)

    return ask


def by_turn(sessions: Sequence[Session]) -> list[list[tuple[Session, Turn]]]:
    """The first turn of each session, the second of each, and so on."""
    return [list(zip(sessions, turns, strict=True)) for turns in zip(*(each.turns for each in sessions), strict=True)]


def roll(sessions_of: Callable[[int], list[Session]], cluster_yaml: Values, ratio: str) -> dict[str, float]:
    """A cluster whose workers are replaced one by one under the load, after which each session has its last turn."""
    with tempfile.TemporaryDirectory(prefix="baton-tiers-") as folder:
        served = {**cluster_yaml, "engine.kv_disk_path": folder}
        num_workers = zip(("prefill", "decode"), parse_split(ratio), strict=True)
        served |= {f"roles.{role}.{key}": num for role, num in num_workers for key in ("devices", "min_workers")}
        with (
            ServedCluster.running(ROOT / "cluster.yaml", served) as cluster,
            BatonClient(cluster.address) as client,
            AdminClient(cluster.admin_address) as admin,
        ):
            player, (*first, last) = Player(asking(client)), by_turn(sessions_of(0))
            turns = [player.play(turn) for turn in first]
            text = set_values(cluster.file.read_text(encoding="utf-8"), {"transfer.timeout_s": 5.5})
            change = threading.Thread(target=lambda: list(admin.follow(admin.apply(text, filename=str(cluster.file)))))
            change.start()
            during = list[Measured]()
            while change.is_alive():
                during.append(player.play(by_turn(sessions_of(1 + len(during)))[-1], is_kept=False))
            after = player.play(last)
            workers = sorted(worker.worker_id for worker in client.status().workers)
            files = sorted(path.name for path in Path(folder).glob("*/*.rank*"))
            print(f"{', '.join(workers)}; files: {', '.join(files)}", file=sys.stderr)
    before = turns[-1].share
    return {
        "before": round(before, 3),
        "during": round(Measured.of(during).share, 3),
        "after": round(after.share, 3),
        "of_before": round(after.share / before, 3),
    }


def restart(sessions: Sequence[Session], cluster_yaml: Values) -> dict[str, float]:
    """Everything is stopped before the last turn, and started anew; what lies in the store is left."""
    *first, last = by_turn(sessions)
    with tempfile.TemporaryDirectory(prefix="baton-store-") as folder:
        stored = {**cluster_yaml, "engine.kv_store_path": folder}
        with serving(stored) as client:
            player = Player(asking(client))
            turns = [player.play(turn) for turn in first]
        with serving(stored) as client:
            player.ask = asking(client)
            after = player.play(last)
    return {
        "before": round(turns[-1].share, 3),
        "after": round(after.share, 3),
        "computed": after.prompt_tokens - after.cached_tokens,
        "ttft_p50_ms": round(1000 * statistics.median(after.first_s), 1),
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
def serving(cluster_yaml: Values) -> Iterator[BatonClient]:
    with tempfile.TemporaryDirectory(prefix="baton-tiers-") as folder:
        file = Path(folder) / "cluster.yaml"
        paths = {"engine.kv_disk_path": folder, "engine.kv_store_path": f"{folder}/store"}
        file.write_text(set_values((ROOT / "cluster.yaml").read_text(encoding="utf-8"), paths | dict(cluster_yaml)))
        with running_cluster(file) as address, BatonClient(address) as client:
            yield client


def configurations(model: Path, sessions: Sequence[Session], times: float) -> dict[str, Values]:
    num_tokens, longest = working_set(sessions, BLOCK)
    bytes_per_token = kv_bytes_per_token(read_model(model), 1, "float32")
    pool = max(int(num_tokens / times), 2 * longest) // BLOCK * BLOCK
    host, little = 2 * num_tokens * bytes_per_token, pool * bytes_per_token
    common = {"model.path": str(model), "engine.block_size": BLOCK}
    common |= {"model.max_model_len": (-(-longest // BLOCK) + 1) * BLOCK}

    def cluster(pool_tokens: int, *, colocated: bool = True, fetch: str = "off", **tiers: int) -> Values:
        one = {"roles.prefill.devices": 0, "roles.prefill.min_workers": 0} if colocated else {}
        values = {**common, **one, "engine.kv_cache_tokens": pool_tokens, "router.prefix_fetch": fetch}
        return values | {f"engine.kv_{tier}_bytes": num_bytes for tier, num_bytes in tiers.items()}

    pair = partial(cluster, pool, colocated=False)
    return {
        "device only": cluster(pool),
        "host memory": cluster(pool, host=host),
        "host and disk": cluster(pool, host=little, disk=2 * host),
        "host and store": {**cluster(pool, host=little, store=2 * host), "engine.kv_store_policy": "evicted"},
        "1:1, device only": pair(),
        "1:1, fetching": pair(fetch="auto"),
        "1:1, host memory": pair(host=host),
        "1:1, host, fetching": pair(host=host, fetch="auto"),
        "fits, device only": cluster(2 * num_tokens // BLOCK * BLOCK),
        "fits, host memory": cluster(2 * num_tokens // BLOCK * BLOCK, host=host),
        "fits, host and disk": cluster(2 * num_tokens // BLOCK * BLOCK, host=host, disk=2 * host),
    }


def row(runs: Sequence[Measured]) -> dict[str, float]:
    """Medians over the rounds."""

    def median(of: Any) -> float:
        return statistics.median(of(each) for each in runs)

    return {
        "computed": median(lambda m: m.prompt_tokens - m.cached_tokens),
        "of": runs[0].prompt_tokens,
        "cached": round(median(lambda m: m.share), 3),
        "ttft_p50_ms": round(median(lambda m: 1000 * statistics.median(m.first_s)), 1),
        "ttft_p90_ms": round(median(lambda m: 1000 * statistics.quantiles(m.first_s, n=10)[-1]), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--load", default="agents", metavar="agents|conversations|FILE", help="FILE: a Mooncake trace")
    parser.add_argument("--requests", type=int, default=200, help="of conversations, or of the trace")
    parser.add_argument("--sessions", type=int, default=16, help="of agents; and so on:")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--first", type=int, default=800, help="tokens of a first prompt, half of them the system's")
    parser.add_argument("--more", type=int, default=60, help="tokens that each later turn adds")
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--times", type=float, default=5.0, help="what the sessions could find again, in pools")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", metavar="NAME", help="of the clusters; may be given several times")
    parser.add_argument("--rolling", action="store_true", help="replace the workers of a served cluster")
    parser.add_argument("--workers", default="1:1", metavar="PREFILL:DECODE", help="of the clusters that are rolled")
    parser.add_argument("--restart", action="store_true", help="stop everything, and start it anew")
    parser.add_argument("--held", type=int, metavar="N", help="sessions that a served cluster is to hold")
    parser.add_argument("--url", help="play the load against another server, such as vLLM, once, from an empty cache")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.held is not None:
        print(json.dumps(held(args.held)))
        return 0

    def sessions_of(more_seed: int) -> list[Session]:
        seed = args.seed + more_seed
        if args.load == "conversations":
            return generate(args.requests, seed)
        if args.load != "agents":
            return read_trace(Path(args.load), args.requests, seed)
        return agents(args.sessions, args.turns, args.first, args.more, args.output, seed)

    sessions = sessions_of(0)
    wanted = configurations(args.model, sessions, args.times)
    unknown = [name for name in args.only or () if name not in wanted]
    if unknown:
        parser.error(f"--only {unknown[0]!r}: use {', '.join(map(repr, wanted))}")
    if (args.rolling or args.restart) and args.load != "agents":
        parser.error(f"--load {args.load}: --rolling and --restart take agents, whose sessions have the same turns")
    if args.rolling:
        for name in args.only or ("device only", "host and disk", "fits, host and disk"):
            print(name, json.dumps(roll(sessions_of, wanted[name], args.workers)))
        return 0
    if args.restart:
        for name in args.only or ("device only", "host and disk", "host and store"):
            print(name, json.dumps(restart(sessions, wanted[name])))
        return 0
    if args.url:
        with httpx2.Client(base_url=args.url, timeout=120.0) as other:
            rows = {args.url: row([Player(asking_over_http(other)).play(in_order(sessions))])}
    else:
        rows = {name: row(runs) for name, runs in by_rounds(wanted, args.only or list(wanted), sessions, args.rounds)}
    if args.json:
        print(json.dumps(rows))
        return 0
    for name, values in rows.items():
        print(f"{name:20}", *(f"{key} {value:g}" for key, value in values.items()), sep="  ")
    return 0


def by_rounds(
    wanted: Mapping[str, Values], names: Sequence[str], sessions: Sequence[Session], num_rounds: int
) -> Iterable[tuple[str, list[Measured]]]:
    """Each cluster once a round, in an order that turns."""
    runs: dict[str, list[Measured]] = {name: [] for name in names}
    for number in range(num_rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            with serving(wanted[name]) as client:
                runs[name].append(Player(asking(client)).play(in_order(sessions)))
            print(f"round {number + 1} of {num_rounds}: {name}", file=sys.stderr)
    return runs.items()


if __name__ == "__main__":
    sys.exit(main())
