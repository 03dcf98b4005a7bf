"""`baton serve` runs a cluster in the foreground, until Ctrl-C. With --detach it returns when the cluster serves, which
then runs on in a Ray cluster that was there before; `baton stop` ends it.

Owns the order (check the ports and the model, start Ray, start the controller, show its events, end everything) and
what the operator sees, or does not: a closed pipe ends nothing. The controller decides what runs where.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.common import lasting_console, outcome
from cli.config import check_model, default_config
from cluster.address import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS, format_address, listen_error, parse_address
from cluster.errors import BatonError, ConfigError, IncompatibleProtocol, InvalidRequest, NotReachable
from cluster.program import ExitCode, Signals

if TYPE_CHECKING:
    from rich.status import Status

    from cluster.config.schema import ServingConfig
    from controller.config_file import ConfigFile
    from controller.events import ProgressBatch, ProgressEvent

_POLL_S = 0.2
_END_S = 30.0
_STOP_S = 120.0
"""A router lets running requests end for `rebalance.drain_timeout_s`, whose default is half of this."""
_LAST_PORT = 65_535


RayAddress = Annotated[
    str | None,
    typer.Option(
        "--address",
        "--ray-address",
        help="Use a running Ray cluster (`auto` or HOST:PORT) instead of starting a private one.",
    ),
]


def serve(
    config: Annotated[
        Path | None, typer.Option("--config", help="The cluster.yaml; default: ./cluster.yaml, else Baton's own.")
    ] = None,
    model: Annotated[Path | None, typer.Option("--model", help="Serve this Hugging Face folder instead.")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="Jinja file in place of the model's templates.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="gRPC port; 0: any free one.", show_default=False)
    ] = None,
    admin_port: Annotated[
        int | None,
        typer.Option(
            "--admin-port", min=0, max=65535, help="Port of the AdminService; default with --port: the next one."
        ),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            "--http-port", min=0, max=65535, help="Port of the OpenAI API; default with --port: the one after next."
        ),
    ] = None,
    ray_address: RayAddress = None,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            help="Return when the cluster serves, and leave it to the Ray at --address; a cluster that serves there"
            " already gets the file's configuration.",
        ),
    ] = False,
) -> None:
    """Start a cluster and serve until Ctrl-C."""
    with outcome():
        if detach and ray_address is None:
            raise InvalidRequest("--detach leaves the cluster to a Ray that goes on; name it: --address auto --detach")
        here = Path("cluster.yaml")
        file = _file(config or (here if here.is_file() else None), model, port, admin_port, http_port)
        file = replace(file, chat_template=str(chat_template.absolute()) if chat_template else None)
        serving = file.load()
        if not detach:
            _check_ports(serving)
        check_model(serving, are_here=ray_address is None)
        _Session(replace(file, path=file.path.absolute()), serving, ray_address, detach).run()


def stop(
    ray_address: Annotated[
        str, typer.Option("--address", "--ray-address", help="The Ray cluster it serves in: `auto` or HOST:PORT.")
    ] = "auto",
) -> None:
    """End the cluster that `baton serve --detach` started; running requests end first."""
    with outcome():
        from controller import local_ray

        with local_ray.joined(ray_address):
            from controller.detached import end_abandoned, end_controller, find_controller
            from controller.ray_namespace import DETACHED

            controller = find_controller()
            if controller is not None:
                end_controller(controller, DETACHED, _STOP_S)
            elif not end_abandoned():
                raise NotReachable(f"nothing serves detached in the Ray cluster at {ray_address}")
        print("stopped")


def _file(
    path: Path | None, model: Path | None, port: int | None, admin_port: int | None, http_port: int | None
) -> ConfigFile:
    from controller.config_file import ConfigFile

    if port is not None:
        admin_port, http_port = (
            given if given is not None else port + step if 0 < port <= _LAST_PORT - step else 0
            for given, step in ((admin_port, 1), (http_port, 2))
        )
    model_path = None if model is None else str(model.absolute())
    return ConfigFile(path or default_config(), model_path, port, admin_port, http_port, is_own=path is not None)


def _check_ports(serving: ServingConfig) -> None:
    _check_port("--port", serving.router.host, serving.router.port)
    if serving.router.http_port is not None:
        _check_port("--http-port", serving.router.host, serving.router.http_port)
    _check_port("--admin-port", serving.admin.host, serving.admin.port)


def _check_port(option: str, host: str, port: int) -> None:
    """Refuses a port that is taken before Ray and the weights are loaded; the server's own bind decides."""
    error = listen_error(host, port)
    if error is not None:
        raise BatonError(
            f"cannot listen on {format_address(host, port)}: {error.strerror}; stop what uses port {port} "
            f"(another `baton serve`?), or choose another: baton serve {option} {min(port + 10, _LAST_PORT)}"
        ) from error


