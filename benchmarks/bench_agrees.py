"""Whether `baton bench` measures right: its figures against those of an independent client, of the same run.

    python benchmarks/bench_agrees.py --peer .venv-peer/bin/transformers

Two runs are never the same: with 200 requests whose times vary by a half, the means of two honest clients differ by
5 %. So both clients have one run. A relay stands before the server; `baton bench` and the other client offer the same
closed loop through it, a request goes on once both have sent it, and the answer goes to both as it comes
(`bench_relay`). The other client is OpenAI's SDK, or for gRPC what protoc generates, in a process of its own. It says
only when it sent, when messages came and what the server counted (`bench_witness`); numpy makes figures of that here.
Of `tools.bench`, only what draws the prompts takes part. The relay's own record of what went by is a third
measurement, by neither client.

What can differ honestly is small and known. Whoever asks first waits for the other, and has that in its time to the
first token (`apart_ms`). A client takes a millisecond or so to send a request, and less to read a message, which the
relay does not see. Against the times of prompts of 1,024 tokens that is less than 2 %: the load is chosen for it, not
the limit. Servers get a lower priority than clients and relay, for which others have a machine of their own; where
other programs take the processor, the highest percentiles of the time between messages are those of the client that
had to wait for it.

Servers: Baton over gRPC and over HTTP; `transformers serve` (--peer; `make bench-peer` installs it); or any OpenAI
API that serves already (--base-url). Exits 1 when a figure differs by more than --within, or a request failed.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.bench_relay import GrpcRelay, HttpRelay, Meeting
from benchmarks.bench_servers import Server, baton, put_behind, stopping, transformers_serve
from benchmarks.bench_witness import WitnessSettings
from benchmarks.make_model import Shape, make_model
from benchmarks.plain_cluster import ROOT, Program, ProgramFailed
from benchmarks.report import tell, telling_failures
from simulate.workload import random_shapes, uniform
from tools.bench.workload import Prompt, make_requests, read_tokenizer, text_of

TIMES = ("ttft", "tpot", "itl", "e2el")
RATES = ("request_throughput", "output_throughput", "total_token_throughput")
COUNTS = ("completed", "total_input_tokens", "total_output_tokens")
FIGURES = (
    *COUNTS,
    "duration",
    *RATES,
    *(f"{spread}_{t}_ms" for t in TIMES for spread in ("mean", "median", "p90", "p99")),
)


class Only(StrEnum):
    grpc = "grpc"
    http = "http"
    peer = "peer"


@dataclass(frozen=True)
class Load:
    """A closed loop."""

    num_prompts: int
    most_at_once: int
    input_len: int
    output_len: int
    seed: int
    num_warm: int
    vocab: int


def figures(seen: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of what was seen of each request, as docs/bench.md says what they mean."""
    told = [np.array(one["told"]) for one in seen]
    sent, ended = np.array([one["sent_at"] for one in seen]), np.array([one["ended_at"] for one in seen])
    num_in, num_out = (np.array([one[f"num_{kind}_tokens"] for one in seen]) for kind in ("prompt", "output"))
    first, last = np.array([times[0] for times in told]), np.array([times[-1] for times in told])
    several = num_out > 1
    times_s = {
        "ttft": first - sent,
        "tpot": (last - first)[several] / (num_out[several] - 1),
        "itl": np.concatenate([np.diff(times) for times in told]),
        "e2el": last - sent,
    }
    found = {"duration": ended.max() - sent.min(), "completed": len(seen)}
    found |= {"total_input_tokens": num_in.sum(), "total_output_tokens": num_out.sum()}
    found["request_throughput"] = len(seen) / found["duration"]
    found["output_throughput"] = num_out.sum() / found["duration"]
    found["total_token_throughput"] = (num_in.sum() + num_out.sum()) / found["duration"]
    for name, values in times_s.items():
        found |= {f"mean_{name}_ms": 1000 * values.mean(), f"median_{name}_ms": 1000 * np.median(values)}
        found |= {f"p{p}_{name}_ms": 1000 * np.percentile(values, p) for p in (90, 99)}
    return {name: float(value) for name, value in found.items()}


