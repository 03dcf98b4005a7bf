"""`baton top`: the cluster as one router sees it, redrawn until Ctrl-C; printed once where the output is no terminal.

Polls the router, again after it fails to answer; `cli.top_view` draws.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from cli.common import RouterOptions, outcome
from cluster.errors import DeadlineExceeded, Unavailable

if TYPE_CHECKING:
    from rich.console import Console

    from cli.top_view import Seen
    from tools.client import BatonClient

_LEAST_S = 0.2


def top(
    router: RouterOptions,
    once: Annotated[
        bool, typer.Option("--once", help="Print it once and end, as where the output is no terminal.")
    ] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=_LEAST_S, max=3600, help="Time between two polls.")
    ] = 1.0,
) -> None:
    """Watch the workers, the queue, latencies and the last requests."""
    with outcome(), router.connect() as client:
        from rich.console import Console

        from cli.top_view import Seen, render

        console, seen = Console(highlight=False, markup=False, emoji=False), Seen()
        poll(client, seen)  # a router that cannot be reached is an error here, and a line on the screen later
        if console.is_terminal and not once:
            _watch(console, client, seen, interval)
            return
        if not console.is_terminal:
            console.width = max(console.width, 120)
        console.print(render(seen, console))


def poll(client: BatonClient, seen: Seen) -> None:
    """Raises BatonError."""
    status = client.status()
    seen.note(status, client.activity(seen.since()))


def _watch(console: Console, client: BatonClient, seen: Seen, interval_s: float) -> None:
    """Draws until Ctrl-C on the terminal's alternate screen, which leaves what was there before as it was."""
    from rich.live import Live

    from cli.top_view import render

    try:
        with Live(render(seen, console), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                try:
                    poll(client, seen)
                except (Unavailable, DeadlineExceeded) as error:
                    seen.problem = error.message
                live.update(render(seen, console), refresh=True)
    except KeyboardInterrupt:
        return
