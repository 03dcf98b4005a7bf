"""A private Ray for one `baton serve` on one machine: its environment, its folder, its processes, and their end.

Invariant: what `started` starts lives in one folder and below one process, and goes with it, however that ends: Ray
asks the kernel to end its daemons with the process that started them (so call it on the main thread), Baton's actors do
the same, and `controller.reaper` ends the rest. Should that be killed too, the next start removes the folder: an owner
holds a lock on its folder while it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from cluster.address import parse_address
from cluster.errors import BatonError
from controller.reaper import reaping

FOLDER_PREFIX = "baton-ray-"
_LOCK = "owner.lock"
_MAX_BASE_LENGTH = 32
"""Ray's sockets lie some 70 characters deeper, and a socket's path may have 107 in all."""
OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""The smallest store that Ray accepts is a little below; Baton keeps no objects in it."""

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # The controller says which worker died; Ray's own paragraph about it is left out.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
}
LOCAL = {
    # One machine, so everything of Ray's listens on loopback; the name is Ray's.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    # No idle Python workers are kept in advance: each would hold 50 MB.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # What Ray would remember of calls, and of actors and processes that have ended: nobody asks it here, and a cluster
    # that runs for long, or is often mended, would grow by them.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_maximum_gcs_destroyed_actor_cached_count": "100",
    "RAY_maximum_gcs_dead_worker_cached_count": "100",
}


_CONNECT_S = 5.0
_START_ERRORS = (OSError, RuntimeError, ValueError)


class RayFailed(BatonError):
    """Ray did not start, or could not be joined."""

    reason = "RAY_FAILED"


@contextlib.contextmanager
def started(*, num_cpus: int) -> Iterator[Path]:
    """Starts Ray, gives the folder it keeps its files in, and ends it, with what it has set in the environment; raises
    RayFailed."""
    remove_abandoned_folders()
    before = dict(os.environ)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=base_folder()))
    with (folder / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            _prepare_environment(folder)
            others = descendants()
            _start(folder, num_cpus)
            daemons = [pid for pid in descendants() if pid not in others]
            with reaping(folder, daemons) if sys.platform == "linux" else contextlib.nullcontext():
                try:
                    yield folder
                finally:
                    _stop()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.environ.clear()
            os.environ.update(before)


@contextlib.contextmanager
def joined(address: str) -> Iterator[None]:
    """Joins a Ray cluster that runs already, and leaves it running. `address`: HOST:PORT, or `auto` for the one
    that `ray start` or `ray up` has left on this machine; raises RayFailed."""
    _set_defaults(QUIET)
    address = _address_of_what_runs() if address == "auto" else address
    _check_answers(address)
    import ray

    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (*_START_ERRORS, SystemExit) as error:
        # Ray ends the program where nothing speaks its protocol there.
        why = "it is something else" if isinstance(error, SystemExit) else error
        raise RayFailed(f"cannot join the Ray cluster at {address}: {why}") from error
    try:
        yield
    finally:
        _stop()


def _address_of_what_runs() -> str:
    """Ray's own `auto` also takes up the private Ray of some `baton serve`, whose token shuts it out for minutes."""
    named = os.environ.get("RAY_ADDRESS")
    if named:
        return named
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    try:
        return (folder / "ray" / "ray_current_cluster").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise RayFailed(
            "no Ray cluster runs on this machine (that of a `baton serve` without --detach is its own); start one with "
            "`ray up`, or name one with --address HOST:PORT"
        ) from error


def _check_answers(address: str) -> None:
    """Ray itself tries for minutes."""
    try:
        host, port = parse_address(address)
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except ValueError as error:
        raise RayFailed(f"--address: {error}, or `auto`") from error
    except OSError as error:
        raise RayFailed(
            f"no Ray cluster answers at {address}: {error.strerror or error}; start one with `ray up`"
        ) from error
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_CONNECT_S)
        except grpc.FutureTimeoutError as error:
            raise RayFailed(f"what answers at {address} is no Ray cluster; is that the port of `ray start`?") from error


def _start(folder: Path, num_cpus: int) -> None:
    import ray

    try:
        with _own_daemons():
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(folder),
            )
    except BaseException as error:
        ray.shutdown()
        if isinstance(error, _START_ERRORS):
            raise RayFailed(f"Ray did not start on this machine: {error}") from error
        raise


@contextlib.contextmanager
def _own_daemons() -> Iterator[None]:
    """Has Ray leave out the three processes that one machine without its dashboard has no use for: the autoscaler's
    monitor, the reader of logs for drivers that print them, and the reporter of usage. `ray.init` has no switch for
    them (a Ray that calls their starts otherwise starts them), and waits for the last one. Those that it starts are no
    part of this program's process group: a signal to all of that, as `timeout` sends one, would end them before the
    workers on them, and Ray would look for them for a minute."""
    from ray._private import node, services

    class Daemon(services.ConsolePopen):
        def __init__(self, *arguments: Any, **how: Any) -> None:
            super().__init__(*arguments, process_group=0, **how)

    class Node(node.Node):
        def start_monitor(self) -> None:
            pass

        def start_log_monitor(self) -> None:
            pass

        def start_api_server(self, **how: Any) -> None:
            pass

    theirs = node.Node, services.ConsolePopen
    node.Node, services.ConsolePopen = Node, Daemon  # type: ignore[misc]
    try:
        yield
    finally:
        node.Node, services.ConsolePopen = theirs  # type: ignore[misc]


def _stop() -> None:
    import ray

    ray.shutdown()


def _prepare_environment(folder: Path) -> None:
    """Set before Ray is imported, which reads some of it at once. The token shuts out other users of this machine."""
    if "ray" in sys.modules:
        raise RayFailed("Ray was imported before its environment was set; start a private Ray once in a process, first")
    _set_defaults(QUIET | LOCAL)
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    os.environ.pop("RAY_ADDRESS", None)


def _set_defaults(values: dict[str, str]) -> None:
    for name, value in values.items():
        os.environ.setdefault(name, value)


def base_folder() -> Path:
    """The folder of those folders: as short a path as possible."""
    usual = Path(tempfile.gettempdir())
    return usual if len(str(usual)) <= _MAX_BASE_LENGTH else Path("/tmp")


def remove_abandoned_folders() -> None:
    """Folders whose owner was killed; one that belongs to somebody else, or is in use, stays."""
    for folder in base_folder().glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError), (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def descendants() -> list[int]:
    """Every process below this one, however deep. Linux; empty elsewhere."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            after_name = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(after_name[1]), []).append(int(stat.parent.name))
    found = list(children.get(os.getpid(), []))
    for pid in found:
        found.extend(children.get(pid, []))
    return found


def kill_descendants() -> None:
    """Kills every process below this one at once; for a second Ctrl-C."""
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
