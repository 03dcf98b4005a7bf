"""A cluster as `baton serve` starts it, Ray and controller included, over a cluster.yaml of its own that may be edited.

What it prints is kept, and shown when it does not come up.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.plain_cluster import ROOT, START_S, ProgramFailed
from cluster.config.diff import set_values
from cluster.config.load import load_config

_STOP_S = 60.0
_BANNER = re.compile(r"gRPC +(\S+)\n[\s\S]*--admin-address (\S+)[\s\S]*ready after")


class ServedCluster:
    """`address` is the router's, `admin_address` the controller's, `file` the cluster.yaml that is watched."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.address = ""
        self.admin_address = ""
        self._said = ""
        self._came = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cli.main", "serve", "--config", str(file), "--port", "0"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @classmethod
    @contextlib.contextmanager
    def running(cls, config: Path, values: Mapping[str, Any]) -> Iterator[ServedCluster]:
        """Of a configuration, with these keys set anew in a copy. Raises ProgramFailed for a bad start."""
        model = load_config(config).model.path
        with tempfile.TemporaryDirectory(prefix="baton-served-") as folder:
            file = Path(folder) / "cluster.yaml"
            text = config.read_text(encoding="utf-8")
            file.write_text(set_values(text, {"model.path": model, **values}), encoding="utf-8")
            cluster = cls(file)
            try:
                cluster._await_banner()
                yield cluster
            finally:
                cluster._stop()

    def edit(self, values: Mapping[str, Any]) -> None:
        """Sets keys in the file."""
        self.write(set_values(self.file.read_text(encoding="utf-8"), values))

    def write(self, text: str) -> None:
        """As editors do: whole or not at all."""
        new = self.file.with_suffix(".new")
        new.write_text(text, encoding="utf-8")
        os.replace(new, self.file)

    def _await_banner(self) -> None:
        with self._came:
            self._came.wait_for(lambda: _BANNER.search(self._said) or not self._reader.is_alive(), START_S)
            found = _BANNER.search(self._said)
        if found is None:
            raise ProgramFailed(f"baton serve did not come up:\n{self._said}")
        self.address, self.admin_address = found.groups()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._came:
                self._said += line
                self._came.notify_all()

    def _stop(self) -> None:
        """Ctrl-C, and once more when that is not enough."""
        for _ in range(2):
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
                break
        else:
            self._process.kill()
        self._reader.join(_STOP_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
