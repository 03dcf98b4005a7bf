"""`baton keys`: makes, lists and revokes API keys. A key is printed once, when it is made; the file holds its hash."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.common import AsJson, outcome, table_console
from cluster.errors import ConfigError, NotFound
from cluster.program import replace_text

if TYPE_CHECKING:
    from cluster.api_keys import ApiKey


class ScopeName(StrEnum):
    """Permissions of a key."""

    generate = "generate"
    admin = "admin"


app = typer.Typer(help="Make, show and revoke API keys.", no_args_is_help=True, rich_markup_mode=None)

KeysFile = Annotated[Path, typer.Option("--file", metavar="FILE", help="The keys file; cluster.yaml names it.")]
DEFAULT_FILE = Path("keys.yaml")
PerMin = Annotated[int | None, typer.Option(min=1, metavar="N", show_default=False, help="Most of them in a minute.")]


@app.callback()
def keys() -> None:
    """Make, show and revoke API keys."""


@app.command()
def create(
    tenant: Annotated[str, typer.Option(help="Whose key it is; tenants share no prefix cache.")],
    scope: Annotated[list[ScopeName], typer.Option(help="What it may do; may be given several times.")],
    file: KeysFile = DEFAULT_FILE,
    weight: Annotated[float, typer.Option(help="The tenant's share beside others of weight 1.")] = 1.0,
    requests_per_min: PerMin = None,
    prompt_tokens_per_min: PerMin = None,
    output_tokens_per_min: PerMin = None,
    max_concurrent: Annotated[
        int | None, typer.Option(min=1, metavar="N", show_default=False, help="Most requests at one time.")
    ] = None,
    note: Annotated[str | None, typer.Option(help="What it is for, for people.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key, print it once, and add its hash to the file."""
    with outcome():
        from cluster.api_keys import SCOPES, ApiKey, KeyQuota, digest_of, new_id, new_key

        secret = new_key()
        quota = KeyQuota(requests_per_min, prompt_tokens_per_min, output_tokens_per_min, max_concurrent)
        wanted = {each.value for each in scope}
        scopes = tuple(each for each in SCOPES if each in wanted)
        with edited_keys(file, may_be_new=True) as found:
            name = new_id(key.id for key in found)
            found.append(ApiKey(name, digest_of(secret), tenant, scopes, weight, quota, note))
        if as_json:
            print(json.dumps({"id": name, "key": secret, "tenant": tenant, "scopes": scopes}))
        else:
            print(secret)
            print(f"made {name}; {file} holds its hash, and nobody can show the key again", file=sys.stderr)


@app.command("list")
def list_keys(file: KeysFile = DEFAULT_FILE, as_json: AsJson = False) -> None:
    """Show the keys of the file."""
    with outcome():
        from cluster.api_keys import load_keys

        described = [_describe(key) for key in load_keys(file)]
        if as_json:
            print(json.dumps({"keys": described}, indent=2, ensure_ascii=False))
        else:
            _print_table(described)


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `baton keys list` shows it.")],
    file: KeysFile = DEFAULT_FILE,
) -> None:
    """Remove a key from the file: new requests with it are refused, running ones end normally."""
    with outcome():
        with edited_keys(file) as found:
            left = [key for key in found if key.id != key_id]
            if len(left) == len(found):
                raise NotFound(f"{file} has no key {key_id!r}; `baton keys list --file {file}` shows those it has")
            found[:] = left
        print(f"revoked {key_id}")


def _describe(key: ApiKey) -> dict[str, Any]:
    """The document that `--json` prints for each key; never its hash."""
    return {
        "id": key.id,
        "tenant": key.tenant,
        "scopes": list(key.scopes),
        "weight": key.weight,
        "quota": dict(vars(key.quota)),
        "note": key.note,
    }


def _print_table(described: list[dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console = table_console()
    if not described:
        console.print("no keys")
        return
    table = Table(box=SIMPLE_HEAD)
    for column in ("id", "tenant", "scopes", "weight", "quota", "note"):
        table.add_column(column)
    for key in described:
        limits = ", ".join(f"{name} {limit}" for name, limit in key["quota"].items() if limit is not None)
        table.add_row(
            key["id"], key["tenant"], ", ".join(key["scopes"]), f"{key['weight']:g}", limits or "-", key["note"] or "-"
        )
    console.print(table)


@contextlib.contextmanager
def edited_keys(path: Path, *, may_be_new: bool = False) -> Iterator[list[ApiKey]]:
    """Yields the keys of a file as a list to change, and writes them back when the body ends without an error.

    The file is replaced whole or not at all, readable by its owner alone; another edit in the same folder waits. Raises
    ConfigError for a file that is wrong or cannot be written, and for keys that would make it wrong.
    """
    from cluster.api_keys import load_keys, parse_keys, render_keys

    path = path.resolve()
    with _locked(path.parent):
        keys = [] if may_be_new and not path.exists() else list(load_keys(path))
        yield keys
        text = render_keys(keys)
        parse_keys(text, str(path))
        _write(path, text)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot keep keys here: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, text: str) -> None:
    from cluster.api_keys import OWNER_ONLY

    try:
        replace_text(path, text, OWNER_ONLY)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