def prompts_of(load: Load, tokenizer: Path | None) -> dict[str, list[tuple[Prompt, int]]]:
    """What `baton bench` is going to ask, before it counts and then."""
    asks = random_shapes(load.num_prompts, uniform(load.input_len, load.output_len), load.seed)
    as_text = None if tokenizer is None else partial(text_of, read_tokenizer(tokenizer))
    offered = {"warm": (asks[: load.num_warm], load.seed + 1), "counted": (asks, load.seed)}
    return {
        name: [
            (request.prompt, request.num_output_tokens) for request in make_requests(some, load.vocab, seed, as_text)
        ]
        for name, (some, seed) in offered.items()
    }


async def measure(server: Server, load: Load) -> dict[str, Any]:
    """One run, by all three. Raises ProgramFailed."""
    meeting = Meeting(load.num_warm)
    if server.base_url is None:
        relay: GrpcRelay | HttpRelay = GrpcRelay(server.address, meeting)
    else:
        host, _, port = server.address.rpartition(":")
        relay = HttpRelay(host, int(port), meeting)
    with tempfile.TemporaryDirectory(prefix="baton-agrees-") as name:
        asks, saved = Path(name) / "asks.json", Path(name) / "bench.json"
        asks.write_text(json.dumps(prompts_of(load, server.tokenizer)))
        async with relay.running() as (first, second):
            settings = WitnessSettings(
                server.url(second), server.model, str(asks), load.most_at_once, server.ignores_eos
            )
            with stopping(Program("benchmarks.bench_witness", settings)) as witness:
                bench = asyncio.create_task(_bench(server, load, server.url(first), saved))
                seen = await _watch(bench, witness, meeting)
        told = json.loads(saved.read_text())
    wire = [asdict(one) for one in meeting.counted]
    sources = {"bench": told, "witness": figures(seen), "relay": figures(wire)}
    apart_ms = [1000 * one.apart_s for one in meeting.counted]
    return {
        "server": server.name,
        "figures": {name: {source: found[name] for source, found in sources.items()} for name in FIGURES},
        "apart_ms": {"median": float(np.median(apart_ms)), "p99": float(np.percentile(apart_ms, 99))},
    }


async def _watch(bench: asyncio.Task[None], witness: Program, meeting: Meeting) -> list[dict[str, Any]]:
    """What the independent client has seen, when both have ended. Raises ProgramFailed for either."""

    async def follow() -> list[dict[str, Any]]:
        await asyncio.to_thread(witness.expect, "ready")
        await meeting.begun.wait()
        witness.tell({})
        seen: list[dict[str, Any]] = (await asyncio.to_thread(witness.expect, "done"))["seen"]
        return seen

    following = asyncio.create_task(follow())
    done, _ = await asyncio.wait((bench, following), return_when=asyncio.FIRST_EXCEPTION)
    failed = next((task for task in done if task.exception()), None)
    if failed is None and not meeting.problems:
        return following.result()
    for task in (bench, following):
        task.cancel()
    witness.kill()  # so that nobody waits for a line of it
    await asyncio.gather(bench, following, return_exceptions=True)
    what = "; ".join(dict.fromkeys(meeting.problems)) or str(failed and failed.exception())
    raise ProgramFailed(f"the two clients did not have one run: {what}")


async def _bench(server: Server, load: Load, url: str, saved: Path) -> None:
    """`baton bench`, to its end. Raises ProgramFailed."""
    flags = {
        ("--address" if server.base_url is None else "--base-url"): url,
        "--num-prompts": load.num_prompts,
        "--max-concurrency": load.most_at_once,
        "--input-len": load.input_len,
        "--output-len": load.output_len,
        "--warmup": load.num_warm,
        "--vocab": load.vocab,
        "--seed": load.seed,
        "--save": saved,
    }
    if server.base_url is not None:
        flags["--model"] = server.model
    if server.tokenizer is not None:
        flags["--tokenizer"] = server.tokenizer
    if not server.ignores_eos:
        flags["--extra-body"] = '{"ignore_eos": null}'
    words = [str(word) for flag in flags.items() for word in flag]
    command = [sys.executable, "-m", "cli.main", "bench", *words]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        said, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise ProgramFailed(f"baton bench ended with {process.returncode}:\n{said.decode(errors='replace')}")


def judged(run: dict[str, Any], within: float) -> dict[str, Any]:
    """With the ratio of `baton bench` to each other source, and the names of the figures that are too far from one."""
    run["ratios"] = {
        name: {source: _ratio(values["bench"], values[source]) for source in ("witness", "relay")}
        for name, values in run["figures"].items()
    }
    run["differ"] = [
        name for name, ratios in run["ratios"].items() if any(abs(ratio - 1) > within for ratio in ratios.values())
    ]
    return run


