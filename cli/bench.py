"""`baton bench`: offers a load to a server and tells what its clients saw; `baton bench compare`: two such runs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.common import DEFAULT_ADDRESS, Address, ApiKeyOption, AsJson, TlsCa, TlsCert, TlsKey, client_tls, outcome
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from tools.bench.samples import Sample
    from tools.bench.targets import Target
    from tools.bench.workload import RequestShape

app = typer.Typer(
    invoke_without_command=True,
    help="Offer a load to a server and measure what its clients see.",
    rich_markup_mode=None,
)
_ROWS = (
    ("requests completed", "completed", ""),
    ("failed", "failed", ""),
    ("duration", "duration", "s"),
    ("requests a second", "request_throughput", ""),
    ("in time, a second", "request_goodput", ""),
    ("output tokens a second", "output_throughput", ""),
    ("all tokens a second", "total_token_throughput", ""),
    ("most requests at once", "max_concurrent_requests", ""),
    ("prompt tokens cached", "cached_share", ""),
    ("tokens lost or repeated", "num_gaps", ""),
    ("moves", "num_moves", ""),
)
_TIMES = (("first token", "ttft"), ("per token after it", "tpot"), ("between messages", "itl"), ("whole", "e2el"))
_SPREADS = ("mean", "median", "p90", "p99")
_TIME_ROWS = [(f"{name}, {spread}", f"{spread}_{key}_ms", "ms") for name, key in _TIMES for spread in _SPREADS]


@app.callback()
def bench(
    context: typer.Context,
    address: Address = DEFAULT_ADDRESS,
    base_url: Annotated[
        str | None,
        typer.Option("--base-url", metavar="URL", help="An OpenAI API instead, such as http://HOST:8000/v1."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Its model; default: the first that it serves.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests.")] = 100,
    request_rate: Annotated[
        float | None,
        typer.Option(min=1e-3, help="Requests a second; default, or inf: all at once, or as in a trace."),
    ] = None,
    burstiness: Annotated[float, typer.Option(min=1e-3, help="1: Poisson; less: bursts; more: evener.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests under way: a closed loop.")] = None,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 256,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an output.")] = 64,
    range_ratio: Annotated[float, typer.Option(min=0, max=1, help="Lengths vary by this share.")] = 0.0,
    prefix_len: Annotated[int, typer.Option(min=0, help="Tokens more, with which every prompt begins.")] = 0,
    trace: Annotated[Path | None, typer.Option(help="Mooncake's JSON lines or Azure's CSV instead.")] = None,
    speed: Annotated[float, typer.Option(min=1e-3, help="Times faster than the trace was.")] = 1.0,
    length_share: Annotated[float, typer.Option(min=1e-4, help="Of the trace's lengths.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of prompt and output in a trace; more is cut.")] = 2048,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before, which do not count.")] = 4,
    goodput: Annotated[
        list[str] | None, typer.Option(metavar="NAME:MS", help="What is in time: ttft:500, tpot:50, e2el:5000.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Send prompts as text of this tokenizer: a folder, or tokenizer.json.")
    ] = None,
    vocab: Annotated[int, typer.Option(min=11, help="Prompts are drawn from token ids below it.")] = 1000,
    seed: Annotated[int, typer.Option(help="The same load for the same seed.")] = 0,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Of one request.")] = 600.0,
    extra_body: Annotated[str | None, typer.Option(metavar="JSON", help="More fields of each HTTP body.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the JSON document to this file, too.")] = None,
    detailed: Annotated[
        bool, typer.Option("--detailed", help="Keep the times of each request in the document, to plot them later.")
    ] = False,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw the run into this folder.")] = None,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: AsJson = False,
) -> None:
    """Offer a load to a server and measure what its clients see. Exits 1 when a request failed."""
    if context.invoked_subcommand is not None:
        return
    with outcome():
        from tools.bench import workload
        from tools.bench.plots import prepare

        if plots is not None:
            prepare(plots)
        if trace is None:
            asks = workload.random_asks(num_prompts, input_len, output_len, range_ratio, prefix_len, seed)
        else:
            asks = workload.read_trace(trace, num_prompts, speed, length_share, max_tokens)
        if request_rate == math.inf:  # as it is vLLM's default
            request_rate = None
        if request_rate is not None:
            asks = workload.at_rate(asks, request_rate, burstiness, seed)
        pace = _Pace(request_rate, burstiness, max_concurrency, warmup)
        server = _Server(address, base_url, model, api_key, tls_ca, tls_cert, tls_key, timeout_s, extra_body, tokenizer)
        told = _run(server, asks, pace, vocab, seed, goodput or [])
        _end(told, save, plots, detailed=detailed, as_json=as_json)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="What --save wrote.")],
    after: Annotated[Path, typer.Argument(help="Of another run.")],
) -> None:
    """Put two runs side by side: each figure, and the second as a ratio of the first."""
    with outcome():
        _show({"before": _read(before), "after": _read(after)})


@app.command()
def plot(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the pictures go.")],
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="What --save wrote, of one run or several.")],
) -> None:
    """Draw runs together: goodput by rate, and first tokens and time between messages of those kept --detailed."""
    with outcome():
        _draw({_name(path, runs): _read(path) for path in runs}, folder)


@dataclass(frozen=True)
class _Pace:
    rate: float | None
    burstiness: float
    most_at_once: int | None
    num_warm: int


@dataclass(frozen=True)
class _Server:
    address: str
    base_url: str | None
    model: str | None
    api_key: str | None
    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None
    timeout_s: float
    extra_body: str | None
    tokenizer: Path | None

    def as_text(self) -> Callable[[list[int]], str] | None:
        """What makes a prompt text, where it is sent as that. Raises ConfigError."""
        from tools.bench.workload import read_tokenizer, text_of

        return None if self.tokenizer is None else partial(text_of, read_tokenizer(self.tokenizer))


def _run(
    server: _Server, asks: list[RequestShape], pace: _Pace, vocab: int, seed: int, goodput: list[str]
) -> dict[str, Any]:
    """The JSON document."""
    import asyncio

    from tools.bench.figures import details_of, figures_of, parse_objectives

    try:
        objectives = parse_objectives(goodput)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        extra = json.loads(server.extra_body) if server.extra_body else {}
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise typer.BadParameter(f"--extra-body must be a JSON object (got {server.extra_body})")
    model, samples = asyncio.run(_offer(server, extra, asks, pace, vocab, seed))
    duration_s = max(s.ended_at for s in samples) - min(s.sent_at for s in samples)
    return {
        "backend": "baton" if server.base_url is None else "openai",
        "model_id": model,
        "num_prompts": len(asks),
        "request_rate": pace.rate,
        "burstiness": pace.burstiness,
        "max_concurrency": pace.most_at_once,
        **figures_of(samples, duration_s, objectives),
        "details": details_of(samples),
    }


async def _offer(
    server: _Server, extra: dict[str, Any], asks: list[RequestShape], pace: _Pace, vocab: int, seed: int
) -> tuple[str, list[Sample]]:
    """The model's name, and what the clients saw."""
    from tools.bench.runner import offer
    from tools.bench.workload import requests_of

    as_text, most = server.as_text(), pace.most_at_once
    warm = requests_of([replace(ask, at=0.0) for ask in asks[: pace.num_warm]], vocab, seed + 1, as_text)
    requests = requests_of(asks, vocab, seed, as_text)
    async with _target(server, extra) as (model, target):
        with _progress(len(asks)) as on_end:
            await offer(warm, target.send, most_at_once=most, on_end=lambda _: None)
            return model, await offer(requests, target.send, most_at_once=most, on_end=on_end)


