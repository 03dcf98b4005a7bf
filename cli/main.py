"""The `baton` program: its list of commands. Exit codes are those of `cluster.program.ExitCode`.

Loads no gRPC, Ray or torch by itself: each command imports what it needs when it runs.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cli import bench, change, config, keys
from cli.chat import chat
from cli.common import INTERRUPTED, with_option_groups
from cli.doctor import doctor
from cli.generate import generate
from cli.serve import serve, stop
from cli.status import status
from cli.targets import targets
from cli.top import top

app = typer.Typer(
    name="baton",
    help="Serve large language models with prefill and decode on different devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"baton {version('baton')}")
        except PackageNotFoundError:
            print("baton (not installed)")
        raise typer.Exit


@app.callback()
def baton(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve large language models with prefill and decode on different devices."""


for command in (
    serve,
    stop,
    generate,
    chat,
    status,
    top,
    targets,
    change.apply,
    change.rebalance,
    change.drain,
    doctor,
):
    app.command()(with_option_groups(command))
app.add_typer(bench.app, name="bench")
app.add_typer(config.app, name="config")
app.add_typer(keys.app, name="keys")


def main() -> None:
    """The entry point of the `baton` script."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
