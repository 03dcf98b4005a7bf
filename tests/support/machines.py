"""Machines of their own on this one: each has its network, processes, /tmp, /dev/shm, /run and home, and an sshd.

    operator ==== bridge ==== head, worker, ...        each ==== is a link that can be cut

The file system below is shared, so that what is installed here is installed there. The bridge is in the operator's
namespace: nothing of this exists in the network of this machine, and nobody there sees a process of this one, so that
`ray stop` ends what it should. A machine is one process and what it has started: it ends with this process, however
that ends, and all it had goes with it. Needs root and the tools of `missing`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
USER = "root"
HOME = "/home/baton"
STORE = "--object-store-memory=80000000"
"""Of `ray start`, on machines that share one's memory."""
UP_S = 300.0
"""That `ray up` may take."""
RUN_S = 60.0
_TOOLS = {
    "iproute2": ("ip",),
    "util-linux": ("unshare", "nsenter", "setpriv"),
    "openssh-server": ("sshd",),
    "openssh-client": ("ssh", "ssh-keygen"),
    "rsync": ("rsync",),
}
_NETWORK = "198.18.77"  # set aside for tests of network devices (RFC 2544); each set of machines has its own anyway
_SSHD = """\
Port 22
HostKey {home}/host_key
AuthorizedKeysFile {home}/.ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
PidFile none
MaxStartups 50
MaxSessions 50
Subsystem sftp internal-sftp
"""
_BEGIN = """\
set -e
exec 3<{root}
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777,size=1g tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /home
if ! [ -e {root} ]; then mkdir -p {root}; mount --no-canonicalize --bind /proc/self/fd/3 {root}; fi
exec 3<&-
mkdir -p /run/sshd {home}/.ssh
sed 's|^{user}:\\(.*\\):[^:]*:\\([^:]*\\)$|{user}:\\1:{home}:/bin/bash|' /etc/passwd > /home/passwd
mount --bind /home/passwd /etc/passwd
hostname {name}
ip link set lo up
echo up
sleep infinity &
wait $!
"""
"""bash goes on as the machine's first process, and reaps what loses its parent. A checkout below /tmp or /home is where
it was."""


def missing() -> str:
    """Why machines cannot be had here, or nothing."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [package for package, tools in _TOOLS.items() if any(shutil.which(tool) is None for tool in tools)]
    if absent:
        return f"needs {' and '.join(absent)} (`make test-deploy` installs them)"
    probe = subprocess.run(["unshare", *_SPACES, "ip", "link", "add", "br0", "type", "bridge"], capture_output=True)
    return f"a namespace with a bridge cannot be had here: {probe.stderr.decode().strip()}" if probe.returncode else ""


_SPACES = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc")


@dataclass
class Machine:
    """`host`: its address on the bridge."""

    name: str
    host: str
    process: subprocess.Popen[str]
    pid: int
    """Of its first process, as this machine sees it."""

    def run(self, command: str, *, timeout_s: float = RUN_S, check: bool = True) -> str:
        """Runs a line of shell on the machine; returns what it printed. Raises AssertionError when it fails."""
        try:
            done = subprocess.run(
                self.command(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired as error:
            told = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout
            raise AssertionError(f"{self.name}: {command}: not done in {timeout_s:g} s:\n{told}") from error
        assert not check or done.returncode == 0, f"{self.name}: {command}: exit {done.returncode}:\n{done.stdout}"
        return done.stdout

    def command(self, command: str) -> list[str]:
        """What runs a line of shell there, as a command of this machine."""
        inside = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--pid", "--uts", "--ipc"]
        variables = (f"{key}={value}" for key, value in environment().items())
        return [*inside, "env", "-i", *variables, "bash", "-c", f"cd {HOME}\n{command}"]

    def write(self, path: str, text: str) -> None:
        """A file there; a relative path starts at its home."""
        subprocess.run(self.command(f"cat > {shlex.quote(path)}"), input=text, text=True, check=True, timeout=RUN_S)

    def close(self) -> None:
        """Kills everything on it."""
        self.process.kill()
        self.process.communicate(timeout=RUN_S)


def environment() -> dict[str, str]:
    """Of a shell there."""
    path = f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {
        "PATH": path,
        "HOME": HOME,
        "USER": USER,
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "LC_ALL": "C.UTF-8",
        "TERM": "dumb",
        # Tests of a set of machines share few cores.
        "OMP_NUM_THREADS": "1",
    }


class Machines:
    """The operator's machine and the others, by name; they end with `stack`."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.operator = _start("operator", f"{_NETWORK}.1", stack)
        self.others: dict[str, Machine] = {}
        _run(["ip", "link", "add", "bridge", "type", "bridge"], self.operator)
        _run(["ip", "address", "add", f"{self.operator.host}/24", "dev", "bridge"], self.operator)
        _run(["ip", "link", "set", "bridge", "up"], self.operator)
        self.operator.run(f"ssh-keygen -q -t ed25519 -N '' -f {HOME}/.ssh/key")

    def __getitem__(self, name: str) -> Machine:
        return self.others[name]

    def start(self, name: str, host: str) -> None:
        """Adds a machine, or puts a new one in the place of one that was lost."""
        machine = _start(name, host, self._stack)
        _connect(machine, self.operator)
        _start_sshd(machine, self.operator.run(f"cat {HOME}/.ssh/key.pub"))
        self.operator.run(_ssh(machine, "true"))
        self.others[name] = machine

    def lose(self, name: str) -> None:
        """Ends the machine without a word to the others: first its link, then everything on it."""
        _run(["ip", "link", "delete", f"to-{name}"], self.operator)
        self.others[name].close()

    def cut(self, name: str) -> None:
        """The machine's link is down, until `heal`."""
        _run(["ip", "link", "set", f"to-{name}", "down"], self.operator)

    def heal(self, name: str) -> None:
        _run(["ip", "link", "set", f"to-{name}", "up"], self.operator)


