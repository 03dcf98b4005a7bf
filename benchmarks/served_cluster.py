"""A cluster as `baton serve` starts it, Ray and controller included, over a cluster.yaml of its own that may be edited.

What it prints is kept, and shown when it does not come up.
"""

from __future__ import annotations

import contextlib
import ctypes
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
_HTTP = re.compile(r"OpenAI +http://(\S+)/v1\n")
_PR_SET_PDEATHSIG = 1


class ServedCluster:
    """`address` and `http_address` are the router's, `admin_address` the controller's, `file` the cluster.yaml that is
    watched, `pid` that of `baton serve`. It ends with this process, however that ends."""

    def __init__(self, file: Path, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: variables beside this process's own."""
        self.file = file
        self.address = ""
        self.http_address = ""
        self.admin_address = ""
        self._said = ""
        self._came = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cli.main", "serve", "--config", str(file), "--port", "0"],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @classmethod
    @contextlib.contextmanager
    def running(
        cls,
        config: Path,
        values: Mapping[str, Any],
        start_s: float = START_S,
        environment: Mapping[str, str] | None = None,
    ) -> Iterator[ServedCluster]:
        """Of a configuration, with these keys set anew in a copy. Raises ProgramFailed for a bad start;
        also for one of more than `start_s`."""
        model = load_config(config).model.path
        with tempfile.TemporaryDirectory(prefix="baton-served-") as folder:
            file = Path(folder) / "cluster.yaml"
            text = config.read_text(encoding="utf-8")
            file.write_text(set_values(text, {"model.path": model, **values}), encoding="utf-8")
            cluster = cls(file, environment)
            try:
                cluster._await_banner(start_s)
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

    def _await_banner(self, start_s: float) -> None:
        with self._came:
            self._came.wait_for(lambda: _BANNER.search(self._said) or not self._reader.is_alive(), start_s)
            found = _BANNER.search(self._said)
        if found is None:
            raise ProgramFailed(f"baton serve did not come up:\n{self._said}")
        self.address, self.admin_address = found.groups()
        http = _HTTP.search(self._said)
        self.http_address = http[1] if http else ""

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


def _end_with_parent() -> None:
    """Has the kernel send Ctrl-C to this process when the one that started it ends, if only by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
