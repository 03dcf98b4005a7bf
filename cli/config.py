"""`baton config validate`: is Baton's part of a cluster.yaml right, and what does it ask for.
`baton config explain`: how would each worker share out its memory."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.common import AsJson, outcome

app = typer.Typer(help="Work with cluster.yaml.", no_args_is_help=True)


@app.callback()
def config() -> None:
    """Work with cluster.yaml."""


@app.command()
def validate(file: Annotated[str, typer.Argument(metavar="FILE", help="The cluster.yaml to check.")]) -> None:
    """Check a cluster.yaml; every problem is reported with line and column."""
    with outcome():
        from cluster.config import describe_config, load_config

        print(f"{file}: valid: {describe_config(load_config(file))}")


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
