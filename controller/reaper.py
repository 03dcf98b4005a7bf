"""A small process that outlives a killed `baton serve` just long enough to clean up after it.

Run as a script, with a folder and process numbers as arguments; standard input is a pipe whose other end only the
owner holds. When that end closes, for whatever reason, the processes are killed and the folder is removed. Ray's
daemons end with their owner anyway, but its agents would linger for a minute. Standard library only, so that it starts
at once and holds a few megabytes. Linux.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def reaping(folder: Path, pids: list[int]) -> Iterator[None]:
    """Has `pids` and `folder` removed when the block ends, or this process does."""
    command = [sys.executable, "-I", "-S", __file__, str(folder), *map(str, pids)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as reaper:
        assert reaper.stdout is not None
        reaper.stdout.readline()
        yield


def main() -> None:
    """Processes are held by descriptors, so that a number used again meanwhile is never hit."""
    folder, *pids = sys.argv[1:]
    held = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            held.append(os.pidfd_open(int(pid)))
    print("ready", flush=True)
    sys.stdin.buffer.read()
    for descriptor in held:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
