"""`baton sessions`: whose KV workers keep for a time, and its end.

The keys of the JSON documents are a contract for programs.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.change import ready_workers
from cli.common import AdminOptions, AsJson, outcome, table_console, with_option_groups
from cluster.errors import NotFound

if TYPE_CHECKING:
    from cluster.pb.admin_pb2 import ListSessionsResponse

_TIERS = ("device", "host", "disk")
_MOST_SESSIONS = 1000

Tenant = Annotated[
    str | None, typer.Option(metavar="NAME", show_default=False, help="Of this tenant only; '' is those without keys.")
]

app = typer.Typer(help="Show and end the sessions whose KV is kept.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def sessions() -> None:
    """Show and end the sessions whose KV is kept."""


@app.command("list")
@with_option_groups
def list_all(
    admin: AdminOptions,
    tenant: Tenant = None,
    limit: Annotated[int, typer.Option(min=1, max=_MOST_SESSIONS, metavar="N", help="Most of each worker.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the sessions that each worker keeps, those with the most time left first, and their blocks by tier."""
    with outcome(), admin.connect() as client:
        from cluster.pb.admin_pb2 import ListSessionsRequest

        by_worker: dict[str, Any] = {}
        for worker_id in ready_workers(client):
            request = ListSessionsRequest(worker_id=worker_id, tenant=tenant, num_sessions=limit)
            by_worker[worker_id] = client.on_worker("ListSessions", request)
        document = {worker_id: _describe(answer) for worker_id, answer in by_worker.items()}
        if as_json:
            print(json.dumps({"workers": document}, indent=2, ensure_ascii=False))
        else:
            _print_table(document, "" if tenant is None else f" of tenant {tenant!r}")


@app.command()
@with_option_groups
def end(
    admin: AdminOptions,
    session_id: Annotated[str, typer.Argument(metavar="SESSION", help="Its id, as `baton sessions list` shows it.")],
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Keep the KV of a session no longer than that of others; requests of it that run are not disturbed."""
    with outcome(), admin.connect() as client:
        from cluster.pb.admin_pb2 import EndSessionRequest

        ended = {
            worker_id: client.on_worker(
                "EndSession", EndSessionRequest(worker_id=worker_id, session_id=session_id, tenant=tenant)
            ).num_ended
            for worker_id in ready_workers(client)
        }
        if not any(ended.values()):
            whose = "" if tenant is None else f" of tenant {tenant!r}"
            raise NotFound(
                f"no worker keeps a session {session_id!r}{whose}; `baton sessions list` shows those there are"
            )
        if as_json:
            print(json.dumps({"ended": ended}, indent=2))
        else:
            print(f"ended on {', '.join(worker_id for worker_id, number in ended.items() if number)}")


def _describe(answer: ListSessionsResponse) -> dict[str, Any]:
    return {
        "has_share": answer.has_share,
        "total": answer.num_total,
        "sessions": [
            {
                "tenant": of.tenant,
                "session_id": of.session_id,
                "remaining_s": round(of.remaining_s, 1),
                "blocks": {tier.tier: tier.num_blocks for tier in of.tiers},
            }
            for of in answer.sessions
        ],
    }


def _print_table(document: dict[str, Any], whose: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console = table_console()
    if not any(of["total"] for of in document.values()):
        why = "engine.kv_session_share is 0, or there is no prefix cache"
        if not document:
            why = "no worker is ready"
        elif any(of["has_share"] for of in document.values()):
            why = "router.session_ttl_s must be above 0, and requests must name a session_id or ask to be kept"
        console.print(f"no session{whose} is kept" + ("" if whose else f": {why}"))
        return
    table = Table(box=SIMPLE_HEAD)
    for column in ("worker", "tenant", "session", *_TIERS, "seconds left"):
        table.add_column(column, justify="right" if column in (*_TIERS, "seconds left") else "left")
    for worker_id, of in document.items():
        for session in of["sessions"]:
            blocks = [str(session["blocks"].get(tier, "-")) for tier in _TIERS]
            name = session["tenant"] or "-", session["session_id"]
            table.add_row(worker_id, *name, *blocks, f"{session['remaining_s']:.0f}")
    console.print(table)
    for worker_id, of in document.items():
        more = "; --limit shows more" if len(of["sessions"]) < _MOST_SESSIONS else ""
        if of["total"] > len(of["sessions"]):
            console.print(f"{worker_id}: {len(of['sessions'])} of {of['total']} sessions{more}")
