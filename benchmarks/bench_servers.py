"""The servers that `bench_agrees` measures, while they are needed: Baton without Ray, and `transformers serve`."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2
import psutil

from benchmarks.plain_cluster import START_S, Program, ProgramFailed, running_workers, wait_until_serving
from cluster.config.load import load_config
from controller.plan import plan_cluster

_LOOK_EVERY_S = 0.2
_BEHIND = 10
"""Of nice."""


@dataclass(frozen=True)
class Server:
    """`address`: HOST:PORT; `base_url` is the path of an OpenAI API there, or None for Baton's gRPC."""

    name: str
    address: str
    base_url: str | None
    model: str
    tokenizer: Path | None = None
    """It takes text only."""
    ignores_eos: bool = True
    """It knows the field `ignore_eos`."""

    def url(self, address: str) -> str:
        """What a client is told, of a relay there."""
        return address if self.base_url is None else f"http://{address}{self.base_url}"


def put_behind() -> None:
    """Gives every process that this one has started so far a lower priority than those that it starts from now on,
    thread by thread: who measures gets the processor at once, as on a machine of its own."""
    nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + _BEHIND)
    for process in psutil.Process().children(recursive=True):
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, thread.id, nice)


@contextlib.contextmanager
def stopping(program: Program) -> Iterator[Program]:
    """Ends it, however that comes."""
    try:
        yield program
    finally:
        program.stop()


@contextlib.contextmanager
def baton(config_file: Path, model: Path) -> Iterator[tuple[Server, Server]]:
    """Baton over gRPC and over HTTP. Raises ConfigError, ProgramFailed."""
    config = load_config(config_file)
    config = replace(
        config,
        model=replace(config.model, path=str(model.resolve()), name=None),
        router=replace(config.router, port=0, http_port=0),
    )
    plan = plan_cluster(config, num_gpus=0, num_cores=len(os.sched_getaffinity(0)))
    with (
        running_workers(plan.workers) as flags,
        stopping(Program("router", replace(plan.router, workers=flags))) as router,
    ):
        card = router.expect("ready")
        wait_until_serving(card["address"])
        name = model.resolve().name
        yield (
            Server("Baton, gRPC", card["address"], None, name),
            Server("Baton, HTTP", card["http_address"], "/v1", name),
        )


@contextlib.contextmanager
def transformers_serve(program: Path, model: Path) -> Iterator[Server]:
    """On a free port. Raises ProgramFailed for a bad start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [program, "serve", model.resolve(), "--device", "cpu", "--dtype", "float32", "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                [*words, "--host", "127.0.0.1"], stdout=log, stderr=log, env=os.environ | {"HF_HUB_OFFLINE": "1"}
            )
        except OSError as error:
            raise ProgramFailed(f"{program}: {error.strerror}; `make bench-peer` installs it") from error
        try:
            if not _comes_up(process, f"http://127.0.0.1:{port}/health"):
                log.seek(0)
                raise ProgramFailed(f"{program} did not come up:\n{log.read().decode(errors='replace')}")
            yield Server(
                "transformers serve", f"127.0.0.1:{port}", "/v1", str(model.resolve()), model, ignores_eos=False
            )
        finally:
            process.terminate()
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _comes_up(process: subprocess.Popen[bytes], url: str) -> bool:
    """Whether it answers before it ends, and in time."""
    until = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(url).status_code == 200:
                return True
        time.sleep(_LOOK_EVERY_S)
    return False
