"""What each numeric format takes, gives and costs: bytes, tokens a second, and how much worse the model predicts.

    python benchmarks/formats.py --json [--model DIR]
    python benchmarks/formats.py --checkpoints --rounds 15

The bundled model is asked to predict the part of its text that it was not trained on; M is random and predicts nothing,
so only its size and its speed say something. With --checkpoints the bundled model is converted to each format that a
checkpoint may have (`tests/support/converted.py`). benchmarks/README.md says how to read it.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.engine import BLOCK_SIZE, CONTEXT, Bench, steps_per_second, timed
from benchmarks.make_model import Shape, make_model
from benchmarks.plain_cluster import ROOT
from cluster.errors import BatonError
from cluster.model_folder import weight_files
from cluster.program import ExitCode
from engine.model_cost import describe_weights, kv_bytes_per_token, weight_bytes
from engine.step_input import SequenceSlice, build_step

BUNDLED_MODEL = ROOT / "models" / "tiny-shakespeare"
HELD_OUT = BUNDLED_MODEL / "held_out.txt"
WINDOW = 1024
"""Tokens that are predicted from their own beginning only."""
BATCH_SIZES = (1, 8, 32)
FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "kv int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8, kv int8": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
}
BASE = "bfloat16"
SPEEDS: dict[str, Callable[[Bench], object]] = {
    "decode of 1": lambda bench: bench.decode(1, 100),
    "decode of 32": lambda bench: bench.decode(32, 25),
    f"prefill of {WINDOW:,}": lambda bench: bench.prefill(WINDOW),
}
"""What is timed of a checkpoint."""


def perplexity(bench: Bench, token_ids: Sequence[int]) -> float:
    """exp of the mean loss over the text, in windows that each begin without context."""
    loss = 0.0
    for start in range(0, len(token_ids) - 1, WINDOW):
        window = token_ids[start : start + WINDOW + 1]
        logits = all_logits(bench, window[:-1])
        loss += torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="sum").item()
    return math.exp(loss / (len(token_ids) - 1))


def all_logits(bench: Bench, token_ids: Sequence[int]) -> torch.Tensor:
    """Of every token of one sequence: [T, V]."""
    table = tuple(range(-(-len(token_ids) // BLOCK_SIZE)))
    step = build_step([SequenceSlice(tuple(token_ids), 0, table, True)], BLOCK_SIZE)
    return bench.runner.forward(replace(step, logits_indices=np.arange(len(token_ids), dtype=np.int32)))


def held_out_tokens(model: Path, text: Path, most: int | None = None) -> list[int]:
    """The text, or its first `most` tokens, as the model reads it, after one end of text."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(text.read_text(encoding="utf-8")).ids
    return [0, *ids][: None if most is None else most + 1]


def measure(model: Path, token_ids: list[int] | None, rounds: int, show: Callable[..., Any]) -> dict[str, Any]:
    """One row for each format."""
    rows: dict[str, Any] = {}
    for name, wanted in show(FORMATS.items(), description=model.name):
        bench = Bench(model, max_tokens=max(max(BATCH_SIZES) * (CONTEXT + BLOCK_SIZE), WINDOW), **wanted)
        config, kv_dtype = bench.config, str(bench.runner.kv.dtype).removeprefix("torch.")
        row: dict[str, Any] = {
            "weight_bytes": weight_bytes(config, 1, bench.runner.weight_form),
            "kv_bytes_per_token": kv_bytes_per_token(config, 1, kv_dtype),
            "tok_s": {str(n): round(n * steps_per_second(bench, n, rounds), 1) for n in BATCH_SIZES},
        }
        if token_ids:
            row["perplexity"] = round(perplexity(bench, token_ids), 3)
        rows[name] = row
    return rows


def measure_checkpoints(model: Path, token_ids: list[int], rounds: int, show: Callable[..., Any]) -> dict[str, Any]:
    """One row for each format of a checkpoint, loaded as it is by default and computed in bfloat16."""
    sys.path.append(str(ROOT / "tests" / "support"))
    converted = importlib.import_module("converted")
    wanted = {"max_tokens": max(max(BATCH_SIZES) * (CONTEXT + BLOCK_SIZE), WINDOW), "dtype": "bfloat16"}
    rows: dict[str, Any] = {}
    benches: dict[str, Bench] = {}
    with tempfile.TemporaryDirectory(prefix="baton-benchmark-") as folder:
        found = list(converted.convert(model, Path(folder)))
        for name, checkpoint, said in show([(BASE, model, model), *found], description="checkpoints"):
            bench, exact = Bench(checkpoint, **wanted), Bench(said, **{**wanted, "dtype": "float32"})
            rows[name] = {
                "file_bytes": sum(file.stat().st_size for file in weight_files(checkpoint)),
                "weight_bytes": weight_bytes(bench.config, 1, bench.runner.weight_form),
                "kept": describe_weights(bench.config, 1, bench.runner.weight_form).rpartition("; ")[0],
                "perplexity": round(perplexity(bench, token_ids), 3),
                "exact_perplexity": round(perplexity(exact, token_ids), 3),
            }
            benches[name] = bench
        for name, speeds in relative_speeds(benches, rounds).items():
            rows[name]["speed"] = speeds
    return rows


