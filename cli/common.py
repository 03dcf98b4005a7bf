"""The parts that commands share: their common options, clients of a cluster, and errors as a line on stderr and an exit
code.

Light to import: `connect` loads gRPC and `table_console` loads rich, so `baton --help` and a wrong flag answer at once.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import IO, TYPE_CHECKING, Annotated, Any, cast, get_type_hints

import typer

from cluster.address import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS, parse_address
from cluster.errors import BatonError, CheckpointError, ConfigError, InvalidRequest, NotReachable, Unauthenticated
from cluster.program import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.tls import ClientTls
    from tools.client import AdminClient, BatonClient

INTERRUPTED = 130
"""The exit code that shells report for a program ended by Ctrl-C."""


def checked_address(text: str) -> str:
    """Callback of an option."""
    try:
        parse_address(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return text


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@dataclass(frozen=True)
class Credentials:
    """Options of every command that calls a server: its API key and its TLS files."""

    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="BATON_API_KEY",
            show_envvar=True,
            show_default=False,
            help="API key, where the cluster wants one; better in the environment, where `ps` does not show it.",
        ),
    ] = None
    tls_ca: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            envvar="BATON_TLS_CA",
            show_default=False,
            help="Use TLS, with a server whose certificate is signed by these authorities (PEM).",
        ),
    ] = None
    tls_cert: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            envvar="BATON_TLS_CERT",
            show_default=False,
            help="The client's certificate, where the cluster wants one.",
        ),
    ] = None
    tls_key: Annotated[
        str | None,
        typer.Option(metavar="FILE", envvar="BATON_TLS_KEY", show_default=False, help="Its private key."),
    ] = None

    @property
    def tls(self) -> ClientTls | None:
        """None: without TLS. Raises InvalidRequest for a client certificate without an authority of the server."""
        from cluster.tls import ClientTls

        if self.tls_ca is None and (self.tls_cert or self.tls_key):
            raise InvalidRequest(
                "--tls-cert and --tls-key are for TLS: name the server's authority, too, with --tls-ca"
            )
        return None if self.tls_ca is None else ClientTls(self.tls_ca, self.tls_cert, self.tls_key)


@dataclass(frozen=True)
class RouterOptions(Credentials):
    """Options of a command that calls a router."""

    address: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", envvar="BATON_ADDRESS", callback=checked_address, help="The router's gRPC address."
        ),
    ] = DEFAULT_ADDRESS

    def connect(self) -> BatonClient:
        return connect(self.address, self)


@dataclass(frozen=True)
class AdminOptions(Credentials):
    """Options of a command that calls the controller."""

    admin_address: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            envvar="BATON_ADMIN_ADDRESS",
            callback=checked_address,
            help="The AdminService's address, as `baton serve` prints it.",
        ),
    ] = DEFAULT_ADMIN_ADDRESS

    def connect(self) -> AdminClient:
        silence_grpc()
        from tools.client import AdminClient

        return AdminClient(self.admin_address, api_key=self.api_key, tls=self.tls)


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Lets a command take dataclasses of options: each of their fields becomes an option of the command.

    Typer has no such groups; it reads the signature, so the decorated command has the one with all the options.
    """
    groups: dict[str, type] = {}
    options: list[inspect.Parameter] = []
    grouped: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group = parameter.annotation
        if not (isinstance(group, type) and is_dataclass(group)):
            options.append(parameter)
            continue
        groups[parameter.name] = group
        hints = get_type_hints(group, include_extras=True)
        grouped += [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
            for f in fields(group)
        ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    keyword_only = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in (*options, *grouped)]
    run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    return run


@contextmanager
def outcome() -> Iterator[None]:
    """Runs a command's work: errors become one line on stderr and the exit code, Ctrl-C exits with 130."""
    try:
        yield
        sys.stdout.flush()
    except BatonError as error:
        print_error(error)
        raise typer.Exit(exit_code(error)) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(INTERRUPTED) from error
    except BrokenPipeError as error:
        _print_to_nothing(sys.stdout)
        raise typer.Exit(ExitCode.FAILED) from error


def _print_to_nothing(file: IO[str]) -> None:
    """Its reader has gone (`| head`): what is still buffered, and all that follows, goes nowhere."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, file.fileno())
    os.close(nothing)


def exit_code(error: BatonError) -> int:
    match error:
        case ConfigError() | CheckpointError():
            return ExitCode.BAD_CONFIG
        case NotReachable():
            return ExitCode.NOT_REACHABLE
        case InvalidRequest():
            return ExitCode.USAGE
        case _:
            return ExitCode.FAILED


def print_error(error: BatonError) -> None:
    lines = [f"{v.field}: {v.description}" for v in error.violations] or [error.message]
    if isinstance(error, NotReachable):
        lines.append("start a cluster with `baton serve`, or name another with --address or --admin-address")
        lines.append("one with TLS needs --tls-ca")
    if isinstance(error, Unauthenticated):
        lines.append("name one with --api-key or BATON_API_KEY")
    if error.retry_after_s is not None:
        lines.append(f"try again in {error.retry_after_s:g} s")
    print("error: " + "\n       ".join(lines), file=sys.stderr)


def connect(address: str, credentials: Credentials) -> BatonClient:
    """A client of a router."""
    silence_grpc()
    from tools.client import BatonClient

    return BatonClient(address, api_key=credentials.api_key, tls=credentials.tls)


def silence_grpc() -> None:
    """Turns gRPC's own log off, before it is loaded: what it says arrives as an error."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def table_console(min_width: int = 160) -> Console:
    """A console on stdout for tables, wide enough where it is no terminal."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, min_width)
    return console


class _LastingStdout:
    """Standard output as it is, but that what cannot be written is dropped, and raises nothing."""

    def __init__(self, stdout: IO[str]) -> None:
        self._stdout = stdout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)

    def write(self, text: str) -> int:
        with self._dropping():
            self._stdout.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            self._stdout.flush()

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Where the disk is full, the next line may find room again; a pipe stays closed."""
        with suppress(OSError):
            try:
                yield
            except BrokenPipeError:
                _print_to_nothing(self._stdout)


def lasting_console() -> Console:
    """A console on stdout for a command that owns processes: that nobody reads it any more ends nothing."""
    from rich.console import Console

    file = None if sys.stdout is None else cast(IO[str], _LastingStdout(sys.stdout))
    return Console(file=file, highlight=False, markup=False, emoji=False, soft_wrap=True)
