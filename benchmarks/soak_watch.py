"""What the processes of a served cluster hold: memory, descriptors and threads of each, and what must be nothing when
nothing runs.

A process has the name that the controller gives it (a rank above 0 its number too); one below it, such as those that
follow grammars, counts as `NAME children`; Ray's daemons have names of their own. Processes of one name are summed up.
Does nothing to any of them.
"""

from __future__ import annotations

import contextlib
import re
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.served_cluster import ServedCluster
from benchmarks.soak_faults import Target
from benchmarks.soak_record import Processes
from cluster.errors import BatonError
from cluster.pb import admin_pb2, worker_pb2
from controller.local_ray import FOLDER_PREFIX
from tools.client import AdminClient, BatonClient

CALL_S = 5.0
END_S = 10.0
MIB = 2**20
QUANTITIES = ("pss_mib", "rss_mib", "descriptors", "threads")
SHARED_MEMORY = Path("/dev/shm")
_ROLES = {worker_pb2.ROLE_PREFILL: "prefill", worker_pb2.ROLE_DECODE: "decode"}
_RAY = (
    ("ray::HostedController", "controller"),
    ("gcs_server", "ray gcs_server"),
    ("raylet", "ray raylet"),
    ("ray::IDLE", "ray idle"),
)
"""What a command line begins with or its program is called, and the name that it gets; others of Ray are its agents."""


