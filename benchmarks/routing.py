"""What a policy is worth: the same conversations with each of them, on the same workers, in one run.

    python benchmarks/routing.py --json
    python benchmarks/routing.py --decisions            # only how long a decision takes

Two prefill and two decode workers of the bundled model, whose KV pools hold a part of what is asked again. A first run
learns the answers and what the cluster can do; then `predicted`, `least_loaded` and `round_robin` take turns at a share
of that, each with a router of its own and a salt of its own, so that none finds what another one has cached. Every
answer must be that of the first run. Exits 1 when a request was lost, or its output repeated or changed.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.conversations import Session, Turn, generate, read_trace
from benchmarks.decisions import measure_decisions
from benchmarks.plain_cluster import ROOT, ProgramFailed, running_router, running_workers
from benchmarks.report import bars, tell, telling_failures
from cluster import rpc
from cluster.config.load import load_config
from cluster.config.schema import ServingConfig
from controller.plan import ClusterPlan, plan_cluster
from tools.bench.targets import GrpcTarget
from tools.bench.workload import Sample
from tools.client import make_spec

POLICIES = ("predicted", "least_loaded", "round_robin")
Answers = dict[tuple[str, int], tuple[int, ...]]
"""By session and turn."""
_CLOSED_LOOP = 16
"""Sessions at a time while the cluster's capacity is measured."""
_PROBE_REQUESTS = 96


@dataclass(kw_only=True)
class Outcome(Sample):
    """What the client of one turn got."""

    key: tuple[str, int]

    @property
    def gaps_s(self) -> list[float]:
        """Seconds a token, between two messages."""
        return [itl_s / num for itl_s, num in zip(self.itls_s, self.message_tokens[1:], strict=True)]


