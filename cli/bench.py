"""`baton bench` sends a load to a server and measures what its clients see; `compare` and `plot` show such runs."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.common import AsJson, RouterOptions, outcome, silence_grpc, with_option_groups
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from simulate.workload import RequestShape
    from tools.bench.targets import Target
    from tools.bench.workload import Sample

app = typer.Typer(
    invoke_without_command=True,
    help="Send a load to a server and measure what its clients see.",
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


@dataclass(frozen=True)
class ServerOptions(RouterOptions):
    """Options that choose the server and say how it is called."""

    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="An OpenAI API instead, such as http://HOST:8000/v1.")
    ] = None
    model: Annotated[str | None, typer.Option(help="Its model; default: the first that it lists.")] = None
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Time that one request may take.")] = 600.0
    extra_body: Annotated[str | None, typer.Option(metavar="JSON", help="More fields of each HTTP body.")] = None
    tokenizer: Annotated[
        Path | None, typer.Option(help="Send prompts as text of this tokenizer: a folder, or tokenizer.json.")
    ] = None

    @property
    def extra_fields(self) -> dict[str, Any]:
        try:
            extra = json.loads(self.extra_body) if self.extra_body else {}
        except ValueError:
            extra = None
        if not isinstance(extra, dict):
            raise typer.BadParameter(f"--extra-body must be a JSON object (got {self.extra_body})")
        return extra

    def as_text(self) -> Callable[[list[int]], str] | None:
        """Decodes a prompt; None: prompts are sent as token ids. Raises ConfigError."""
        from tools.bench.workload import read_tokenizer, text_of

        return None if self.tokenizer is None else partial(text_of, read_tokenizer(self.tokenizer))

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[str, Target]]:
        """The model's name, and the server. Raises NotReachable."""
        import httpx2

        from cluster import rpc
        from tools.bench.targets import GrpcTarget, OpenAiTarget, first_model, model_over_grpc
        from tools.client import key_metadata

        tls = self.tls
        if self.base_url is None:
            silence_grpc()
            async with rpc.create_channel(self.address, tls=tls) as channel:
                metadata = key_metadata(self.api_key)
                yield await model_over_grpc(channel, metadata), GrpcTarget(channel, metadata, self.timeout_s)
            return
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        verify: Any = True if tls is None else tls.context()
        async with httpx2.AsyncClient(
            base_url=self.base_url, headers=headers, timeout=self.timeout_s, limits=limits, verify=verify
        ) as http:
            model = self.model or await first_model(http)
            yield model, OpenAiTarget(http, model, self.extra_fields)


_USUAL_PROMPTS = 100


@dataclass(frozen=True)
class RequestOptions:
    """Options that say which requests come, and when."""

    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests; default: 100, or all of the trace.", show_default=False)
    ] = None
    request_rate: Annotated[
        float | None,
        typer.Option(min=1e-3, help="Requests a second; default, or inf: all at once, or as in the trace."),
    ] = None
    burstiness: Annotated[float, typer.Option(min=1e-3, help="1: Poisson; less: bursts; more: evener.")] = 1.0
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 256
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an output.")] = 64
    range_ratio: Annotated[float, typer.Option(min=0, max=1, help="Lengths vary by this share.")] = 0.0
    prefix_len: Annotated[int, typer.Option(min=0, help="More tokens, with which every prompt begins.")] = 0
    trace: Annotated[
        Path | None, typer.Option(help="The requests of Mooncake's JSON lines or a CSV (docs/bench.md) instead.")
    ] = None
    speed: Annotated[float, typer.Option(min=1e-3, help="Play the trace so many times faster.")] = 1.0
    length_share: Annotated[float, typer.Option(min=1e-4, help="Multiply the trace's lengths by this.")] = 1.0
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Cut prompts and outputs of a trace to so many tokens together.")
    ] = None
    seed: Annotated[int, typer.Option(help="The same seed makes the same load.")] = 0

    @property
    def rate(self) -> float | None:
        """None: no rate; `inf`, vLLM's default, means the same."""
        return None if self.request_rate == math.inf else self.request_rate

    def shapes(self) -> list[RequestShape]:
        """Raises ConfigError for a trace that cannot be read."""
        from simulate import workload

        if self.trace is None:
            lengths = workload.uniform(self.input_len, self.output_len, self.range_ratio)
            prefixes = workload.SharedPrefixes(self.prefix_len)
            shapes = workload.random_shapes(self.num_prompts or _USUAL_PROMPTS, lengths, self.seed, prefixes)
        else:
            shapes = workload.read_trace(self.trace, self.num_prompts)
            shapes = workload.scaled(shapes, self.speed, self.length_share, self.max_tokens)
        return shapes if self.rate is None else workload.at_rate(shapes, self.rate, self.burstiness, self.seed)


