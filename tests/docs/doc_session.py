"""A newcomer's folder, in which the blocks of a page are run as they stand: a checkout with a virtual environment and a
cluster that serves.

Changed are only the addresses and ports of the pages, since another cluster may have those here, and the placeholders
below. Commands that would never end do: `baton serve` (without --detach) and `make serve ARGS=...` are started for
real, stopped with Ctrl-C once they serve, and have to end well. A plain `make serve` shows what the cluster printed
that is up already, which was started by the very command that the Makefile has for it. Of any other target of make it
is only looked at that make has it; of `ray up` and `ray down`, that Ray has the options, and that the file is there.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from doc_pages import ROOT, Block
from serve_process import Serve

from cluster.api_keys import new_key

RUN = {"sh", "python", "yaml"}
"""What is run, or read by what it is for."""
NOT_RUN = {
    ("docs/operate.md", "baton stop --address auto"): "on the head of a cluster of `ray up`: make test-deploy",
    (
        "docs/operate.md",
        "baton targets --follow --file deploy/prometheus/targets.json",
    ): "never ends: make test-prometheus",
}
"""Blocks that are not run, by page and first command, and the reason. As few as possible."""
PLACEHOLDERS = {
    r"\bKEY\b": '"$(printed "baton-[A-Za-z0-9_-]{40,}")"',
    r"\bkey-5f1c0a9e\b": '"$(printed "key-[0-9a-f]{8}")"',
    r"\bDIR\b": "models/tiny-shakespeare",
    r"\bHOST:PORT\b": '"$BATON_ADDRESS"',
    r"\bHEAD_IP\b": "127.0.0.1",
    r"\bWORKER_IP\.\.\.": "127.0.0.2 127.0.0.3",
}
"""In commands; `printed` is what an earlier command of the page has printed. A key is there from the start."""
BLOCK_S = 300.0
_BATON = f"""#!{sys.executable}
import sys
sys.path.insert(0, {str(ROOT)!r})
from cli.main import main
main()
"""
_PREAMBLE = """
printed() { grep -oE -e "$1" "$PRINTED" | tail -1 | grep . || { echo "nothing printed looks like $1" >&2; exit 1; }; }
baton() {
  if [[ "${1-}" == serve && " $* " != *" --detach "* ]]
  then "$PYTHON" "$SERVED_ONCE" "$@"
  else command .venv/bin/baton "$@"
  fi
}
.venv/bin/baton() { baton "$@"; }
curl() { command curl --fail-with-body --no-progress-meter "$@"; }
make() {
  local does; does=$(command make -n "$@" | tail -1)
  case "$*" in
    serve) cat "$SERVED" ;;
    *serve*) eval "$does" ;;
  esac
}
ray() {
  [[ "$1" == up || "$1" == down ]] || { command ray "$@"; return; }
  local known word; known=$("$PYTHON" -m ray.scripts.scripts "$1" --help)
  for word in "${@:2}"; do
    case "$word" in
      -*) grep -qE -e "(^|[ ,])$word([ ,]|$)" <<< "$known" || { echo "ray $1 has no $word" >&2; return 2; } ;;
      *) test -f "$word" || { echo "ray $1: no such file: $word" >&2; return 2; } ;;
    esac
  done
}
"""


def first_command(block: Block) -> tuple[str, str]:
    """By which NOT_RUN knows a block."""
    return block.page, block.text.splitlines()[0].partition(" #")[0].strip()


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.out}\n{self.err}"


def free_ports(count: int) -> int:
    """The first of as many that follow one another."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
        try:
            for number in range(port, port + count):
                socket.create_server(("127.0.0.1", number)).close()
        except (OSError, OverflowError):
            continue
        return int(port)


def make_checkout(folder: Path) -> Path:
    """A folder that looks like a fresh clone after `make setup`; cluster.yaml is its own, the rest links."""
    folder.mkdir(parents=True)
    for path in ROOT.iterdir():
        if path.name != "cluster.yaml" and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    shutil.copy(ROOT / "cluster.yaml", folder)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    (programs / "baton").write_text(_BATON, encoding="utf-8")
    (programs / "baton").chmod(0o755)
    (folder / ".venv" / ".ready").touch()
    return folder


