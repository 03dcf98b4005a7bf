"""`baton cache`: shows what prefix caches hold, computes prompts ahead, and empties caches.

The keys of the JSON documents are a contract for programs.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.common import AdminOptions, AsJson, RouterOptions, outcome, table_console, with_option_groups
from cluster.errors import BatonError, InvalidRequest, NotFound

if TYPE_CHECKING:
    from cluster.pb.admin_pb2 import GetCacheResponse
    from cluster.pb.generation_pb2 import GenerationSpec
    from tools.client import BatonClient

_FIELDS = ("prompt", "messages", "tools", "cache_salt")
_SHOWN_HASH = 16
_MOST_PREFIXES = 4096

Workers = Annotated[
    list[str] | None,
    typer.Option(
        "--worker", metavar="ID", help="Only this one, as `baton status` shows it; may be given several times."
    ),
]

app = typer.Typer(help="Show, fill and empty prefix caches.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def cache() -> None:
    """Show, fill and empty prefix caches."""


@app.command()
@with_option_groups
def show(
    router: RouterOptions,
    worker: Workers = None,
    prefixes: Annotated[int, typer.Option(min=0, max=_MOST_PREFIXES, metavar="N", help="Most prefixes to list.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Show what is kept by worker and tier, what tenants found, and the prefixes that prompts share."""
    with outcome(), router.connect() as client:
        from cli.status import describe

        workers = _named(describe(client.status())["workers"], worker or [])
        document = {
            "workers": [{"worker_id": of["worker_id"], "kv_tiers": of["kv_tiers"]} for of in workers],
            **_describe(client.cache(_MOST_PREFIXES if worker else prefixes), worker or [], prefixes),
        }
        if as_json:
            print(json.dumps(document, indent=2, ensure_ascii=False))
        else:
            _print_tables(document)


