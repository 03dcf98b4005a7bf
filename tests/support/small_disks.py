"""Small disks that only some processes see: tmpfs in a mount namespace of their own, to be filled and freed from here.

A process that is given `namespace` enters it (`nursery`); `path` is where a file of it is found from here, and from
inside as well. The namespace ends with the process that holds it, which ends with this one. Needs root.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Self

_FILLER = "filler"
_PART = bytes(4096)


def missing() -> str:
    """Why small disks cannot be had here, or nothing."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [tool for tool in ("unshare", "setpriv", "mount") if shutil.which(tool) is None]
    if absent:
        return f"needs {' and '.join(absent)}"
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/mnt"]
    probe = subprocess.run(command, capture_output=True, text=True)
    return f"nothing can be mounted in a namespace here: {probe.stderr.strip()}" if probe.returncode else ""


class SmallDisks:
    """Use it as a context manager."""

    def __init__(self, sizes: Mapping[Path, int]) -> None:
        """A disk of so many bytes on each of these folders, which are there."""
        mounts = [f"mount -t tmpfs -o size={size} tmpfs {shlex.quote(str(folder))}" for folder, size in sizes.items()]
        self._script = " && ".join([*mounts, "echo up && exec sleep infinity"])

    def __enter__(self) -> Self:
        self._holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "bash", "-c", self._script],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "up\n"
        self.namespace = f"/proc/{self._holder.pid}/ns/mnt"
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.kill()
        self._holder.communicate()

    def path(self, path: Path) -> Path:
        """Of an absolute one on a disk."""
        return Path(f"/proc/{self._holder.pid}/root", *path.parts[1:])

    def fill(self, folder: Path) -> None:
        """Until no byte is left there."""
        file = os.open(self.path(folder) / _FILLER, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            while True:
                os.write(file, _PART)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        finally:
            os.close(file)

    def free(self, folder: Path) -> None:
        (self.path(folder) / _FILLER).unlink()