def environment() -> dict[str, str]:
    """This one's, but for what a `make` that runs the tests would tell one that they run."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}


def would_make(folder: Path, *words: str) -> str:
    """What `make` would run in a checkout."""
    told = subprocess.run(
        ["make", "-n", *words], cwd=folder, env=environment(), capture_output=True, text=True, check=True
    )
    return told.stdout


def command_of_make_serve(folder: Path, arguments: str) -> list[str]:
    """What the Makefile runs, without the path of its `baton`."""
    told = would_make(folder, "serve", f"ARGS={arguments}")
    program, *words = told.splitlines()[-1].split()
    assert program == ".venv/bin/baton", told
    return words


class Newcomer:
    """Runs blocks in a checkout beside a cluster that serves; both end with `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = make_checkout(folder)
        self._printed = folder / "printed.txt"
        self._served = folder / "served.txt"
        words = command_of_make_serve(self.folder, "--port 0")
        self.cluster = self.serve(*words[1:])
        try:
            self.address = self.cluster.address
            self.http_address = self.cluster.until(r"OpenAI +http://(\S+)/v1").group(1)
            self.admin_address = self.cluster.admin_address
        except BaseException:
            self.cluster.close()
            raise
        self._served.write_text(self.cluster.output, encoding="utf-8")
        second = free_ports(3)
        self._here = {
            "127.0.0.1:50051": self.address,
            "127.0.0.1:50052": self.admin_address,
            "127.0.0.1:8000": self.http_address,
            **{str(50061 + number): str(second + number) for number in range(3)},
        }

    def close(self) -> None:
        self.cluster.close()

    def serve(self, *arguments: str) -> Serve:
        return Serve(*arguments, program=(str(self.folder / ".venv" / "bin" / "baton"),), cwd=self.folder)

    def run_shell(self, blocks: list[Block]) -> list[Ran]:
        """Each of the blocks of one page in turn; raises AssertionError at the first that fails."""
        self._printed.write_text(new_key(), encoding="utf-8")
        ran = []
        for block in blocks:
            text = re.sub("|".join(PLACEHOLDERS), self._filled_in, self._moved(block.text))
            ran.append(self.run(text))
            assert ran[-1].code == 0, f"{block}: {ran[-1]}"
        return ran

    def run(self, commands: str) -> Ran:
        begins = self._printed.stat().st_size
        command = ["bash", "-euo", "pipefail", "-c", _PREAMBLE + commands]
        code, err = self._run(command, self._printed)
        return Ran(code, self._printed.read_bytes()[begins:].decode(), err)

    def run_python(self, blocks: list[Block]) -> Ran:
        """The blocks of one page in one program, each at the lines that it has in the page."""
        text = ""
        for block in blocks:
            text += "\n" * (block.line - 1 - text.count("\n")) + self._moved(block.text)
        program = self.folder / f"{Path(blocks[0].page).name}.py"
        program.write_text(text, encoding="utf-8")
        output = self.folder / "python.txt"
        output.unlink(missing_ok=True)
        code, err = self._run([sys.executable, str(program)], output)
        return Ran(code, output.read_text(encoding="utf-8"), err)

    def _run(self, command: list[str], output: Path) -> tuple[int, str]:
        """Appends what it prints to `output`; its exit code, and what it said on stderr."""
        with output.open("a", encoding="utf-8") as out:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                timeout=BLOCK_S,
            )
        return done.returncode, done.stderr

    def _environment(self) -> dict[str, str]:
        return {
            **environment(),
            "BATON_ADDRESS": self.address,
            "BATON_ADMIN_ADDRESS": self.admin_address,
            "PYTHONPATH": str(ROOT),
            "PYTHON": sys.executable,
            "SERVED_ONCE": str(Path(__file__).with_name("served_once.py")),
            "SERVED": str(self._served),
            "PRINTED": str(self._printed),
        }

    def _moved(self, text: str) -> str:
        for there, here in self._here.items():
            text = text.replace(there, here)
        return text

    @staticmethod
    def _filled_in(found: re.Match[str]) -> str:
        return next(value for pattern, value in PLACEHOLDERS.items() if re.fullmatch(pattern, found[0]))