class _Session:
    """One run, from the start of Ray to the end of the last process."""

    def __init__(
        self, file: ConfigFile, serving: ServingConfig, ray_address: str | None, is_detached: bool = False
    ) -> None:
        self._file = file
        self._serving = serving
        self._ray_address = ray_address
        self._is_detached = is_detached
        self._view = _View(serving, file, f"baton stop --address {ray_address}" if is_detached else "Ctrl-C")
        self._signals = Signals(self._on_signal)
        self._stop_asked = threading.Event()
        self._folder: Path | None = None
        self._has_ended = False

    def run(self) -> None:
        with self._signals, self._view:
            self._view.progress(
                "starting Ray" if self._ray_address is None else f"joining the Ray at {self._ray_address}"
            )
            with self._ray():
                self._signals.take_over()
                if not self._stop_asked.is_set():
                    self._serve()
        if self._has_ended:
            self._view.done()

    @contextlib.contextmanager
    def _ray(self) -> Iterator[None]:
        from controller import local_ray

        if self._ray_address is None:
            with local_ray.started(num_cpus=os.cpu_count() or 1) as self._folder:
                yield
        else:
            with local_ray.joined(self._ray_address):
                yield

    def _serve(self) -> None:
        from controller.detached import end_controller, find_controller, leave_running
        from controller.ray_namespace import DETACHED, new_name

        name = DETACHED if self._is_detached else new_name()
        running = find_controller() if self._is_detached else None
        try:
            controller = running or self._start(name)
        except ValueError:
            # Ray raises it if another `baton serve --detach` has started a controller meanwhile.
            controller = running = find_controller()
        goes_on = running is not None
        try:
            (self._follow if running is None else self._join)(controller)
        except IncompatibleProtocol:
            goes_on = True
            leave_running(controller, name)  # it manages nothing
            if running is None:
                raise
            self._serve()  # this build may understand what runs
        finally:
            if not (goes_on or (self._is_detached and self._view.is_serving)):
                self._has_ended = True
                self._view.stopping()
                end_controller(controller, name, _END_S)

    def _start(self, name: str) -> Any:
        from controller.detached import has_abandoned, start_controller
        from controller.launchers import num_gpus
        from controller.plan import plan_cluster
        from controller.reconciler import Programs

        if self._is_detached and not has_abandoned():
            _check_ports(self._serving)
        num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
        plan = plan_cluster(
            self._serving,
            num_gpus=num_gpus(),
            num_cores=num_cores if self._ray_address is None else None,
            may_grow=self._is_detached,
        )
        return start_controller(self._serving, plan, Programs(), self._file, name)

    def _join(self, controller: Any) -> None:
        """Waits until the cluster that runs already serves, and applies the file to it."""
        import ray
        from ray.exceptions import RayError

        try:
            batch: ProgressBatch = ray.get(controller.progress.remote())
            if not any(event.kind == "serving" for event in batch.events):
                self._follow(controller)
            if self._stop_asked.is_set():
                return
            self._view.progress(f"applying {self._file.path}")
            done, failed = ray.get(controller.apply.remote(self._file.read(), str(self._file.path)))
        except RayError as error:
            raise self._died() from error
        for line in done if done or failed else ["nothing differs from what runs"]:
            self._view.print(line)
        if failed:
            raise BatonError(failed)

    def _follow(self, controller: Any) -> None:
        """Shows the controller's progress until a signal, or, with --detach, until the cluster serves; raises when it
        cannot come up. A controller that dies is started again by Ray, and goes on with the numbers of its events."""
        import ray
        from ray.exceptions import RayError

        from controller.detached import is_given_up

        coming, last = controller.run.remote(), 0
        while not (self._stop_asked.is_set() or (self._is_detached and self._view.is_serving)):
            if not ray.wait([coming], timeout=_POLL_S)[0]:
                continue
            try:
                news: ProgressBatch | None = ray.get(coming)
            except RayError as error:
                if is_given_up(controller):
                    raise self._died() from error
                news = None
                time.sleep(_POLL_S)
            for event in news.events if news is not None else ():
                if event.kind == "refused" and self._is_detached:
                    raise IncompatibleProtocol(event.text)
                self._view.show(event)
                if event.kind == "failed":
                    raise (ConfigError if event.is_mistake else BatonError)(f"{event.who}: {event.text}")
            last = news.last if news is not None else last
            coming = controller.progress.remote(last)

    def _died(self) -> BatonError:
        return BatonError(f"Ray has given up the controller{'' if self._is_detached else ', and the cluster with it'}")

    def _on_signal(self) -> None:
        """The first signal asks for a clean end; the second kills everything at once."""
        if not self._stop_asked.is_set():
            self._stop_asked.set()
            return
        from controller import local_ray

        local_ray.kill_descendants()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(ExitCode.FAILED)


