"""`baton apply`, `baton rebalance`, `baton drain`: change the cluster that runs.

The plan is printed first; then each step as it begins and ends, until the last one is done. Ctrl-C ends the watching,
not the change. The JSON is a contract for programs: its keys are made here and nowhere else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.common import (
    DEFAULT_ADMIN_ADDRESS,
    AdminAddress,
    ApiKeyOption,
    AsJson,
    TlsCa,
    TlsCert,
    TlsKey,
    connect_admin,
    outcome,
)
from cluster.errors import BatonError

if TYPE_CHECKING:
    from cluster.pb.admin_pb2 import ChangeResponse
    from tools.client import AdminClient

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and change nothing.")]
ExpectedVersion = Annotated[
    int | None,
    typer.Option(
        "--expected-version",
        min=1,
        metavar="N",
        help="Refuse unless this is the configuration that runs (`baton status` shows it).",
        show_default=False,
    ),
]


def apply(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The cluster.yaml.")] = Path("cluster.yaml"),
    dry_run: DryRun = False,
    expected_version: ExpectedVersion = None,
    admin_address: AdminAddress = DEFAULT_ADMIN_ADDRESS,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: AsJson = False,
) -> None:
    """Have the running cluster do what a cluster.yaml says."""
    with outcome():
        from controller.config_file import ConfigFile

        given = ConfigFile(file)
        text = given.read()
        given.parse(text)  # mistakes are told here, with exit code 3
        name = str(file.absolute())
        with connect_admin(admin_address, api_key, tls_ca, tls_cert, tls_key) as client:
            _change(
                client,
                lambda: client.apply(text, filename=name, expected_version=expected_version or 0, dry_run=dry_run),
                is_dry_run=dry_run,
                as_json=as_json,
            )


def rebalance(
    split: Annotated[str, typer.Argument(metavar="P:D", help="Workers for prefill and for decode, such as 3:1.")],
    dry_run: DryRun = False,
    expected_version: ExpectedVersion = None,
    admin_address: AdminAddress = DEFAULT_ADMIN_ADDRESS,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: AsJson = False,
) -> None:
    """Set how many workers each role has; those that change their role go on serving."""
    try:
        prefill, decode = parse_split(split)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with outcome(), connect_admin(admin_address, api_key, tls_ca, tls_cert, tls_key) as client:
        _change(
            client,
            lambda: client.set_roles(prefill, decode, expected_version=expected_version or 0, dry_run=dry_run),
            is_dry_run=dry_run,
            as_json=as_json,
        )


def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Its id, as `baton status` shows it.")],
    dry_run: DryRun = False,
    expected_version: ExpectedVersion = None,
    admin_address: AdminAddress = DEFAULT_ADMIN_ADDRESS,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: AsJson = False,
) -> None:
    """Take a worker out: it gets nothing new, and ends when nothing is left on it."""
    with outcome(), connect_admin(admin_address, api_key, tls_ca, tls_cert, tls_key) as client:
        _change(
            client,
            lambda: client.drain(worker, expected_version=expected_version or 0, dry_run=dry_run),
            is_dry_run=dry_run,
            as_json=as_json,
        )


def parse_split(text: str) -> tuple[int, int]:
    """From `3:1`, workers for prefill and for decode; raises ValueError that says the form."""
    numbers = text.split(":")
    if len(numbers) != 2 or not all(n.isascii() and n.isdigit() and len(n) < 6 for n in numbers):
        raise ValueError(f"{text!r} is not a split; write PREFILL:DECODE in workers, such as 3:1")
    return int(numbers[0]), int(numbers[1])


def _change(client: AdminClient, ask: Callable[[], ChangeResponse], *, is_dry_run: bool, as_json: bool) -> None:
    """Raises BatonError when it is refused, or when a step fails."""
    from cluster.pb.admin_pb2 import ClusterEvent

    answer = ask()
    # Progress goes to stderr where stdout is for a program.
    out = sys.stderr if as_json else sys.stdout
    _print_plan(answer, out, is_dry_run)
    failed = ""
    for event in client.follow(answer):
        if event.kind in (ClusterEvent.KIND_STEP, ClusterEvent.KIND_STEP_DONE, ClusterEvent.KIND_CHANGED):
            print(event.text, file=out, flush=True)
        failed = event.text if event.kind == ClusterEvent.KIND_FAILED else ""
    if as_json:
        print(json.dumps(_described(answer, failed, is_dry_run), indent=2, ensure_ascii=False))
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


def _described(answer: ChangeResponse, failed: str, is_dry_run: bool) -> dict[str, Any]:
    return {
        "version": answer.version,
        "is_change": answer.is_change,
        "is_dry_run": is_dry_run,
        "changes": list(answer.plan.changes),
        "steps": list(answer.plan.steps),
        "failed": failed or None,
    }
