"""What a router costs between clients and workers, against a bare gRPC server that streams the same messages.

    python benchmarks/router_overhead.py --json

Workers without a model write tokens as fast as they are read; clients, workers, router and echo are processes of their
own. A request of one token, and a stream of many, go through the router and through the echo by turns; then many
streams at once measure how much processor a token takes, how many tokens a second one router passes on, how many two
routers over the same workers do, and how many are left when every stream may be resumed and is written into a file for
that, beside a journal in memory. Exits 1 when a token was lost or repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.plain_cluster import ROOT, Program, start_within, wait_until_serving
from benchmarks.report import bars, tell, telling_failures
from benchmarks.router_peers import PeerSettings, run_stream
from cluster import rpc
from cluster.pb import generation_pb2_grpc
from cluster.settings import RouterSettings

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NUM_CLIENTS = 2
"""Processes of clients, always: two routers get one each, one router or the echo gets both."""


class TokensLost(Exception):
    """A stream did not tell each token once."""


def cpu_s(pid: int) -> float:
    """Processor time that a process has taken so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


@dataclass(frozen=True)
class Served:
    """A process that clients can call."""

    address: str
    pid: int


@dataclass
class Bench:
    """Everything that runs."""

    echo: Served
    routers: list[Served]
    journaled: Served
    """A router whose journal is in a file."""
    clients: list[Program]

    def burst(
        self, servers: list[Served], streams: int, tokens: int, *, is_paced: bool, may_resume: bool
    ) -> dict[str, float]:
        """`streams` at once over `servers`, in each client's share; raises TokensLost."""
        before = sum(cpu_s(s.pid) for s in servers)
        for number, client in enumerate(self.clients):
            address = servers[number % len(servers)].address
            wanted = {"address": address, "streams": streams // len(self.clients), "tokens": tokens}
            client.tell(wanted | {"is_paced": is_paced, "may_resume": may_resume})
        done = [client.expect("done") for client in self.clients]
        for problem in (each["problem"] for each in done):
            if problem:
                raise TokensLost(problem)
        num_tokens = tokens * (streams // len(self.clients)) * len(self.clients)
        elapsed_s = max(each["ended"] for each in done) - min(each["begun"] for each in done)
        used_s = sum(cpu_s(s.pid) for s in servers) - before
        return {"tok_s": num_tokens / elapsed_s, "cpu_us": 1e6 * used_s / num_tokens}


@contextlib.contextmanager
def running(model: Path) -> Iterator[Bench]:
    """Raises ProgramFailed for a bad start."""
    with contextlib.ExitStack() as stack:
        start = partial(start_within, stack)
        peers = {kind: start("benchmarks.router_peers", PeerSettings(kind)) for kind in ("workers", "echo")}
        flags = tuple(peers["workers"].expect("ready")["addresses"])
        echo = Served(str(peers["echo"].expect("ready")["addresses"][0]), peers["echo"].pid)
        clients = [start("benchmarks.router_peers", PeerSettings("load")) for _ in range(_NUM_CLIENTS)]
        settings = RouterSettings.from_values(
            model_path=str(model), port=0, workers=flags, max_num_seqs=1024, max_running_requests=1024, metrics_port=0
        )
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        routers = []
        for state in (None, None, f"{folder}/journal.db"):
            program = start("router", settings.with_values(state=state))
            address = str(program.expect("ready")["address"])
            wait_until_serving(address)
            routers.append(Served(address, program.pid))
        for client in clients:
            client.expect("ready")
        yield Bench(echo, routers[:2], routers[2], clients)


async def one_by_one(bench: Bench, tokens: int, rounds: int, progress: Any) -> dict[str, float]:
    """Medians of what the router adds to one request, and to each token of one stream, in microseconds."""
    per_request: list[float] = []
    per_token: list[float] = []
    async with rpc.create_channel(bench.routers[0].address) as ours, rpc.create_channel(bench.echo.address) as bare:
        stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in (ours, bare)]
        for number in range(rounds + 1):
            short = [statistics.median([await run_stream(stub, 1) for _ in range(20)]) for stub in stubs]
            long = [await run_stream(stub, tokens) for stub in stubs]
            if number:  # the first warms up
                per_request.append(1e6 * (short[0] - short[1]))
                per_token.append(1e6 * ((long[0] - short[0]) - (long[1] - short[1])) / (tokens - 1))
            progress()
    return {"per_request_us": statistics.median(per_request), "per_token_us": statistics.median(per_token)}


def measure(bench: Bench, rounds: int, streams: int, tokens: int, progress: Progress) -> dict[str, Any]:
    """What `--json` prints, less where it ran."""
    bar = progress.add_task("measuring", total=2 * rounds + 2)

    def step() -> None:
        progress.advance(bar)

    added = asyncio.run(one_by_one(bench, tokens, rounds, step))
    one, two = bench.routers[:1], bench.routers
    ways: dict[str, tuple[list[Served], bool, bool]] = {
        "echo": ([bench.echo], False, False),
        "router": (one, False, False),
        "router_paced": (one, True, False),
        "two_routers": (two, False, False),
        "two_routers_paced": (two, True, False),
        "journal_in_memory": (one, False, True),
        "journal_in_a_file": ([bench.journaled], False, True),
        "journal_in_memory_paced": (one, True, True),
        "journal_in_a_file_paced": ([bench.journaled], True, True),
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, (servers, is_paced, may_resume) in ways.items():
            found = bench.burst(servers, streams, tokens, is_paced=is_paced, may_resume=may_resume)
            if number:
                runs[name].append(found)
        step()
    medians = {
        name: {key: round(statistics.median(run[key] for run in each), 1) for key in each[0]}
        for name, each in runs.items()
    }
    gain = {
        name: round(statistics.median(b["tok_s"] / a["tok_s"] for a, b in zip(runs[one], runs[two], strict=True)), 3)
        for name, one, two in (
            ("second_router_gain", "router", "two_routers"),
            ("second_router_gain_paced", "router_paced", "two_routers_paced"),
            ("left_with_a_file", "journal_in_memory", "journal_in_a_file"),
            ("left_with_a_file_paced", "journal_in_memory_paced", "journal_in_a_file_paced"),
        )
    }
    cpu = [a["cpu_us"] - b["cpu_us"] for a, b in zip(runs["router"], runs["echo"], strict=True)]
    return {
        "added_per_request_us": round(added["per_request_us"], 1),
        "added_per_token_us": round(added["per_token_us"], 1),
        "added_cpu_per_token_us": round(statistics.median(cpu), 1),
        **gain,
        "many_streams": medians,
        "streams": streams,
        "tokens": tokens,
    }


def show(found: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"added over a bare gRPC server: {found['added_per_request_us']:.0f} us a request, "
        f"{found['added_per_token_us']:.0f} us a token of one stream, "
        f"{found['added_cpu_per_token_us']:.0f} us of processor a token of many"
    )
    table = Table(title=f"{found['streams']} streams of {found['tokens']} tokens on {found['cores']} cores")
    for column in ("", "tokens/s", "processor, us a token"):
        table.add_column(column, justify="right" if column else "left")
    for name, values in found["many_streams"].items():
        table.add_row(name.replace("_", " "), f"{values['tok_s']:.0f}", f"{values['cpu_us']:.1f}")
    console.print(table)
    console.print(
        f"a second router passes on {found['second_router_gain']:.2f} times as much, "
        f"{found['second_router_gain_paced']:.2f} times at the router's own pace"
    )
    console.print(
        f"streams that may be resumed: with the journal in a file {found['left_with_a_file']:.0%} of the tokens a "
        f"second that there are with one in memory, {found['left_with_a_file_paced']:.0%} at the router's own pace"
    )


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    streams: Annotated[int, typer.Option(min=2, help="How many at once.")] = 64,
    tokens: Annotated[int, typer.Option(min=8, help="Output tokens of each stream.")] = 256,
    model: Annotated[Path, typer.Option(help="A model folder, for its tokenizer.")] = ROOT
    / "models"
    / "tiny-shakespeare",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Measures what the router adds, and how much it can pass on."""
    try:
        with telling_failures(), running(model) as bench, bars() as progress:
            found = measure(bench, rounds, streams, tokens, progress)
    except (TokensLost, AssertionError) as error:
        typer.echo(f"a stream is not whole: {error}", err=True)
        raise typer.Exit(1) from None
    found |= {"cores": os.cpu_count() or 1, "load_average": round(os.getloadavg()[0], 1)}
    tell(found, as_json, show)


if __name__ == "__main__":
    typer.run(main)