class _View:
    """Output for the operator: a line that changes at a terminal, a line for each event elsewhere; then the banner."""

    def __init__(self, serving: ServingConfig, file: ConfigFile, stop: str) -> None:
        self._serving = serving
        self._file = file
        self._stop = stop
        self._console = lasting_console()
        self._status: Status | None = self._console.status("") if self._console.is_terminal else None
        self._began = time.monotonic()
        self.is_serving = False
        self._admin_address = ""
        self._http_address = ""

    def __enter__(self) -> None:
        if self._status is not None:
            self._status.start()

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def progress(self, text: str) -> None:
        """Shows what is going on; at a terminal the next event replaces it."""
        if self._status is not None:
            self._status.update(text)
        else:
            self._console.print(text)

    def print(self, line: str) -> None:
        """Prints a line that stays on the screen."""
        self._console.print(line)

    def show(self, event: ProgressEvent) -> None:
        match event.kind:
            case "refused":
                self._console.print(event.text)
            case "progress" if self.is_serving:
                self._console.print(f"{event.who}: {event.text}")
            case "progress":
                self.progress(f"{event.who}: {event.text}")
            case "ready":
                self._console.print(f"{event.who} is ready")
            case "lost":
                self._console.print(f"{event.who} was lost ({event.text}); starting it again")
            case "change":
                self._console.print(event.text)
            case "admin":
                self._admin_address = event.text
            case "http":
                self._http_address = event.text
            case "serving" if not self.is_serving:
                self.is_serving = True
                self._banner(event.text)

    def stopping(self) -> None:
        """Begins with an empty line, since the terminal shows ^C."""
        if self._console.is_terminal:
            self._console.print()
        self._console.print("stopping (once more kills at once)")

    def done(self) -> None:
        self._console.print("stopped")

    def _banner(self, address: str) -> None:
        from cluster.config.load import describe_config

        _, port = parse_address(address)
        serving = replace(self._serving, router=replace(self._serving.router, port=port))
        if self._status is not None:
            self._status.stop()
        baton, option = _command(), _options(self._serving, address)
        admin = "" if self._admin_address == DEFAULT_ADMIN_ADDRESS else f" --admin-address {self._admin_address}"
        scheme = "http" if self._serving.tls.cert is None else "https"
        site = f"{scheme}://{self._http_address}/" if self._http_address else ""
        http = f"  OpenAI  {site}v1\n" if site else ""
        page = f", or {site}" if site else ""
        edit = f", or edit {os.path.relpath(self._file.path)}" if self._file.is_own else ""
        self._console.print(
            f"\nBaton is serving: {describe_config(serving)}\n\n"
            f"  gRPC    {address}\n"
            f"{http}"
            f'  try     {baton} generate{option} "ROMEO:"\n'
            f"  look    {baton} status{option}{page}\n"
            f"  change  {baton} rebalance{admin} P:D{edit}\n"
            f"  stop    {self._stop}\n\n"
            f"ready after {time.monotonic() - self._began:.1f} s\n"
        )


def _options(serving: ServingConfig, address: str) -> str:
    """The options that a client's command line needs for this cluster."""
    at = "" if address == DEFAULT_ADDRESS else f" --address {address}"
    tls = "" if serving.tls.cert is None else " --tls-ca FILE"
    shown = "" if serving.tls.client_ca is None else " --tls-cert FILE --tls-key FILE"
    return at + tls + shown + ("" if serving.auth.keys_file is None else " --api-key KEY")


def _command() -> str:
    """The command by which another terminal runs this program."""
    here = Path(sys.argv[0]).absolute()
    known = shutil.which("baton")
    if known is not None and Path(known).absolute() == here:
        return "baton"
    return os.path.relpath(here) if here.is_relative_to(Path.cwd()) else str(here)
