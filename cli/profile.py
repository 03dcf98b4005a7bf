"""`baton profile`: measures the steps of a running cluster's workers into a file that plans and simulations read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.common import RouterOptions, outcome
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from simulate.worker_profile import ProfiledStep


def profile(
    router: RouterOptions,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where the profile goes, JSON.")] = Path("profile.json"),
    rounds: Annotated[
        int,
        typer.Option(
            min=1, max=100, help="How often each size is measured; up to four times as often while its median moves."
        ),
    ] = 5,
    steps: Annotated[int, typer.Option(min=4, max=1024, help="Decode steps of one measurement.")] = 32,
    pages_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Authority of the workers' metrics pages, where they have TLS.")
    ] = None,
) -> None:
    """Measure how long the workers' steps take, while nothing else runs, for `baton plan` and simulations."""
    with outcome():
        from cluster.text import count_of
        from cluster.tls import INTERNAL_NAME, ClientTls
        from simulate.curve_file import curve_in
        from tools.profiler import Profiler, ProfileSizes, errors_of

        tls = None if pages_ca is None else ClientTls(str(pages_ca), name=INTERNAL_NAME)
        with router.connect() as client:
            profiler = Profiler(client, ProfileSizes(num_steps=steps, rounds=rounds), tls)
            document = profiler.measure(_show)
        try:
            file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error
        print(f"{file}: {count_of(len(document['steps']), 'measurement')} of {document['worker']['model']}")
        print(errors_of(document))
        for note in curve_in(file, document).notes:
            print(f"note        {note}")


def _show(step: ProfiledStep) -> None:
    what = f"prompt of {step.prompt_tokens}" if step.prompt_tokens else f"{step.sequences} x {step.kv_tokens} KV tokens"
    print(f"{what:<26}{1000 * step.seconds:>10.3f} ms")
