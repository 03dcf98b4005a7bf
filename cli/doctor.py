"""`baton doctor`: what is wrong with this machine, its configuration and the running cluster, and what to do about it.

Runs the checks of `tools.doctor` and prints their results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.common import AsJson, Credentials, checked_address, outcome, table_console
from cli.config import default_config

if TYPE_CHECKING:
    from tools.doctor.check import CheckResult

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red", "skipped": "dim"}


def _configured(variable: str, what: str) -> Any:
    """Option for an address whose default is in the configuration."""
    return typer.Option(
        metavar="HOST:PORT",
        envvar=variable,
        callback=lambda text: None if text is None else checked_address(text),
        show_default=False,
        help=f"{what}; default: as configured.",
    )


def doctor(
    credentials: Credentials,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Default: ./cluster.yaml, else Baton's own."),
    ] = None,
    address: Annotated[str | None, _configured("BATON_ADDRESS", "The router's gRPC address")] = None,
    admin_address: Annotated[str | None, _configured("BATON_ADMIN_ADDRESS", "The AdminService's address")] = None,
    limit: Annotated[float, typer.Option(min=0.1, metavar="S", help="Seconds that one check may take.")] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Check this machine, its configuration and the running cluster, and say what to do. Exits 0 without a problem."""
    with outcome():
        from tools.doctor.catalogue import CHECKS
        from tools.doctor.check import as_document, examine, exit_code
        from tools.doctor.subject import DoctorOptions

        options = DoctorOptions(
            path=file or default_config(),
            is_file_named=file is not None,
            address=address,
            admin_address=admin_address,
            api_key=credentials.api_key,
            tls=credentials.tls,
            limit_s=limit,
        )
        with _spinner():
            results = examine(options, CHECKS)
        if as_json:
            print(json.dumps(as_document(options, results), indent=2, ensure_ascii=False))
        else:
            _show(results)
        code = exit_code(results)
    if code:
        raise typer.Exit(code)


@contextmanager
def _spinner() -> Iterator[None]:
    """Shows on stderr, where that is a terminal, that checks are running."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("checking") if console.is_terminal else nullcontext():
        yield


def _show(results: Sequence[CheckResult]) -> None:
    """A table for each half, a row for each finding, and its remedy below what was found."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from cluster.text import count_of
    from tools.doctor.check import Half, Result

    console = table_console()
    for half in Half:
        table = Table(box=SIMPLE_HEAD, title=half.value, title_justify="left", title_style="bold")
        for column in ("check", "result", "found, and what to do"):
            table.add_column(column, overflow="fold")
        for each in (r for r in results if r.check.half is half):
            for number, finding in enumerate(each.findings):
                style = _STYLES[finding.result.value]
                text = Text(finding.found, style="dim" if finding.result is Result.SKIPPED else "")
                if finding.remedy:
                    text.append(f"\n→ {finding.remedy}", style="italic")
                name = "" if number else each.check.name
                table.add_row(name, Text(finding.result.value, style=style), text)
        console.print(table)
    num = {result: sum(f.result is result for r in results for f in r.findings) for result in Result}
    console.print(
        f"{count_of(num[Result.PROBLEM], 'problem')}, {count_of(num[Result.WARNING], 'warning')}, "
        f"{num[Result.OK]} ok, {num[Result.SKIPPED]} skipped"
    )