def relative_speeds(benches: dict[str, Bench], rounds: int) -> dict[str, dict[str, float]]:
    """The speed of each model as a multiple of that of BASE: medians of short rounds, each of which measures one model
    after another and begins with another one."""
    ratios: dict[str, dict[str, list[float]]] = {name: {what: [] for what in SPEEDS} for name in benches}
    for bench in benches.values():
        for work in SPEEDS.values():
            work(bench)
    names = list(benches)
    for number in range(rounds):
        first = number * len(names) // rounds
        for what, work in SPEEDS.items():
            took_s = {name: timed(partial(work, benches[name])) for name in names[first:] + names[:first]}
            for name in names:
                ratios[name][what].append(took_s[BASE] / took_s[name])
    return {name: {what: round(median(found), 2) for what, found in of.items()} for name, of in ratios.items()}


def _checkpoint_table(rows: dict[str, Any]) -> Table:
    title = f"checkpoints computed in bfloat16; speeds: times {BASE}'s; exact: what a checkpoint says, in float32"
    table = Table(title=title)
    for column in ("checkpoint", "file, MB", "memory, MB", *SPEEDS, "perplexity", "exact", "layers"):
        table.add_column(column)
    for name, row in rows.items():
        sizes = [f"{row[which] / 1e6:,.1f}" for which in ("file_bytes", "weight_bytes")]
        speeds = [f"{row['speed'][what]:.2f}" for what in SPEEDS]
        losses = [f"{row[which]:.3f}" for which in ("perplexity", "exact_perplexity")]
        table.add_row(name, *sizes, *speeds, *losses, row["kept"])
    return table


def _table(title: str, rows: dict[str, Any]) -> Table:
    table = Table(title=f"{title}: weights in MB, bytes of KV a token, tokens a second by sequences")
    for column in ("format", "MB", "KV, B", *(f"tok/s, {n}" for n in BATCH_SIZES), "perplexity"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        rates = [f"{row['tok_s'][str(n)]:,.0f}" for n in BATCH_SIZES]
        sizes = [f"{row['weight_bytes'] / 1e6:,.1f}", f"{row['kv_bytes_per_token']:,}"]
        table.add_row(name, *sizes, *rates, f"{row['perplexity']:.3f}" if "perplexity" in row else "–")
    return table


def main(
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder; without it: the bundled one and M.")] = None,
    text: Annotated[Path, typer.Option(help="What the bundled model, or DIR, is to predict.")] = HELD_OUT,
    tokens: Annotated[int | None, typer.Option(min=1, help="That are predicted; without it: the whole text.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Without it: every core.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rates are medians of so many.")] = 5,
    checkpoints: Annotated[bool, typer.Option(help="The bundled model in each format of a checkpoint.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Compares the numeric formats on this machine's CPU."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    console = Console(stderr=True)

    def show(items: Any, description: str) -> Any:
        return track(items, description, console=console, disable=as_json and not console.is_terminal)

    values: dict[str, Any] = {}
    try:
        if checkpoints:
            values["checkpoints"] = measure_checkpoints(
                BUNDLED_MODEL, held_out_tokens(BUNDLED_MODEL, text, tokens), rounds, show
            )
        elif model is not None:
            values[model.name] = measure(model, held_out_tokens(model, text, tokens), rounds, show)
        else:
            held_out = held_out_tokens(BUNDLED_MODEL, text, tokens)
            values[BUNDLED_MODEL.name] = measure(BUNDLED_MODEL, held_out, rounds, show)
            with tempfile.TemporaryDirectory(prefix="baton-benchmark-") as folder:
                values["M"] = measure(make_model(Shape.M, Path(folder) / "M"), None, rounds, show)
    except (BatonError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(ExitCode.FAILED) from None
    if as_json:
        print(json.dumps(values))
        return
    for name, rows in values.items():
        Console().print(_checkpoint_table(rows) if checkpoints else _table(name, rows))


if __name__ == "__main__":
    typer.run(main)
