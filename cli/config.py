"""`baton config validate` checks Baton's part of a cluster.yaml; `baton config explain` shows how each worker would
share out this machine's memory.

The memory plan is the worker's own: `python -m worker.examine memory`, which this module runs and formats.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.common import AsJson, outcome
from cluster.errors import ConfigError, InternalError
from cluster.model_folder import model_name
from cluster.program import SOURCE_ROOT, ExitCode, child_environment

if TYPE_CHECKING:
    from cluster.config.schema import ServingConfig

_PROGRAM = ("worker.examine", "memory")
_DECIDED_BY = {
    "kv_cache_tokens": "as kv_cache_tokens says",
    "memory": "all that is left",
    "requests": "four requests of max_model_len, as on every CPU where kv_cache_tokens is null",
}
Explained = dict[str, Any]
"""The number of workers of one role and, if there are any, what the program says of it."""

app = typer.Typer(help="Work with cluster.yaml.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def config() -> None:
    """Work with cluster.yaml."""


@app.command()
def validate(file: Annotated[str, typer.Argument(metavar="FILE", help="The cluster.yaml to check.")]) -> None:
    """Check a cluster.yaml; every problem is reported with line and column."""
    with outcome():
        from cluster.config.load import describe_config, load_config

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
        from cluster.config.load import load_config

        config = load_config(file)
        roles = _explain_roles(config, mean_tokens)
        print(json.dumps({"roles": roles}) if as_json else _render(config, roles))


def default_config() -> Path:
    """./cluster.yaml, else the one beside the source, else the installed one. Raises ConfigError."""
    installed = Path(sys.prefix) / "share" / "baton"
    candidates = [folder / "cluster.yaml" for folder in (Path.cwd(), SOURCE_ROOT, installed)]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise ConfigError("there is no cluster.yaml here; name one with --config")
    return found


def _explain_roles(config: ServingConfig, mean_tokens: int | None) -> dict[str, Explained]:
    """The memory plan of each role. Raises ConfigError for what the workers would refuse."""
    from cluster.config.schema import ROLES
    from controller.plan import plan_worker

    num_workers = {role: config.role(role).num_workers for role in ROLES}
    present = [role for role in ROLES if num_workers[role] > 0]
    workers = [plan_worker(config, role).ranks[0].as_dict() for role in present]
    answers = dict(zip(present, _ask({"mean_tokens": mean_tokens, "workers": workers}), strict=True))
    return {role: {"workers": num_workers[role], **answers.get(role, {})} for role in ROLES}


def _render(config: ServingConfig, roles: dict[str, Explained]) -> str:
    """The text for people: a block of lines for each role."""
    name = config.model.name or model_name(Path(config.model.path))
    return "\n\n".join([f"{name}, on this machine as it is now:", *map(_render_role, roles, roles.values())])


def _render_role(role: str, of: Explained) -> str:
    from cluster.text import count_of, format_bytes

    if of["workers"] == 0:
        return f"{role}: no workers; decode workers compute prompts as well"
    rows = [
        ("free", of["free_bytes"], f"on {of['device']}" + (", for each rank" if of["tensor_parallel"] > 1 else "")),
        ("budget", of["budget_bytes"], f"{of['memory_utilization']:g} of it (engine.memory_utilization)"),
        ("- weights", of["weight_bytes"], _weights_note(of)),
        ("- activations", of["activation_bytes"], _activations_note(of)),
        ("- reserve", of["reserved_bytes"], "rotary positions" + ("" if of["device"] == "cpu" else ", graphs, slack")),
        ("= left", of["left_bytes"], f"{of['tokens_that_fit']:,} tokens of {of['kv_bytes_per_token']:,} bytes fit"),
        ("KV pool", of["pool_bytes"], _pool_note(of)),
        *_rows_below(of),
    ]
    lines = [f"{role}: {count_of(of['workers'], 'worker')} of {count_of(of['tensor_parallel'], 'rank')}"]
    lines += [f"  {label:<14}{format_bytes(size):>10}   {note}" for label, size, note in rows]
    mean = f"of {of['mean_tokens']:,} tokens at a time; at most {of['max_num_seqs']} are decoded in one step"
    return "\n".join([*lines, f"  {'requests':<14}{of['requests_at_mean']:>10,}   {mean}"])


def _weights_note(of: Explained) -> str:
    return f"computed in {of['dtype']}: {of['weights']}"


def _activations_note(of: Explained) -> str:
    step = f"a step of {of['max_num_batched_tokens']:,} tokens and {of['max_num_seqs']} sequences"
    how = "measured" if of["activations_are_measured"] else "estimated"
    return f"{how} for {step}; {of['activations_why']}"


def _pool_note(of: Explained) -> str:
    blocks = f"{of['num_blocks']:,} blocks of {of['block_size']} tokens in {of['kv_dtype']}"
    return f"{of['num_tokens']:,} tokens, {blocks}; {_DECIDED_BY[of['decided_by']]}"


def _rows_below(of: Explained) -> Iterator[tuple[str, int, str]]:
    """Rows for host memory and a disk below the pool, where they are configured."""
    from cluster.text import format_bytes

    num_ranks = of["workers"] * of["tensor_parallel"]
    for label, tier, where in (
        ("host memory", "host", "of this machine"),
        ("disk", "disk", f"in {of.get('disk_path')}"),
    ):
        if not of[f"{tier}_bytes"]:
            continue
        tokens = of[f"num_{tier}_blocks"] // len(of["groups"]) * of["block_size"]
        together = format_bytes(num_ranks * of[f"{tier}_bytes"])
        free = format_bytes(of[f"{tier}_free_bytes"])
        each = f"{tokens:,} tokens, {of[f'num_{tier}_blocks']:,} blocks"
        yield label, of[f"{tier}_bytes"], f"{each}; the role takes {together} {where}, {free} free"


def _ask(question: dict[str, Any]) -> list[Explained]:
    """Runs the program, which loads torch. Raises what it raised."""
    answer: list[Explained] = json.loads(run_program(*_PROGRAM, question=json.dumps(question)))
    return answer


def check_model(serving: ServingConfig, *, are_here: bool) -> None:
    """Refuses what no worker or router could serve, before Ray starts. `are_here`: they run on this machine."""
    from cluster.config.schema import ROLES

    roles = {}
    for role in ROLES:
        of, form, engine = serving.role(role), serving.model_of(role), serving.engine_of(role)
        if of.num_workers:
            roles[role] = {
                "tensor_parallel": of.tensor_parallel,
                "expert_parallel": of.expert_parallel,
                "split_latents": of.split_latents,
                "device": engine.device,
                "dtype": form.dtype,
                "quantization": form.quantization,
                "memory_utilization": engine.memory_utilization,
                "kv_key_file": engine.kv_key_file,
                "are_here": are_here,
            }
    needs, model = "config" if serving.engine.timed_steps.is_on else "weights", serving.model
    with ThreadPoolExecutor() as beside:
        routers = beside.submit(run_program, "router.examine", model.path, *filter(None, [model.chat_template]))
        run_program("worker.check_model", model.path, serving.engine.model_impl, needs, json.dumps(roles))
    if refused := json.loads(routers.result()).get("refused"):
        raise ConfigError(refused)


def run_program(*arguments: str, question: str = "") -> str:
    """Runs `python -m` with these arguments in a process of its own, and returns what it writes. Raises ConfigError for
    what it refuses."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        input=question,
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == ExitCode.DONE:
        return done.stdout
    message = done.stderr.rpartition("error: ")[2].strip()
    if done.returncode == ExitCode.BAD_CONFIG:
        raise ConfigError(message)
    raise InternalError(f"python -m {' '.join(arguments)} ended with code {done.returncode}: {message}")