@dataclass(frozen=True)
class LoadOptions(RequestOptions):
    """Options of requests that are sent to a server."""

    num_prompts: Annotated[int, typer.Option(min=1, help="Requests.")] = _USUAL_PROMPTS
    max_tokens: Annotated[
        int, typer.Option(min=2, help="Cut prompts and outputs of a trace to so many tokens together.")
    ] = 2048
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests under way: a closed loop.")] = None
    warmup: Annotated[int, typer.Option(min=0, help="Requests before, which do not count.")] = 4
    vocab: Annotated[int, typer.Option(min=11, help="Prompts are drawn from token ids below it.")] = 1000


@dataclass(frozen=True)
class ReportOptions:
    """Options that say what becomes of the results."""

    goodput: Annotated[
        list[str] | None, typer.Option(metavar="NAME:MS", help="Limits of goodput: ttft:500, tpot:50, e2el:5000.")
    ] = None
    save: Annotated[Path | None, typer.Option(help="Write the JSON document to this file, too.")] = None
    detailed: Annotated[
        bool, typer.Option("--detailed", help="Keep the times of each request in the document, to plot them later.")
    ] = False
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw the run into this folder.")] = None
    as_json: AsJson = False


@app.callback()
@with_option_groups
def bench(context: typer.Context, server: ServerOptions, load: LoadOptions, report: ReportOptions) -> None:
    """Send a load to a server and measure what its clients see. Exits 1 when a request failed."""
    if context.invoked_subcommand is not None:
        return
    with outcome():
        from tools.bench.figures import prepare

        if report.plots is not None:
            prepare(report.plots)
        _report(_run(server, load, report.goodput or []), report)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="What --save wrote.")],
    after: Annotated[Path, typer.Argument(help="The same of another run.")],
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


def _run(server: ServerOptions, load: LoadOptions, goodput: list[str]) -> dict[str, Any]:
    """The JSON document of one run."""
    import asyncio

    from tools.bench.figures import details_of, figures_of, parse_objectives

    try:
        objectives = parse_objectives(goodput)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    _ = server.extra_fields  # a mistake there is reported before anything is sent
    shapes = load.shapes()
    model, samples = asyncio.run(_send(server, load, shapes))
    duration_s = max(s.ended_at for s in samples) - min(s.sent_at for s in samples)
    return {
        "backend": "baton" if server.base_url is None else "openai",
        "model_id": model,
        "num_prompts": len(shapes),
        "request_rate": load.rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        **figures_of(samples, duration_s, objectives),
        "details": details_of(samples),
    }


async def _send(server: ServerOptions, load: LoadOptions, shapes: list[RequestShape]) -> tuple[str, list[Sample]]:
    """Sends the warm-up and then the load. Returns the model's name and the samples of the load."""
    from tools.bench.workload import make_requests, send_all

    as_text, most = server.as_text(), load.max_concurrency
    first = [replace(shape, at=0.0) for shape in shapes[: load.warmup]]
    warm = make_requests(first, load.vocab, load.seed + 1, as_text)
    requests = make_requests(shapes, load.vocab, load.seed, as_text)
    async with server.open() as (model, target):
        with progress_bar(len(shapes)) as on_end:
            await send_all(warm, target.send, most_at_once=most, on_end=lambda _: None)
            return model, await send_all(requests, target.send, most_at_once=most, on_end=on_end)


@contextlib.contextmanager
def progress_bar(num: int) -> Iterator[Callable[[object], None]]:
    """A bar on stderr of `num` requests, where that is a terminal; yields what is called with each that has ended."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=num)
        yield lambda _: bar.advance(task)


def _report(run: dict[str, Any], report: ReportOptions) -> None:
    """Draws, saves and prints a run. Exits 1 when a request failed, or a token was lost or repeated."""
    if report.plots is not None and run["completed"]:
        _draw({run["model_id"]: run}, report.plots)
    if not report.detailed:
        del run["details"]
    document = json.dumps(run, indent=2)
    if report.save is not None:
        try:
            report.save.write_text(document + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{report.save}: cannot be written: {error.strerror}") from error
    if report.as_json:
        print(document)
    else:
        _show({run["model_id"]: run})
    if run["failed"] or run["num_gaps"]:
        raise typer.Exit(1)


def _draw(runs: dict[str, dict[str, Any]], folder: Path) -> None:
    """Prints the names of the files to stderr, since stdout may hold a document."""
    from tools.bench.figures import draw

    for file in draw(runs, folder):
        print(file, file=sys.stderr)


def _name(path: Path, among: list[Path]) -> str:
    """The legend of a file: its name, with the folder where another file has the same name."""
    return path.stem if [other.stem for other in among].count(path.stem) == 1 else str(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(run, dict) or not _is_document(run):
            raise ValueError("no object of figures")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not what `baton bench --save` or --json writes") from error
    return run


def _is_document(run: dict[str, Any]) -> bool:
    figures = (run.get(key) for _, key, _ in (*_ROWS, *_TIME_ROWS))
    return isinstance(run.get("errors", []), list) and all(isinstance(f, int | float | None) for f in figures)


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
