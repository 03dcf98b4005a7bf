"""How near one rank comes to what the machine can do: decode against its memory, prefill against its arithmetic.

    python benchmarks/engine.py --json [--model DIR]
    python benchmarks/engine.py --either-code --batch 1 --batch 8 --batch 32 --prompt 1024

One process, no router and no hand-off: steps are built, computed and sampled as a worker does it. The limits are
measured in the same run, in turn with what is held against them. benchmarks/README.md says how to read it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    # Run by its path: this folder, where a module has the name of a package, is not to be imported from.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.make_model import Shape, make_model
from cluster.errors import BatonError
from cluster.program import ExitCode
from engine.attention import cpu
from engine.model_cost import ModelFlops, multiplied_elements
from engine.model_runner import ModelRunner, StepOutput
from engine.models.folder import read_model
from engine.models.shapes import layer_matrices
from engine.native.decode_step import DecodeStep
from engine.quantization.fp8 import Fp8Matrix, ScaledFp8Matrix
from engine.quantization.integers import QuantizedMatrix
from engine.quantization.interface import TiledMatrix, TritonMatrix
from engine.quantization.plain import TorchMatrix
from engine.sampling.params import SampleRow, SamplingParams
from engine.sampling.sampler import Sampler
from engine.sampling.samples import Samples
from engine.step_input import SequenceSlice, StepInput, build_step
from engine.tp import SingleGroup

BLOCK_SIZE = 16
CONTEXT = 192
"""Tokens of each decoding sequence: the middle of 128 of prompt and 128 of output."""
SHARES_OF = 32
"""Sequences of the step that is looked into."""
MATRICES = (TorchMatrix, TiledMatrix, TritonMatrix, QuantizedMatrix, Fp8Matrix, ScaledFp8Matrix)
BATCH_SIZES = [1, 8, 32, 128]
PROMPT_SIZES = [512, 1024, 4096, 8192]
CODES = ("native", "transformers")
"""Whose code may compute a model, by `engine.model_impl`."""


@dataclass
class Spent:
    """Seconds of some steps, and where they went."""

    total: float = 0.0
    inside: dict[str, float] = field(default_factory=dict)

    def share(self, name: str) -> float:
        return self.inside.get(name, 0.0) / self.total

    @property
    def rest(self) -> float:
        """What went neither into products nor into attention."""
        return 1.0 - self.share("products") - self.share("attention")


def sample_next(sampler: Sampler, logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    """Tokens of the rows, whose outputs, lists, grow by them."""
    return read_next(sampler.launch(logits, rows), rows)


def read_next(samples: Samples, rows: list[SampleRow]) -> list[int]:
    """Tokens that were set off for the rows, whose outputs, lists, grow by them."""
    token_ids = [sampled.token_id for sampled in samples.read()]
    for row, token_id in zip(rows, token_ids, strict=True):
        assert isinstance(row.output_token_ids, list), "the output of a row cannot grow"
        row.output_token_ids.append(token_id)
    return token_ids


class Bench:
    """One loaded model."""

    def __init__(
        self,
        folder: Path,
        *,
        max_tokens: int,
        chunk: int = 2048,
        context: int = CONTEXT,
        block_size: int | None = BLOCK_SIZE,
        **wanted: Any,
    ) -> None:
        """`block_size`: None for what suits the attention. `wanted`: dtype and so on, as for ModelRunner."""
        self._chunk, self._context = chunk, context
        self.config = read_model(folder)
        self._sampler = Sampler(self.config.vocab_size, wanted.get("kernels", "auto"))
        wanted = {"device": "cpu", "dtype": "auto", "block_size": block_size, "sampler": self._sampler, **wanted}
        self.runner = ModelRunner(folder, tp=SingleGroup(), **wanted)
        self._block_size = self.runner.block_size
        self.runner.make_pool(-(-max_tokens // self._block_size))
        self._params = SamplingParams(max_output_tokens=1, temperature=0.0)

    def decode(self, batch_size: int, num_steps: int, overlaps: bool = False) -> list[int]:
        """The last tokens of so many steps of `batch_size` sequences, each with a table of its own. `overlaps`: a step
        is launched before the tokens of the one before it are read."""
        rows = [SampleRow(self._params, i, (1,), []) for i in range(batch_size)]
        unread = [-1 - row for row in range(batch_size)]

        def launch(token_ids: list[int], sampled: torch.Tensor | None = None) -> StepOutput:
            step, num_unread = self.decode_step(token_ids), int(sampled is not None)
            self.runner.prepare(step, sampled, lambda: [replace(row, num_unread=num_unread) for row in rows])
            return self.runner.run(step, sampled=sampled)

        output = launch([5] * batch_size)
        for left in reversed(range(num_steps)):
            samples = output.samples or self._sampler.launch(output.logits, rows)
            if left and overlaps:
                output = launch(unread, samples.token_ids)
            token_ids = read_next(samples, rows)
            if left and not overlaps:
                output = launch(token_ids)
        return token_ids

    def decode_step(self, token_ids: list[int]) -> StepInput:
        """One token for each sequence, whose number is its place in the list."""
        width = -(-self._context // self._block_size)
        slices = [
            SequenceSlice((token,), self._context - 1, tuple(range(i * width, (i + 1) * width)), True)
            for i, token in enumerate(token_ids)
        ]
        return build_step(slices, self._block_size)

    def prefill(self, num_tokens: int, num_cached: int = 0) -> None:
        """One prompt, in chunks, to its first token; the KV of its first `num_cached` tokens is there already."""
        table = tuple(range(-(-num_tokens // self._block_size)))
        for start in range(num_cached, num_tokens, self._chunk):
            end = min(start + self._chunk, num_tokens)
            ids = tuple(3 + i % (self.config.vocab_size - 3) for i in range(end - start))
            piece = SequenceSlice(ids, start, table, end == num_tokens)
            logits = self.runner.forward(build_step([piece], self._block_size))
        self._sampler.sample(logits, [SampleRow(self._params, 0, ids, [])])

    def decode_bytes(self, batch_size: int) -> float:
        """What a step must read: each weight that is multiplied with once, and the live KV."""
        kv_dtype = str(self.runner.kv.dtype).removeprefix("torch.")
        cost = ModelFlops.of(self.config, 1, self.runner.weight_form, kv_dtype)
        kv_bytes = self.config.num_hidden_layers * cost.kv_layer_bytes * self._context * batch_size
        return cost.weights_read(batch_size) + cost.head_bytes + kv_bytes

    def prefill_flops(self, num_tokens: int) -> float:
        """Products for each token, the head for one, and causal attention."""
        config = self.config
        heads = config.num_attention_heads * config.head_dim
        attention = 2.0 * num_tokens * num_tokens * heads * config.num_hidden_layers
        head = 2 * config.hidden_size * config.vocab_size
        return 2.0 * multiplied_elements(config, 1) * num_tokens + attention + head

    def gemm_shapes(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of a layer's products."""
        return [matrix.shape for matrix in layer_matrices(self.config, 1)]


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


