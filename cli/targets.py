"""`baton targets`: the addresses of the pages of metrics, for Prometheus's file-based service discovery.

The JSON is Prometheus's own: a list of `{"targets": [HOST:PORT], "labels": {...}}`. A file is
written whole or not at all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.common import AdminOptions, connect, outcome
from cluster.address import address_here, parse_address
from cluster.errors import BatonError
from cluster.program import replace_text

if TYPE_CHECKING:
    from cluster.pb.admin_pb2 import GetStatusResponse
    from tools.client import AdminClient

_LOOK_S = 60.0
"""With --follow, the longest time between two writes."""


def targets(
    controller: AdminOptions,
    file: Annotated[
        Path | None, typer.Option("--file", help="Write them there, for `file_sd_configs`; default: print them.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until Ctrl-C, and write the file again whenever workers change.")
    ] = False,
) -> None:
    """List the pages of metrics for Prometheus."""
    if follow and file is None:
        raise typer.BadParameter("--follow writes a file; name it with --file")
    with outcome():

        def find(admin: AdminClient) -> list[dict[str, Any]]:
            cluster = admin.cluster()
            found = group(cluster.metrics_address, "controller")
            for process in cluster.processes:
                if process.name.partition("-")[0] == "router" and process.state == "ready":
                    host, port = parse_address(process.address)
                    with connect(address_here(host, port), controller) as client:
                        found += [each for each in groups_of(client.status(), process.name) if each not in found]
            return found

        with controller.connect() as admin:
            _write(find(admin), file)
            while follow:
                for _ in admin.events(timeout_s=_LOOK_S):
                    _write(find(admin), file)
                _write(find(admin), file)


def groups_of(status: GetStatusResponse, router: str = "router") -> list[dict[str, Any]]:
    """The pages that one router knows: its own and its workers'."""
    found = group(status.router.metrics_address, router)
    for worker in status.workers:
        found += group(worker.info.metrics_address, worker.worker_id or worker.info.worker_id)
    return found


def group(address: str, process: str) -> list[dict[str, Any]]:
    """Empty for a process without a page."""
    return [{"targets": [address], "labels": {"process": process}}] if address else []


def _write(groups: list[dict[str, Any]], file: Path | None) -> None:
    text = json.dumps(groups, indent=2) + "\n"
    if file is None:
        print(text, end="", flush=True)
        return
    try:
        replace_text(file, text, 0o644)
    except OSError as error:
        raise BatonError(f"{file} cannot be written: {error.strerror}") from error
