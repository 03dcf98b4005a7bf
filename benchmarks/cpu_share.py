"""Gives each worker an equal part of a core, so that on a machine of few cores a worker is a device: what one leaves
idle is not another's. Linux control groups; needs the right to make one, which root has.

The quota is of a short period: a worker waits a few milliseconds at most for its next turn.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/cpu")
_V2 = Path("/sys/fs/cgroup")
_PERIOD_US = 10_000


class NoControlGroups(Exception):
    """Why parts of a core cannot be given here."""


@contextlib.contextmanager
def equal_shares(workers: Mapping[str, Sequence[int]], share: float) -> Iterator[None]:
    """While it lasts, the processes of each worker (their pids) have `share` of a core together.

    Raises NoControlGroups.
    """
    root = _V1 if (_V1 / "cpu.cfs_quota_us").exists() else _V2
    made: list[Path] = []
    try:
        for name, pids in workers.items():
            group = root / f"baton-{os.getpid()}-{pids[0]}-{name}"
            group.mkdir()
            made.append(group)
            _limit(group, share)
            for pid in pids:
                (group / "cgroup.procs").write_text(str(pid))
        yield
    except OSError as error:
        raise NoControlGroups(f"no part of a core can be given to a worker here: {error}") from error
    finally:
        for group in made:
            _remove(group, root)


def _limit(group: Path, share: float) -> None:
    quota_us = max(1000, round(share * _PERIOD_US))
    if (group / "cpu.cfs_quota_us").exists():
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    else:
        (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")


def _remove(group: Path, root: Path) -> None:
    """What still runs in it goes back to where it came from."""
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            (root / "cgroup.procs").write_text(pid)
    group.rmdir()
