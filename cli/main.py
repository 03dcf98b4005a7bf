"""The `baton` program: its list of commands. Exit codes are those of `cluster.program.ExitCode`.

Loads no gRPC, Ray or torch by itself: a command's file is loaded when the command is named, and imports what it needs
when it runs. To add a command, write its file, which defines a function of the command's name, or `app` where it has
commands of its own; and add its name to COMMANDS.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cli.common import INTERRUPTED, with_option_groups

COMMANDS = (
    *("serve", "stop", "generate", "chat", "status", "top", "targets", "apply", "rebalance", "drain", "flush"),
    *("cache", "sessions", "doctor", "bench", "plan", "profile", "simulate", "config", "keys"),
)
"""In the order of `baton --help`."""
_FILES = {"stop": "serve", "apply": "change", "rebalance": "change", "drain": "change", "flush": "change"}
"""The files of commands that share one with another command; each other command has the file of its name."""


class LoadedCommands(Mapping[str, Any]):
    """The commands by name; each is loaded when it is looked up first."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        return _load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


@cache
def _load(name: str) -> Any:
    module = importlib.import_module(f"cli.{_FILES.get(name, name)}")
    if hasattr(module, "app"):
        command: Any = typer.main.get_group(module.app)
    else:
        one = typer.Typer(add_completion=False, rich_markup_mode=None)
        one.command(name)(with_option_groups(getattr(module, name)))
        command = typer.main.get_command(one)
    command.name = name
    return command


class CommandGroup(TyperGroup):
    """`baton` itself."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        commands: Any = LoadedCommands()
        self.commands = commands


app = typer.Typer(
    name="baton",
    cls=CommandGroup,
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


def main() -> None:
    """The entry point of the `baton` script."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
