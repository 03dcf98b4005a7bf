"""`baton config validate`: is Baton's part of a cluster.yaml right, and what does it ask for.
`baton config explain`: how would each worker share out its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.common import AsJson, outcome

if TYPE_CHECKING:
    from cluster.config import ServingConfig

app = typer.Typer(help="Work with cluster.yaml.", no_args_is_help=True)


@app.callback()
def config() -> None:
    """Work with cluster.yaml."""


@app.command()
def validate(file: Annotated[str, typer.Argument(metavar="FILE", help="The cluster.yaml to check.")]) -> None:
    """Check a cluster.yaml; every problem is reported with line and column."""
    with outcome():
        from cluster.config import load_config

        print(f"{file}: valid: {describe(load_config(file))}")


@app.command()
def explain(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The cluster.yaml to explain.")] = "cluster.yaml",
    mean_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens of a request, prompt and output; without it: 1024, if allowed."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how each worker would share out this machine's memory: weights, activations, KV pool, requests."""
    with outcome():
        import json

        from cli.explain import explain_roles, render
        from cluster.config import load_config

        config = load_config(file)
        roles = explain_roles(config, mean_tokens)
        print(json.dumps({"roles": roles}) if as_json else render(config, roles))


def describe(config: ServingConfig) -> str:
    """`1 prefill + 2 decode workers (tensor parallel 1 + 2), tiny-shakespeare in float32 on cpu, gRPC on ...`."""
    from pathlib import Path

    from cluster.address import format_address

    prefill, decode = config.roles.prefill, config.roles.decode
    split = f"{prefill.num_workers} prefill + " if prefill.num_workers else ""
    workers = "worker" if decode.num_workers == 1 else "workers"
    parallel = ""
    if (prefill.tensor_parallel, decode.tensor_parallel) != (1, 1):
        parallel = f" (tensor parallel {prefill.tensor_parallel} + {decode.tensor_parallel})"
    name = config.model.name or Path(config.model.path).name
    address = format_address(config.router.host, config.router.port)
    return (
        f"{split}{decode.num_workers} decode {workers}{parallel}, {name} in "
        f"{config.model.dtype} on {config.engine.device}, gRPC on {address}"
    )