@contextlib.asynccontextmanager
async def _target(server: _Server, extra: dict[str, Any]) -> AsyncIterator[tuple[str, Target]]:
    """Raises NotReachable."""
    import httpx2

    from cluster import rpc
    from tools.bench.targets import GrpcTarget, OpenAiTarget, first_model, model_over_grpc
    from tools.client import key_metadata

    tls = client_tls(server.tls_ca, server.tls_cert, server.tls_key)
    if server.base_url is None:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        async with rpc.create_channel(server.address, tls=tls) as channel:
            metadata = key_metadata(server.api_key)
            yield await model_over_grpc(channel, metadata), GrpcTarget(channel, metadata, server.timeout_s)
        return
    headers = {"authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    verify: Any = True if tls is None else tls.context()
    async with httpx2.AsyncClient(
        base_url=server.base_url, headers=headers, timeout=server.timeout_s, limits=limits, verify=verify
    ) as http:
        model = server.model or await first_model(http)
        yield model, OpenAiTarget(http, model, extra)


@contextlib.contextmanager
def _progress(num: int) -> Iterator[Callable[[Sample], None]]:
    """A bar on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=num)
        yield lambda _: bar.advance(task)


def _end(told: dict[str, Any], save: Path | None, plots: Path | None, *, detailed: bool, as_json: bool) -> None:
    """Draws and tells a run. Exits 1 when a request failed, or a token was lost or repeated."""
    if plots is not None and told["completed"]:
        _draw({told["model_id"]: told}, plots)
    if not detailed:
        del told["details"]
    document = json.dumps(told, indent=2)
    if save is not None:
        try:
            save.write_text(document + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{save}: cannot be written: {error.strerror}") from error
    if as_json:
        print(document)
    else:
        _show({told["model_id"]: told})
    if told["failed"] or told["num_gaps"]:
        raise typer.Exit(1)


def _draw(runs: dict[str, dict[str, Any]], folder: Path) -> None:
    """The names of the files go to stderr, as stdout may be a document."""
    from tools.bench.plots import draw

    for file in draw(runs, folder):
        print(file, file=sys.stderr)


def _name(path: Path, among: list[Path]) -> str:
    """A file's name, in the legend; with its folder where another one has the same."""
    return path.stem if [other.stem for other in among].count(path.stem) == 1 else str(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(told, dict) or not _is_document(told):
            raise ValueError("no object of figures")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not what `baton bench --save` or --json writes") from error
    return told


def _is_document(told: dict[str, Any]) -> bool:
    figures = (told.get(key) for _, key, _ in (*_ROWS, *_TIME_ROWS))
    return isinstance(told.get("errors", []), list) and all(isinstance(f, int | float | None) for f in figures)


def _show(runs: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    if len(runs) > 1:
        table.add_column("ratio", justify="right")
    for name, key, unit in (*_ROWS, *_TIME_ROWS):
        values = [run.get(key) for run in runs.values()]
        if any(value is not None for value in values):
            table.add_row(name, *(_shown(value, unit) for value in values), *_ratio(values))
    console = Console(highlight=False)
    console.print(table)
    for run in runs.values():
        for error in run.get("errors") or ():
            console.print(f"failed: {error}", markup=False)


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    text = f"{value:.0f}" if float(value).is_integer() else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return f"{text} {unit}".rstrip()


def _ratio(values: list[float | None]) -> list[str]:
    if len(values) < 2:
        return []
    before, after = values
    return [f"{after / before:.3f}" if before and after is not None else "–"]