@contextmanager
def watched(spent: Spent, decode_step: DecodeStep | None) -> Iterator[None]:
    """Counts the block's time, and where it goes; `decode_step` counts its own."""
    kinds: list[tuple[Any, str]] = [(kind, "products") for kind in MATRICES]
    kinds.append((cpu.CpuAttention, "attention"))
    originals = [kind.__call__ for kind, _ in kinds]

    def counted(original: Any, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent.inside[name] = spent.inside.get(name, 0.0) + time.perf_counter() - begun

        return call

    for (kind, name), original in zip(kinds, originals, strict=True):
        kind.__call__ = counted(original, name)
    before = None if decode_step is None else decode_step.spent_s.copy()
    begun = time.perf_counter()
    try:
        yield
    finally:
        spent.total += time.perf_counter() - begun
        if decode_step is not None:
            for name, seconds in zip(("products", "attention"), decode_step.spent_s - before, strict=True):
                spent.inside[name] = spent.inside.get(name, 0.0) + float(seconds)
        for (kind, _), original in zip(kinds, originals, strict=True):
            kind.__call__ = original


@dataclass
class Measured:
    """Of several rounds."""

    rates: list[float] = field(default_factory=list)
    """Tokens a second."""
    of_limit: list[float] = field(default_factory=list)

    def note(self, rate: float, of_limit: float) -> None:
        self.rates.append(rate)
        self.of_limit.append(of_limit)

    def told(self, limit: str) -> dict[str, float]:
        return {
            "tok_s": round(statistics.median(self.rates), 1),
            limit: float(f"{statistics.median(self.of_limit):.3g}"),
        }


def steps_per_second(bench: Bench, batch_size: int, rounds: int = 1) -> float:
    """Median of the rounds, each of half a second."""
    num_steps = max(3, int(0.5 / timed(lambda: bench.decode(batch_size, 1))))
    return num_steps / statistics.median(timed(lambda: bench.decode(batch_size, num_steps)) for _ in range(rounds))


def measure_decode(bench: Bench, batch_sizes: list[int], rounds: int) -> dict[str, dict[str, float]]:
    """The limit is measured beside each batch size, in each round."""
    measured = {size: Measured() for size in batch_sizes}
    for size in batch_sizes:
        bench.decode(size, 2)
    for _ in range(rounds):
        for size, of_size in measured.items():
            limit = machine.read_rate(int(bench.decode_bytes(size)))
            steps_s = steps_per_second(bench, size)
            of_size.note(size * steps_s, bench.decode_bytes(size) * steps_s / limit)
    return {str(size): of_size.told("of_bandwidth") for size, of_size in measured.items()}


def measure_prefill(bench: Bench, prompt_sizes: list[int], chunk: int, rounds: int) -> dict[str, dict[str, float]]:
    dtype = getattr(torch, bench.runner.dtype)
    measured = {size: Measured() for size in prompt_sizes}
    for _ in range(rounds):
        for size, of_size in measured.items():
            limit = machine.gemm_rate(bench.gemm_shapes(), min(size, chunk), dtype)
            took_s = timed(lambda size=size: bench.prefill(size))  # type: ignore[misc]
            of_size.note(size / took_s, bench.prefill_flops(size) / took_s / limit)
    return {str(size): of_size.told("of_gemm") for size, of_size in measured.items()}


def measure_prefix(bench: Bench, num_tokens: int, rounds: int) -> dict[str, float]:
    """A prompt of which nine tenths are cached, against the same one cold."""
    cached = num_tokens * 9 // 10 // BLOCK_SIZE * BLOCK_SIZE
    cold, warm = [], []
    for _ in range(rounds):
        cold.append(timed(lambda: bench.prefill(num_tokens)))
        warm.append(timed(lambda: bench.prefill(num_tokens, cached)))
    shares = [one / other for one, other in zip(warm, cold, strict=True)]
    return {
        "tokens": num_tokens,
        "cold_ms": round(1000 * statistics.median(cold), 1),
        "warm_ms": round(1000 * statistics.median(warm), 1),
        "share": round(statistics.median(shares), 3),
    }


def measure_shares(bench: Bench, batch_size: int, num_steps: int = 20) -> dict[str, float]:
    """Where a decode step's time goes."""
    spent = Spent()
    bench.decode(batch_size, 2)
    with watched(spent, bench.runner.decode_step):
        bench.decode(batch_size, num_steps)
    return {
        "products": round(spent.share("products"), 3),
        "attention": round(spent.share("attention"), 3),
        "rest": round(spent.rest, 3),
    }


def measure_either_code(
    path: Path, max_tokens: int, batch_sizes: list[int], prompt_sizes: list[int], rounds: int, **wanted: Any
) -> dict[str, dict[str, float]]:
    """Milliseconds of processor time of each step, by Baton's own code and by transformers' in turn: medians. `ratio`:
    the speed of the latter, as a share of the former's, the median of each round's own."""
    benches = {code: Bench(path, max_tokens=max_tokens, model_impl=code, **wanted) for code in CODES}
    works: dict[str, tuple[Callable[[Bench], object], int]] = {
        f"decode of {size}": (lambda bench, size=size: bench.decode(size, 5), 5)  # type: ignore[misc]
        for size in batch_sizes
    }
    works |= {f"prefill of {size}": (lambda bench, size=size: bench.prefill(size), 1) for size in prompt_sizes}  # type: ignore[misc]
    rows: dict[str, dict[str, float]] = {}
    for what, (work, num_steps) in works.items():
        for bench in benches.values():
            work(bench)
        taken: dict[str, list[float]] = {code: [] for code in CODES}
        for _ in range(rounds):
            for code, bench in benches.items():
                begun = time.process_time()
                work(bench)
                taken[code].append(1000 * (time.process_time() - begun) / num_steps)
        rows[what] = {f"{code}_ms": round(statistics.median(taken[code]), 2) for code in CODES}
        rows[what]["ratio"] = round(statistics.median(a / b for a, b in zip(*taken.values(), strict=True)), 2)
    return rows


def _table(title: str, by_size: dict[str, dict[str, float]], limit: str) -> Table:
    table = Table(title=title)
    for column in ("", "tok/s", limit.replace("_", " ")):
        table.add_column(column, justify="right")
    for size, told in by_size.items():
        table.add_row(size, f"{told['tok_s']:,.0f}", f"{told[limit]:.0%}")
    return table


def main(
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder; without it: M of make_model.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto, the checkpoint's own.")] = "auto",
    quantization: Annotated[str, typer.Option(help="none, int8 or int4.")] = "none",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto or int8.")] = "auto",
    kernels: Annotated[str, typer.Option(help="auto, native or torch.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Without it: every core.")] = None,
    batch: Annotated[list[int], typer.Option(min=1, help="Sequences that decode; repeat it.")] = BATCH_SIZES,
    prompt: Annotated[list[int], typer.Option(min=1, help="Tokens of a prompt; repeat it.")] = PROMPT_SIZES,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a step of prefill.")] = 2048,
    rounds: Annotated[int, typer.Option(min=1, help="Medians are over so many.")] = 5,
    either_code: Annotated[bool, typer.Option(help="Baton's code against transformers' only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Measures one rank of a model on this machine's CPU."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    try:
        with tempfile.TemporaryDirectory(prefix="baton-benchmark-") as folder:
            path = model or make_model(Shape.M, Path(folder))
            longest = read_model(path).max_position_embeddings
            if max(prompt) > longest:
                raise typer.BadParameter(f"--prompt {max(prompt)}: this model takes at most {longest}")
            most = max(max(prompt), max(*batch, SHARES_OF) * (CONTEXT + BLOCK_SIZE))
            wanted = {"dtype": dtype, "quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
            if either_code:
                print(json.dumps(measure_either_code(path, most, batch, prompt, rounds, kernels=kernels, **wanted)))
                return
            bench = Bench(path, max_tokens=most, chunk=chunk, kernels=kernels, **wanted)
        values: dict[str, Any] = {
            "decode": measure_decode(bench, batch, rounds),
            "prefill": measure_prefill(bench, prompt, chunk, rounds),
            "prefix": measure_prefix(bench, max(n for n in prompt if n <= 4096 or n == min(prompt)), rounds),
            "shares": measure_shares(bench, SHARES_OF),
        }
    except (BatonError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(ExitCode.FAILED) from None
    values["overhead_share"] = values["shares"]["rest"]
    values |= wanted | {"dtype": bench.runner.dtype, "kernels": bench.runner.kernels_reason}
    values |= {"threads": torch.get_num_threads(), "rounds": rounds, "load_average": round(os.getloadavg()[0], 1)}
    if as_json:
        print(json.dumps(values))
        return
    console = Console()
    console.print(_table(f"decode, {CONTEXT} tokens of context, by sequences", values["decode"], "of_bandwidth"))
    console.print(_table("prefill, by tokens of the prompt", values["prefill"], "of_gemm"))
    shares = ", ".join(f"{name} {share:.0%}" for name, share in values["shares"].items())
    console.print(f"a decode step of {SHARES_OF} sequences: {shares}")
    prefix = values["prefix"]
    console.print(
        f"a prompt of {prefix['tokens']} tokens of which nine tenths are cached: {prefix['warm_ms']:.0f} ms, "
        f"{prefix['share']:.0%} of its {prefix['cold_ms']:.0f} ms when cold"
    )
    console.print(f"{values['dtype']}, {values['threads']} threads; own kernels: {values['kernels']}")


if __name__ == "__main__":
    typer.run(main)
