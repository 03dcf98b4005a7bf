"""What the subcommands share: how an error becomes a line on stderr and an exit code, and how they reach the router.

Light to import: gRPC is loaded by `connect` only, so that `baton --help` and a wrong flag answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.address import parse_address
from cluster.errors import BatonError, CheckpointError, ConfigError, InvalidRequest, NotReachable, Unauthenticated
from cluster.program import ExitCode

if TYPE_CHECKING:
    from cluster.tls import ClientTls
    from tools.client import AdminClient, BatonClient

INTERRUPTED = 130
"""What shells report for a program ended by Ctrl-C."""


def checked_address(text: str) -> str:
    """Of an option."""
    try:
        parse_address(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return text


Address = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT", envvar="BATON_ADDRESS", callback=checked_address, help="The router's gRPC address."
    ),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        envvar="BATON_API_KEY",
        show_envvar=True,
        show_default=False,
        help="API key, where the cluster wants one; better in the environment, where `ps` does not show it.",
    ),
]
TlsCa = Annotated[
    str | None,
    typer.Option(
        "--tls-ca",
        metavar="FILE",
        envvar="BATON_TLS_CA",
        show_default=False,
        help="Use TLS, with a server whose certificate is of these authorities (PEM).",
    ),
]
TlsCert = Annotated[
    str | None,
    typer.Option(
        "--tls-cert",
        metavar="FILE",
        envvar="BATON_TLS_CERT",
        show_default=False,
        help="Certificate to show, where the cluster wants one.",
    ),
]
TlsKey = Annotated[
    str | None,
    typer.Option("--tls-key", metavar="FILE", envvar="BATON_TLS_KEY", show_default=False, help="Its private key."),
]
DEFAULT_ADDRESS = "127.0.0.1:50051"
AdminAddress = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        envvar="BATON_ADMIN_ADDRESS",
        callback=checked_address,
        help="The AdminService's address, as `baton serve` tells it.",
    ),
]
DEFAULT_ADMIN_ADDRESS = "127.0.0.1:50052"
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@contextmanager
def outcome() -> Iterator[None]:
    """Around a subcommand's work: errors become one line on stderr and the exit code, Ctrl-C a quiet 130."""
    try:
        yield
        sys.stdout.flush()
    except BatonError as error:
        print_error(error)
        raise typer.Exit(exit_code(error)) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(INTERRUPTED) from error
    except BrokenPipeError as error:
        # The reader has gone (`| head`); what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(ExitCode.FAILED) from error


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


def connect(
    address: str,
    api_key: str | None = None,
    tls_ca: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
) -> BatonClient:
    """gRPC's own log lines are silenced: what they say arrives as an error."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from tools.client import BatonClient

    return BatonClient(address, api_key=api_key, tls=client_tls(tls_ca, tls_cert, tls_key))


def connect_admin(
    address: str, api_key: str | None, tls_ca: str | None, tls_cert: str | None, tls_key: str | None
) -> AdminClient:
    """The same, to the controller."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from tools.client import AdminClient

    return AdminClient(address, api_key=api_key, tls=client_tls(tls_ca, tls_cert, tls_key))


def client_tls(tls_ca: str | None, tls_cert: str | None, tls_key: str | None) -> ClientTls | None:
    """None: without TLS. Raises InvalidRequest for a certificate to show where TLS is not asked for."""
    from cluster.tls import ClientTls

    if tls_ca is None and (tls_cert or tls_key):
        raise InvalidRequest("--tls-cert and --tls-key are for TLS: name the server's authority, too, with --tls-ca")
    return None if tls_ca is None else ClientTls(tls_ca, tls_cert, tls_key)