@app.command()
@with_option_groups
def warm(
    router: RouterOptions,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A prompt a line, as text or as JSON; `-`: standard input.")
    ],
    concurrency: Annotated[int, typer.Option(min=1, max=256, metavar="N", help="Prompts sent at a time.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Compute the prompts of a file, so that others that begin the same find them. Exits 1 where one failed.

    A line of JSON is a string, or an object with `prompt` (text or token ids) or `messages`, and `tools` and
    `cache_salt` where the requests to come have them. Any other line is the text of a prompt.
    """
    with outcome():
        specs = _read_prompts(file)
        with router.connect() as client:
            document = _warm(client, specs, concurrency)
        if as_json:
            print(json.dumps(document, indent=2))
        else:
            print(
                f"{document['prompts'] - document['failed']} of {document['prompts']} prompts: "
                f"{document['prompt_tokens']} tokens, {document['cached_tokens']} of them were cached, "
                f"in {document['seconds']:.1f} s"
            )
        if document["failed"]:
            raise typer.Exit(1)


@app.command()
@with_option_groups
def flush(admin: AdminOptions, worker: Workers = None, as_json: AsJson = False) -> None:
    """Empty the prefix caches of workers, tiers below their pools included; requests that run are not disturbed."""
    from cli.change import flush_workers

    flush_workers(admin, worker or [], as_json=as_json)


def _named(workers: list[dict[str, Any]], wanted: list[str]) -> list[dict[str, Any]]:
    """The workers of these ids; all where none is named. Raises NotFound."""
    known = {worker["worker_id"]: worker for worker in workers}
    for worker_id in wanted:
        if worker_id not in known:
            raise NotFound(f"there is no worker {worker_id!r}; there are {', '.join(sorted(known)) or 'none'}")
    return [known[worker_id] for worker_id in dict.fromkeys(wanted or known)]


def _describe(cache: GetCacheResponse, wanted: list[str], most: int) -> dict[str, Any]:
    """The documents of tenants and of `most` prefixes; where workers are named, of those that one of them holds."""
    prefixes = [of for of in cache.prefixes if not wanted or set(wanted) & set(of.worker_ids)]
    return {
        "tenants": [
            {
                "tenant": of.tenant,
                "requests": of.num_requests,
                "prompt_tokens": of.num_prompt_tokens,
                "cached_tokens": of.num_cached_tokens,
            }
            for of in cache.tenants
        ],
        "prefixes": [
            {
                "hash": of.hash.hex(),
                "tenant": of.tenant,
                "tokens": of.num_tokens,
                "requests": of.num_requests,
                "workers": list(of.worker_ids),
            }
            for of in prefixes[:most]
        ],
    }


def _print_tables(document: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from cli.status import tier_table

    console = table_console()
    console.print(tier_table(document["workers"]))
    tenants = Table(box=SIMPLE_HEAD)
    for column in ("tenant", "requests", "prompt tokens", "cached", "share"):
        tenants.add_column(column, justify="left" if column == "tenant" else "right")
    for of in document["tenants"]:
        share = of["cached_tokens"] / max(1, of["prompt_tokens"])
        numbers = map(str, (of["requests"], of["prompt_tokens"], of["cached_tokens"]))
        tenants.add_row(of["tenant"] or "-", *numbers, f"{share:.0%}")
    console.print(tenants if document["tenants"] else "this router has served no prompt yet")
    shared = Table(box=SIMPLE_HEAD)
    for column in ("prefix", "tenant", "tokens", "prompts", "held by"):
        shared.add_column(column, justify="right" if column in ("tokens", "prompts") else "left")
    for of in document["prefixes"]:
        numbers, held_by = map(str, (of["tokens"], of["requests"])), ", ".join(of["workers"])
        shared.add_row(of["hash"][:_SHOWN_HASH], of["tenant"] or "-", *numbers, held_by or "nobody now")
    if document["prefixes"]:
        console.print(shared)


def _read_prompts(file: Path) -> dict[int, GenerationSpec]:
    """A request of one token for each line that is not empty, by its number. Raises InvalidRequest, which names it."""
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        lines = data.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise InvalidRequest(f"{file}: cannot be read ({error.strerror}); name a file with a prompt a line") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{file}: is not UTF-8 text (byte {error.start})") from error
    if not any(map(str.strip, lines)):
        raise InvalidRequest(f"{file}: holds no prompt; write one a line, as text or as JSON")
    specs: dict[int, GenerationSpec] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                specs[number] = _spec_of(line.removesuffix("\r"))
            except (InvalidRequest, ValueError) as error:
                raise InvalidRequest(f"{file}, line {number}: {error}") from error
    return specs


def _spec_of(line: str) -> GenerationSpec:
    """Raises ValueError or InvalidRequest for a line that is no prompt."""
    from tools.client import make_spec

    given: Any = line
    if line.lstrip()[:1] in ("{", "[", '"'):
        try:
            given = json.loads(line)
        except ValueError:
            if line.lstrip()[0] == "{":
                raise
    if isinstance(given, list):
        given = {"prompt": given} if _is_list_of(int, given) else line
    if isinstance(given, str):
        given = {"prompt": given}
    if unknown := [name for name in given if name not in _FIELDS]:
        raise ValueError(f"{unknown[0]!r} is not among {', '.join(_FIELDS)}")
    prompt, tools, salt = given.get("prompt"), given.get("tools", []), given.get("cache_salt", "")
    is_prompt, is_chat = isinstance(prompt, str) or _is_list_of(int, prompt), _is_list_of(dict, given.get("messages"))
    asked = prompt if "prompt" in given else given.get("messages")
    if ("prompt" in given) == ("messages" in given) or not asked or not (is_prompt or is_chat):
        raise ValueError("an object needs either `prompt`, a text or token ids, or `messages`, a list of objects")
    if not (_is_list_of(dict, tools) and isinstance(salt, str)) or (tools and not is_chat):
        raise ValueError("`tools`, beside `messages`, is a list of objects, and `cache_salt` a text")
    spec = make_spec(asked, max_output_tokens=1, temperature=0.0, tools=tools)
    spec.cache.cache_salt = salt
    return spec


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) and not isinstance(each, bool) for each in value)


def _warm(client: BatonClient, specs: dict[int, GenerationSpec], concurrency: int) -> dict[str, Any]:
    """Sends them, some at a time, and says on stderr how far it is and what failed."""
    began, sums = time.monotonic(), Counter[str]()
    is_over = threading.Event()

    def send(number: int) -> tuple[int, Any]:
        if is_over.is_set():
            return 0, None
        try:
            return number, client.generate(specs[number]).usage
        except BatonError as error:
            return number, error

    with ThreadPoolExecutor(min(concurrency, len(specs))) as senders:
        try:
            for done in as_completed([senders.submit(send, number) for number in specs]):
                number, result = done.result()
                sums["done"] += 1
                if isinstance(result, BatonError):
                    sums["failed"] += 1
                    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
                    print(f"{clear}line {number}: {result.message}", file=sys.stderr)
                else:
                    sums["prompt_tokens"] += result.prompt_tokens
                    sums["cached_tokens"] += result.cached_tokens
                _print_progress(sums["done"], len(specs))
        finally:
            is_over.set()
    return {
        "prompts": len(specs),
        "failed": sums["failed"],
        "prompt_tokens": sums["prompt_tokens"],
        "cached_tokens": sums["cached_tokens"],
        "seconds": round(time.monotonic() - began, 3),
    }


def _print_progress(num_done: int, num: int) -> None:
    """A line that is overwritten on a terminal; elsewhere each tenth part."""
    if sys.stderr.isatty():
        print(f"\r{num_done} of {num} prompts", end="\n" if num_done == num else "", file=sys.stderr, flush=True)
    elif num_done == num or num_done * 10 // num > (num_done - 1) * 10 // num:
        print(f"{num_done} of {num} prompts", file=sys.stderr, flush=True)