class Client:
    """Plays sessions against one router. `answers`: what the turns before were answered; None: what comes now."""

    def __init__(self, target: GrpcTarget, salt: str, answers: Answers | None, progress: Any) -> None:
        self._target = target
        self._salt = salt
        self._answers = answers
        self._progress = progress

    async def play(self, sessions: Sequence[Session], seconds: float) -> list[Outcome]:
        """Each turn at its time, or when the one before it has ended, if that is later."""
        begun = time.perf_counter()
        played = await asyncio.gather(*(self._session(s, begun, seconds) for s in sessions))
        return [outcome for outcomes in played for outcome in outcomes]

    async def play_at_once(self, sessions: Sequence[Session]) -> list[Outcome]:
        """So many sessions at a time as `_CLOSED_LOOP`, without a pause."""
        waiting: Iterator[Session] = iter(sessions)
        outcomes: list[Outcome] = []

        async def keep_going() -> None:
            for session in waiting:
                outcomes.extend(await self._session(session, 0.0, 0.0))

        await asyncio.gather(*(keep_going() for _ in range(_CLOSED_LOOP)))
        return outcomes

    async def _session(self, session: Session, begun: float, seconds: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        history: tuple[int, ...] = ()
        for number, turn in enumerate(session.turns):
            if seconds:
                await asyncio.sleep(max(0.0, begun + turn.at * seconds - time.perf_counter()))
            key = session.session_id, number
            outcome = await self._turn(key, history + turn.token_ids, turn)
            outcomes.append(outcome)
            answer = tuple(outcome.token_ids) if self._answers is None else self._answers[key]
            history = () if session.are_whole else history + turn.token_ids + answer
            self._progress()
        return outcomes

    async def _turn(self, key: tuple[str, int], prompt: tuple[int, ...], turn: Turn) -> Outcome:
        """Never raises: what goes wrong is the outcome."""
        spec = make_spec(
            prompt,
            max_output_tokens=turn.num_output_tokens,
            temperature=0.0,
            ignore_eos=True,
            token_ids=True,
            include_timing=True,
        )
        spec.cache.cache_salt, spec.scheduling.session_id = self._salt, f"{self._salt}-{key[0]}"
        outcome = Outcome(len(prompt), time.perf_counter(), key=key)
        await self._target.stream(spec, outcome)
        outcome.ended_at = time.perf_counter()
        if outcome.num_gaps:
            outcome.error = outcome.error or f"{outcome.num_gaps} messages did not follow upon those before"
        if not outcome.placement:
            outcome.error = outcome.error or "its stream ended without a word"
        return outcome


@dataclass
class Found:
    """Of all repetitions: for each policy what each one measured, and what went wrong in any."""

    by_policy: dict[str, list[dict[str, float]]] = field(default_factory=lambda: {name: [] for name in POLICIES})
    lost: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def note(self, policy: str, outcomes: Sequence[Outcome], answers: Answers) -> None:
        self.lost += [f"{policy}: turn {o.key}: {o.error}" for o in outcomes if o.error]
        ended = [o for o in outcomes if not o.error]
        for o in ended:
            if tuple(o.token_ids) != answers[o.key]:
                self.changed.append(f"{policy}: turn {o.key}: {o.token_ids}, at first {answers[o.key]}")
        self.by_policy[policy].append(measures(ended))

    @property
    def medians(self) -> dict[str, dict[str, float]]:
        return {
            policy: {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}
            for policy, runs in self.by_policy.items()
            if runs
        }


def measures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Of one run of one policy."""
    ttft = statistics.quantiles([1000 * o.ttft_s for o in outcomes], n=100)
    gaps = statistics.quantiles([1000 * gap for o in outcomes for gap in o.gaps_s], n=100)
    cached, prompt = (sum(o.num_cached_tokens for o in outcomes), sum(o.num_prompt_tokens for o in outcomes))
    return {
        "ttft_ms_p50": ttft[49],
        "ttft_ms_p90": ttft[89],
        "itl_ms_p50": gaps[49],
        "itl_ms_p99": gaps[98],
        "prefix_hit_ratio": cached / prompt,
        "local_ratio": sum(o.placement.startswith("local") for o in outcomes) / len(outcomes),
    }


def make_plan(file: Path, pool_tokens: int) -> ClusterPlan:
    """A cluster.yaml with two workers of each role, whose pools are small."""
    config: ServingConfig = load_config(file)
    prefill, decode = config.roles.prefill, config.roles.decode
    roles = replace(
        config.roles,
        prefill=replace(prefill, devices=2 * prefill.tensor_parallel, kv_cache_tokens=pool_tokens),
        decode=replace(decode, devices=2 * decode.tensor_parallel, kv_cache_tokens=pool_tokens),
    )
    return plan_cluster(replace(config, roles=roles), num_gpus=0, num_cores=len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class Arguments:
    seconds: float
    load: float
    rounds: int
    seed: int
    trace: Path | None
    most_requests: int

    def sessions(self, num_requests: int) -> list[Session]:
        return (
            generate(num_requests, self.seed) if self.trace is None else read_trace(self.trace, num_requests, self.seed)
        )


async def play(
    address: str, salt: str, answers: Answers | None, sessions: list[Session], seconds: float | None, progress: Any
) -> list[Outcome]:
    """`seconds` None: as fast as it goes."""
    async with rpc.create_channel(address) as channel:
        client = Client(GrpcTarget(channel), salt, answers, progress)
        return await (client.play_at_once(sessions) if seconds is None else client.play(sessions, seconds))


def measure(plan: ClusterPlan, args: Arguments) -> dict[str, Any]:
    """What `--json` prints. Raises ProgramFailed when requests fail that come one after the other."""
    found = Found()
    with running_workers(plan.workers) as flags, bars() as progress:

        def run(policy: str, what: str, sessions: list[Session], answers: Answers | None, seconds: float | None) -> Any:
            bar = progress.add_task(what, total=sum(len(s.turns) for s in sessions))
            settings = plan.router.with_values(workers=flags, policy=policy)
            with running_router(settings) as address:
                return asyncio.run(play(address, what, answers, sessions, seconds, lambda: progress.advance(bar)))

        run("least_loaded", "warm-up", args.sessions(_PROBE_REQUESTS // 4), None, None)
        probed = run("least_loaded", "capacity", args.sessions(_PROBE_REQUESTS), None, None)
        capacity = len(probed) / (max(o.ended_at for o in probed) - min(o.sent_at for o in probed))
        num_requests = max(16, min(args.most_requests, round(args.load * capacity * args.seconds)))
        sessions = args.sessions(num_requests)
        learned = run("least_loaded", "answers", sessions, None, None)
        wrong = [o.error for o in learned if o.error]
        if wrong:
            raise ProgramFailed(f"undisturbed, {len(wrong)} of {len(learned)} requests failed: {wrong[0]}")
        answers = {o.key: tuple(o.token_ids) for o in learned}
        for number in range(args.rounds):
            first = number % len(POLICIES)
            for policy in POLICIES[first:] + POLICIES[:first]:
                outcomes = run(policy, f"{policy} {number + 1}", sessions, answers, args.seconds)
                found.note(policy, outcomes, answers)
    return {
        "policies": found.medians,
        "rounds": found.by_policy,
        "requests": num_requests,
        "requests_per_s": round(num_requests / args.seconds, 2),
        "capacity_per_s": round(capacity, 2),
        "lost": found.lost,
        "changed": found.changed,
    }


def show(found: dict[str, Any]) -> None:
    decision = found["decision"]
    console = Console()
    console.print(
        f"a decision among {decision['workers']} workers with {decision['cached_blocks']} cached blocks: "
        f"{decision['p50_ms']} ms of processor, p99 {decision['p99_ms']} ms"
    )
    if "policies" not in found:
        return
    table = Table(title=f"{found['requests']} requests, {found['requests_per_s']} a second; medians of the rounds")
    names = list(next(iter(found["policies"].values())))
    table.add_column("policy")
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for policy, values in found["policies"].items():
        table.add_row(policy, *(f"{values[name]:.2f}" for name in names))
    console.print(table)
    for problem in [*found["lost"], *found["changed"]][:5]:
        console.print(problem[:400], markup=False)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Times that each policy is run.")] = 3,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long requests come in each run.")] = 35.0,
    load: Annotated[float, typer.Option(min=0.05, help="Share of what the cluster can do at once.")] = 0.65,
    pool_tokens: Annotated[int, typer.Option(min=4096, help="KV pool of each worker.")] = 16_384,
    requests: Annotated[int, typer.Option(min=16, help="Most of one run.")] = 2000,
    trace: Annotated[Path | None, typer.Option(help="A Mooncake trace (JSONL) in place of generated sessions.")] = None,
    config: Annotated[Path, typer.Option(help="A cluster.yaml; it gets two workers of each role.")] = ROOT
    / "cluster.yaml",
    seed: Annotated[int, typer.Option(help="Of the conversations.")] = 0,
    decisions: Annotated[bool, typer.Option("--decisions", help="Only the time of a decision.")] = False,
    workers: Annotated[int, typer.Option(min=2, help="Simulated workers among which a decision is timed.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Compares policies on conversations with shared prefixes, and times a decision among many workers."""
    found: dict[str, Any] = {"decision": measure_decisions(workers, 1_000_000 if decisions else 100_000)}
    with telling_failures():
        if not decisions:
            args = Arguments(seconds, load, rounds, seed, trace, requests)
            found = measure(make_plan(config, pool_tokens), args) | found
    tell(found, as_json, show)
    if found.get("lost") or found.get("changed"):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
