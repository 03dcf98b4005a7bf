"""`baton keys`: makes, shows and revokes API keys. A key is shown once, when it is made; the file holds its hash."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.common import AsJson, outcome

if TYPE_CHECKING:
    from cluster.api_keys import ApiKey


class ScopeName(StrEnum):
    """What a key may do."""

    generate = "generate"
    admin = "admin"


app = typer.Typer(help="Make, show and revoke API keys.", no_args_is_help=True)

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
        from tools.key_store import edited_keys

        secret = new_key()
        quota = KeyQuota(requests_per_min, prompt_tokens_per_min, output_tokens_per_min, max_concurrent)
        asked = {each.value for each in scope}
        scopes = tuple(each for each in SCOPES if each in asked)
        with edited_keys(file, may_be_new=True) as found:
            name = new_id(key.id for key in found)
            found.append(ApiKey(name, digest_of(secret), tenant, scopes, weight, quota, note))
        if as_json:
            import json

            print(json.dumps({"id": name, "key": secret, "tenant": tenant, "scopes": scopes}))
        else:
            import sys

            print(secret)
            print(f"made {name}; {file} holds its hash, and nobody can show the key again", file=sys.stderr)


@app.command("list")
def list_keys(file: KeysFile = DEFAULT_FILE, as_json: AsJson = False) -> None:
    """Show the keys of the file."""
    with outcome():
        from cluster.api_keys import load_keys

        described = [_describe(key) for key in load_keys(file)]
        if as_json:
            import json

            print(json.dumps({"keys": described}, indent=2, ensure_ascii=False))
        else:
            _print_table(described)


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `baton keys list` shows it.")],
    file: KeysFile = DEFAULT_FILE,
) -> None:
    """Take a key out of the file: it opens nothing any more; what runs for it ends as it would."""
    with outcome():
        from cluster.errors import NotFound
        from tools.key_store import edited_keys

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
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, 160)
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
