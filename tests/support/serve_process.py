"""One `baton serve` as an operator starts it: its process, what it printed, and its end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from controller.local_ray import FOLDER_PREFIX

ROOT = Path(__file__).resolve().parents[2]
END_S = 40.0


class Serve:
    """One `baton serve` process and what it printed."""

    def __init__(
        self,
        *arguments: str,
        program: Sequence[str] = (sys.executable, "-m", "cli.main"),
        cwd: Path = ROOT,
    ) -> None:
        command = [*program, "serve", *arguments]
        self.process = subprocess.Popen(
            command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.output = ""
        self._grew = threading.Condition()
        self._is_leaving = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def until(self, pattern: str, since: int = 0) -> re.Match[str]:
        with self._grew:
            while (found := re.compile(pattern).search(self.output, since)) is None:
                assert self._reader.is_alive(), f"ended without {pattern!r}:\n{self.output}"
                assert self._grew.wait(90), f"no {pattern!r} for 90 s in:\n{self.output}"
        return found

    def hang_up(self, cause_a_line: Callable[[], object]) -> None:
        """Closes the pipe of its output behind the next line."""
        self._is_leaving = True
        cause_a_line()
        self._reader.join(END_S)
        assert self.process.stdout is not None and self.process.stdout.closed, "no line came"

    @property
    def address(self) -> str:
        return self.until(r"gRPC +(\S+)\n[\s\S]*ready after").group(1)

    @property
    def admin_address(self) -> str:
        return self.until(r"--admin-address (\S+)").group(1)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def ray_folder(self) -> Path:
        """Where its Ray keeps its files, as one of Ray's daemons was told."""
        told = " ".join(word for process in self.descendants() for word in process.cmdline())
        found = re.search(rf"[^\s=]*/{FOLDER_PREFIX}\w+", told)
        assert found is not None, told
        return Path(found[0])

    def press_ctrl_c(self) -> int:
        """Its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(END_S)
        self._reader.join(END_S)
        return code

    def close(self) -> None:
        """However a test ended, nothing of its cluster lives on."""
        if self.process.poll() is None:
            left = self.descendants()
            self.process.kill()
            psutil.wait_procs(left, timeout=END_S)
        self.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._grew:
                self.output += line
                self._grew.notify_all()
            if self._is_leaving:
                self.process.stdout.close()
                break
        with self._grew:
            self._grew.notify_all()