def _ratio(one: float, other: float) -> float:
    return one / other if other else (1.0 if one == other else float("inf"))


def show(found: dict[str, Any]) -> None:
    console = Console()
    for run in found["runs"]:
        table = Table(title=run["server"])
        for column in ("", "baton bench", "independent client", "ratio", "relay", "ratio"):
            table.add_column(column, justify="right" if column else "left")
        for name, values in run["figures"].items():
            ratios = [f"{ratio:.4f}" for ratio in run["ratios"][name].values()]
            bench, witness, relay = (f"{values[source]:.6g}" for source in ("bench", "witness", "relay"))
            style = "bold red" if name in run["differ"] else None
            table.add_row(name, bench, witness, ratios[0], relay, ratios[1], style=style)
        console.print(table)
        apart = run["apart_ms"]
        console.print(f"the two clients asked {apart['median']:.2f} ms apart (p99 {apart['p99']:.2f})")
        differ = ", ".join(run["differ"])
        console.print(f"differ by more than {found['within']:.0%}: {differ}" if differ else "agree", style="bold")


def _servers(model: Path, config: Path, peer: Path | None, only: Only | None, given: Server | None) -> Iterator[Server]:
    """One after the other, so that each has the machine."""
    if given is not None:
        yield given
        return
    if only is not Only.peer:
        with baton(config, model) as (grpc, http):
            yield from (server for server, name in ((grpc, Only.grpc), (http, Only.http)) if only in (name, None))
    if peer is not None and only in (Only.peer, None):
        with transformers_serve(peer, model) as server:
            yield server


def _given(base_url: str, model: str | None, tokenizer: Path | None) -> Server:
    parts = urlsplit(base_url)
    if parts.scheme != "http" or not parts.port or model is None:
        raise typer.BadParameter(f"--base-url wants http://HOST:PORT/v1 (got {base_url}), and --serves a model")
    return Server(base_url, f"{parts.hostname}:{parts.port}", parts.path, model, tokenizer)


def main(
    num_prompts: Annotated[int, typer.Option(min=2, help="Requests of each run.")] = 200,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Requests under way.")] = 4,
    input_len: Annotated[int, typer.Option(min=1)] = 1024,
    output_len: Annotated[int, typer.Option(min=2)] = 64,
    model: Annotated[Path | None, typer.Option(help="A Hugging Face folder; default: S of make_model.")] = None,
    peer: Annotated[Path | None, typer.Option(help="The program `transformers`; none: Baton only.")] = None,
    only: Annotated[Only | None, typer.Option(help="One of the servers.")] = None,
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="An OpenAI API that serves already, http://HOST:PORT/v1, instead.")
    ] = None,
    serves: Annotated[str | None, typer.Option(metavar="NAME", help="What it calls its model.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Where it takes only text.")] = None,
    vocab: Annotated[int, typer.Option(min=11, help="Prompts are drawn from token ids below it.")] = 1000,
    within: Annotated[float, typer.Option(min=0, help="What figures may differ by.")] = 0.02,
    config: Annotated[Path, typer.Option(help="A cluster.yaml.")] = ROOT / "cluster.yaml",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """The figures of baton bench, of an independent client and of what went over the wire, of the same runs."""
    if only is Only.peer and peer is None:
        raise typer.BadParameter("--only peer needs the program as --peer; `make bench-peer` installs it")
    runs = []
    given = None if base_url is None else _given(base_url, serves, tokenizer)
    with telling_failures(), tempfile.TemporaryDirectory(prefix="baton-agrees-") as folder:
        offered = model or make_model(Shape.S, Path(folder) / "S")
        for seed, server in enumerate(_servers(offered, config, peer, only, given)):
            # Another seed for each: what one run has left in the prefix cache is not to be found by the next.
            load = Load(num_prompts, max_concurrency, input_len, output_len, 2 * seed, max_concurrency, vocab)
            put_behind()
            runs.append(judged(asyncio.run(measure(server, load)), within))
    found = {"within": within, "cores": os.cpu_count(), "load_average": os.getloadavg()[0], "runs": runs}
    tell(found, as_json, show)
    if any(run["differ"] for run in runs):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