@contextlib.contextmanager
def machines(*names: str) -> Iterator[Machines]:
    """An operator's machine, from which each of the named ones is reached by ssh without a password."""
    with contextlib.ExitStack() as stack:
        there = Machines(stack)
        for number, name in enumerate(names, start=10):
            there.start(name, f"{_NETWORK}.{number}")
        yield there


def put_on(config: dict[str, Any], there: Machines, **options: str) -> None:
    """Has a cluster.yaml of the provider `local` name these machines, `head` and the others as workers, and files where
    they are. `options`: more ones of `ray start`, of head and worker."""
    workers = [machine.host for name, machine in there.others.items() if name != "head"]
    config["provider"] |= {"head_ip": there["head"].host, "worker_ips": workers}
    config["auth"] = {"ssh_user": USER, "ssh_private_key": f"{HOME}/.ssh/key"}
    mounts = config["file_mounts"].items()
    config["file_mounts"] = {to: str(ROOT / file) if (ROOT / file).exists() else file for to, file in mounts}
    for name, more in options.items():
        commands = config[f"{name}_start_ray_commands"]
        config[f"{name}_start_ray_commands"] = [f"{c} {more}" if "ray start" in c else c for c in commands]


def _ssh(machine: Machine, command: str) -> str:
    options = (
        "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o ConnectTimeout=20 -o ConnectionAttempts=20"
    )
    return f"ssh -q {options} -i {HOME}/.ssh/key {USER}@{machine.host} {shlex.quote(command)}"


def _start(name: str, host: str, stack: contextlib.ExitStack) -> Machine:
    script = _BEGIN.format(home=HOME, user=USER, name=name, root=shlex.quote(str(ROOT)))
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", *_SPACES, "bash", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    stack.callback(process.stdout.close)
    told = process.stdout.readline()
    first = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    machine = Machine(name, host, process, int(first[0]) if first else 0)
    stack.callback(machine.close)
    assert told == "up\n", f"{name}: {told}{process.stdout.read()}"
    lines = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in environment().items())
    machine.write(".bashrc", lines)
    return machine


def _connect(machine: Machine, operator: Machine) -> None:
    """By a link to the operator's bridge."""
    ends = ["peer", "name", "eth0", "netns", str(machine.pid)]
    _run(["ip", "link", "add", f"to-{machine.name}", "type", "veth", *ends], operator)
    _run(["ip", "link", "set", f"to-{machine.name}", "master", "bridge", "up"], operator)
    _run(["ip", "address", "add", f"{machine.host}/24", "dev", "eth0"], machine)
    _run(["ip", "link", "set", "eth0", "up"], machine)
    # It leads nowhere; Ray takes the address that it leaves from for the machine's own.
    _run(["ip", "route", "add", "default", "via", operator.host], machine)


def _start_sshd(machine: Machine, public_key: str) -> None:
    machine.write(".ssh/authorized_keys", public_key)
    machine.write("sshd_config", _SSHD.format(home=HOME))
    machine.run(f"ssh-keygen -q -t ed25519 -N '' -f {HOME}/host_key && /usr/sbin/sshd -f {HOME}/sshd_config")


def _run(command: list[str], where: Machine) -> None:
    """In the machine's network, and this machine's processes: pids are those of here."""
    done = subprocess.run(["nsenter", f"--target={where.pid}", "--net", *command], capture_output=True, text=True)
    assert done.returncode == 0, f"{where.name}: {' '.join(command)}: {done.stderr}"