class Watch:
    """Looks at one cluster; `logs`: the folder of its log files."""

    def __init__(self, cluster: ServedCluster, logs: Path) -> None:
        self._cluster, self._logs = cluster, logs
        self._root = psutil.Process(cluster.pid)
        self._names: dict[int, str] = {}
        self.last: tuple[Target, ...] = ()
        """As the newest sample found them; none: the controller did not answer."""
        self._shared_memory_before = _entries(SHARED_MEMORY)
        self.seen: dict[int, psutil.Process] = {}
        """Every process of the cluster that was ever sampled, by its number."""

    def targets(self) -> tuple[Target, ...]:
        """The processes that the controller knows now, and the controller itself; none while it does not answer."""
        try:
            with AdminClient(self._cluster.admin_address, call_s=CALL_S) as admin:
                processes = admin.cluster().processes
        except BatonError:
            return ()
        found = [
            Target(p.name, _ROLES.get(p.role, "router"), tuple(p.pids), p.address, p.state == "ready")
            for p in processes
        ]
        for process in self._tree():
            if _command(process).startswith("ray::HostedController"):
                found.append(Target("controller", "controller", (process.pid,), "", True))
        self._names = {
            pid: target.name if rank == 0 else f"{target.name}/{rank}"
            for target in found
            for rank, pid in enumerate(target.pids)
        }
        return tuple(found)

    def sample(self, *, with_series: bool) -> Processes:
        """What each process holds, and in sum, where all that the controller knows are ready; `with_series`: and how
        many series its metrics page has."""
        self.last = self.targets()
        found: Processes = {}
        names: dict[int, str] = {}
        for process in self._tree():
            with contextlib.suppress(psutil.Error, OSError):
                names[process.pid] = name = self._name(process, names)
                self.seen[process.pid] = process
                held = found.setdefault(name, dict.fromkeys(QUANTITIES, 0.0))
                for quantity, value in _held(process).items():
                    held[quantity] = round(held[quantity] + value, 2)
        if self.last and all(target.is_ready for target in self.last):
            found["total"] = {q: round(sum(held[q] for held in found.values()), 2) for q in QUANTITIES}
        for name, number in self._num_series().items() if with_series else ():
            found.setdefault(name, {})["series"] = number
        found["files"] = self._files()
        return found

    def held(self) -> str:
        """What is not at rest, or nothing: to be asked when no request runs."""
        try:
            with BatonClient(self._cluster.address, call_s=CALL_S) as client:
                status = client.status()
        except BatonError as error:
            return f"the router: {error}"
        router = status.router
        if router.num_running or router.num_queued:
            return f"the router runs {router.num_running} requests and queues {router.num_queued}"
        return next(filter(None, map(_held_by, status.workers)), "")

    def shared_memory_left(self) -> list[str]:
        """Files in /dev/shm that have come since the beginning and that no process has open or mapped."""
        new = _entries(SHARED_MEMORY) - self._shared_memory_before
        return sorted(new - _in_use()) if new else []

    def still_running(self) -> list[str]:
        """Processes of the cluster that have outlived it."""
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=END_S)
        return [f"{self._names.get(process.pid, 'process')} {process.pid}" for process in alive]

    def _num_series(self) -> dict[str, int]:
        """Of each process that has a page and answers."""
        try:
            with BatonClient(self._cluster.address, call_s=CALL_S) as client:
                status = client.status()
        except BatonError:
            return {}
        pages = {worker.worker_id: worker.info.metrics_address for worker in status.workers}
        pages[next((t.name for t in self.last if t.kind == "router"), "router")] = status.router.metrics_address
        found = {}
        for name, address in pages.items():
            with contextlib.suppress(OSError):
                found[name] = len(_page(address))
        return found

    def _tree(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return []

    def _name(self, process: psutil.Process, names: dict[int, str]) -> str:
        """`names`: of those above it, which come before it."""
        if process.pid in self._names:
            return self._names[process.pid]
        if process.pid == self._root.pid:
            return "serve"
        above = names.get(process.ppid(), "")
        if above in self._names.values() or above.endswith(" children"):
            return f"{above.removesuffix(' children')} children"
        command = _command(process)
        return next((name for begin, name in _RAY if begin in command.split(" ")[0]), _name_of_helper(command))

    def _files(self) -> dict[str, float]:
        """MiB of log files, of the routers' open journals and of Ray's folder."""
        routers = [pid for target in self.last if target.kind == "router" for pid in target.pids]
        journals = {path for pid in routers for path in _open_files(pid) if path.name.startswith("journal-")}
        sizes = {"logs_mib": _size(self._logs) / MIB, "state_mib": sum(map(_size, journals)) / MIB}
        for line in map(_command, self._tree()):
            if folder := re.search(rf"[^\s=]*/{FOLDER_PREFIX}\w+", line):
                sizes["ray_mib"] = _size(Path(folder[0])) / MIB
                break
        return {name: round(size, 3) for name, size in sizes.items()}


def _held(process: psutil.Process) -> dict[str, float]:
    with process.oneshot():
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8")
        pss = int(re.search(r"^Pss: +(\d+) kB", rollup, re.M)[1]) / 1024  # type: ignore[index]
        values = (pss, process.memory_info().rss / MIB, process.num_fds(), process.num_threads())
    return dict(zip(QUANTITIES, values, strict=True))


def _held_by(worker: admin_pb2.WorkerStatus) -> str:
    """By its own page, which is of this moment; the router's numbers of it are those of its last report."""
    if worker.state != admin_pb2.WorkerStatus.STATE_READY:
        return f"{worker.worker_id} is not ready"
    try:
        page = _page(worker.info.metrics_address)
    except OSError as error:
        return f"{worker.worker_id}: {error}"
    stats = worker.stats
    blocks = {labels["state"]: value for name, labels, value in page if name == "baton_kv_blocks"}
    away = [f"{name} {labels}: {value:g}" for name, labels, value in page if value and _must_be_nothing(name, labels)]
    if stats.num_requests or stats.num_running_seqs or stats.num_waiting_requests:
        away.append(f"{stats.num_requests} requests")
    if blocks["free"] + blocks["cached"] != stats.blocks_total:
        away.append(f"blocks {blocks} of {stats.blocks_total}")
    return f"{worker.worker_id}: {', '.join(away)}" if away else ""


def _must_be_nothing(name: str, labels: dict[str, str]) -> bool:
    match name:
        case "baton_kv_blocks":
            return labels["state"] == "held"
        case "baton_kv_slots":
            return labels["state"] != "free"
        case "baton_kv_pairs":
            return labels["state"] in ("suspect", "closing")
        case "baton_kv_handoffs" | "baton_kv_quarantined_bytes":
            return True
    return False


def _page(address: str) -> list[tuple[str, dict[str, str], float]]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=CALL_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return [(s.name, dict(s.labels), s.value) for family in families for s in family.samples]


def _name_of_helper(command: str) -> str:
    """Of a command line that is none of the known ones."""
    words = [Path(word).name for word in command.split(" ") if "/" in word and "=" not in word]
    if command.startswith("ray::"):
        return f"ray {command.removeprefix('ray::').split(' ')[0].split('.')[0]}"
    script = next((word for word in words if word.endswith(".py")), "")
    if script == "reaper.py":
        return "reaper"
    return f"ray {script.removesuffix('.py')}" if script else f"ray {words[0] if words else command[:20]}"


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _open_files(pid: int) -> list[Path]:
    try:
        return [Path(file.path) for file in psutil.Process(pid).open_files()]
    except psutil.Error:
        return []


def _size(path: Path) -> int:
    """Of a file, or all files below a folder."""
    total = 0
    for file in [path, *path.rglob("*")]:
        with contextlib.suppress(OSError):
            total += file.lstat().st_size if file.is_file() and not file.is_symlink() else 0
    return total


def _entries(folder: Path) -> set[str]:
    return {str(path) for path in folder.iterdir()}


def _in_use() -> set[str]:
    """Files in /dev/shm that any process has open or mapped."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found |= {line.split()[-1] for line in _mapped(process / "maps")}
            found |= {str(link.readlink()) for link in (process / "fd").iterdir() if link.is_symlink()}
    return found


def _mapped(maps: Path) -> Iterable[str]:
    return (line for line in maps.read_text(encoding="utf-8").splitlines() if str(SHARED_MEMORY) in line)
