"""`baton apply`, `baton rebalance`, `baton drain`, `baton flush`: change the running cluster.

The plan of a new configuration is printed first, then each step as it begins and ends, until the last one is done.
Ctrl-C ends the watching, not the change. The keys of the JSON document are a contract for programs.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.common import AdminOptions, AsJson, outcome
from cluster.errors import BatonError, NotReachable
from cluster.kv_groups import LOOK_TIMEOUT_S

if TYPE_CHECKING:
    from cluster.pb.admin_pb2 import ChangeResponse
    from tools.client import AdminClient

SAID_AFTER_S = 2.0
"""What a flush waits for is said so late."""


@dataclass(frozen=True)
class ChangeOptions(AdminOptions):
    """Options of each command that changes the cluster."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and change nothing.")] = False
    expected_version: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Refuse unless this is the configuration that runs (`baton status` shows it).",
            show_default=False,
        ),
    ] = None
    as_json: AsJson = False

    def run(self, call: Callable[[AdminClient, dict[str, Any]], ChangeResponse]) -> None:
        """Makes the change that `call` asks for, given a client and the arguments that every change takes.

        Raises BatonError when it is refused, or when a step fails.
        """
        with self.connect() as client:
            answer = call(client, {"expected_version": self.expected_version or 0, "dry_run": self.dry_run})
            _follow(client, answer, is_dry_run=self.dry_run, as_json=self.as_json)


def apply(
    change: ChangeOptions,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The cluster.yaml.")] = Path("cluster.yaml"),
) -> None:
    """Make the running cluster do what a cluster.yaml says."""
    with outcome():
        from controller.config_file import ConfigFile

        given = ConfigFile(file)
        text = given.read()
        given.parse(text)  # a mistake in the file is reported here, with exit code 3
        change.run(lambda client, options: client.apply(text, filename=str(file.absolute()), **options))


def rebalance(
    change: ChangeOptions,
    split: Annotated[str, typer.Argument(metavar="P:D", help="Workers for prefill and for decode, such as 3:1.")],
) -> None:
    """Set how many workers each role has; those that change their role keep serving."""
    try:
        prefill, decode = parse_split(split)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with outcome():
        change.run(lambda client, options: client.set_roles(prefill, decode, **options))


def drain(
    change: ChangeOptions,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Its id, as `baton status` shows it.")],
) -> None:
    """Take a worker out: it gets no new requests, and ends when the last one has left it."""
    with outcome():
        change.run(lambda client, options: client.drain(worker, **options))


def flush(
    admin: AdminOptions,
    workers: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORKER]...", help="Ids, as `baton status` shows them; all that are ready by default."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Empty the prefix caches of workers; requests that run are not disturbed."""
    flush_workers(admin, workers or [], as_json=as_json)


def flush_workers(admin: AdminOptions, workers: list[str], *, as_json: bool) -> None:
    """Empties the prefix caches of these workers, or of all that are ready, the others also where one does not."""
    with outcome(), admin.connect() as client:
        flushed, stored, failed = dict[str, int](), dict[str, int](), dict[str, BatonError]()
        for worker_id in workers or ready_workers(client):
            try:
                with _said_if_long(worker_id):
                    answer = client.flush_cache(worker_id)
            except NotReachable:
                raise
            except BatonError as error:
                failed[worker_id] = error
                continue
            flushed[worker_id] = answer.num_blocks
            stored[worker_id] = answer.num_stored_blocks
            if not as_json:
                of_store = f", {answer.num_stored_blocks} in the store" if answer.num_stored_blocks else ""
                print(f"{worker_id}: {answer.num_blocks} blocks{of_store}", flush=True)
        if as_json:
            print(json.dumps({"num_blocks": flushed, "num_stored_blocks": stored}, indent=2))
        if failed:
            why = "; ".join(f"{worker_id}: {error.message}" for worker_id, error in failed.items())
            raise BatonError(f"not all is flushed: {why}")


@contextmanager
def _said_if_long(worker_id: str) -> Iterator[None]:
    """Says on stderr what is waited for, when that takes a while."""
    what = f"{worker_id}: is waited for; to flush a store takes {LOOK_TIMEOUT_S:g} s at most"
    timer = threading.Timer(SAID_AFTER_S, lambda: print(what, file=sys.stderr, flush=True))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def ready_workers(client: AdminClient) -> list[str]:
    """The ids of all workers that take calls."""
    return [process.name for process in client.cluster().processes if process.role and process.state == "ready"]


def parse_split(text: str) -> tuple[int, int]:
    """Workers for prefill and for decode, from `3:1`. Raises ValueError, which names the form."""
    numbers = text.split(":")
    if len(numbers) != 2 or not all(n.isascii() and n.isdigit() and len(n) < 6 for n in numbers):
        raise ValueError(f"{text!r} is not a split; write PREFILL:DECODE in workers, such as 3:1")
    return int(numbers[0]), int(numbers[1])


def _follow(client: AdminClient, answer: ChangeResponse, *, is_dry_run: bool, as_json: bool) -> None:
    """Prints the plan and each step as it happens. Raises BatonError when a step fails."""
    from cluster.pb.admin_pb2 import ClusterEvent

    # With --json, stdout holds the document alone.
    out = sys.stderr if as_json else sys.stdout
    _print_plan(answer, out, is_dry_run)
    failed = ""
    for event in client.follow(answer):
        if event.kind in (ClusterEvent.KIND_STEP, ClusterEvent.KIND_STEP_DONE, ClusterEvent.KIND_CHANGED):
            print(event.text, file=out, flush=True)
        failed = event.text if event.kind == ClusterEvent.KIND_FAILED else ""
    if as_json:
        print(json.dumps(_document(answer, failed, is_dry_run), indent=2, ensure_ascii=False))
    if failed:
        raise BatonError(failed)


def _print_plan(answer: ChangeResponse, out: Any, is_dry_run: bool) -> None:
    plan = answer.plan
    if not plan.changes and not plan.steps:
        print(f"nothing differs from what runs (configuration {answer.version})", file=out, flush=True)
        return
    for change in plan.changes:
        print(f"  {change}", file=out)
    for number, step in enumerate(plan.steps, start=1):
        print(f"  {number}. {step}", file=out)
    if not plan.steps:
        print("  no worker moves", file=out)
    what = "a dry run: nothing was changed" if is_dry_run else f"accepted as configuration {answer.version}"
    print(what, file=out, flush=True)


def _document(answer: ChangeResponse, failed: str, is_dry_run: bool) -> dict[str, Any]:
    return {
        "version": answer.version,
        "is_change": answer.is_change,
        "is_dry_run": is_dry_run,
        "changes": list(answer.plan.changes),
        "steps": list(answer.plan.steps),
        "failed": failed or None,
    }
