"""What constrained rows add to a decode step: masks computed on the engine's thread, against masks asked for ahead.

    python -m benchmarks.masks [--threads 1] [--rounds 400]
    python -m benchmarks.masks --vocab-size 128000      # random tokens, and a GPU's step: the processor waits for it
    python -m benchmarks.masks --vocab-size 128000 --tools      # what grammars of calls cost: a table
    python benchmarks/make_model.py M DIR --vocab-size 128000; python -m benchmarks.masks --model DIR    # a CPU's step

The arms take turns, step by step: no constraint, llguidance between step and sampler, and Baton's own way, in which
processes compute the masks beside the step. Both constrained arms must choose the same tokens. With `--vocab-size` it
is the time of the engine's thread alone, beside a step of `--step-ms` in which it sleeps, and what that adds to it:
where the thread is the device, asking and collecting; where a GPU is at the step, what is not done when that ends.
The table has the processor time of compiling and of each mask, which other programs change little, and the memory that
a grammar's process has for itself when it has followed some outputs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import string
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cluster.grammar import GrammarLimits, GrammarProcesses
from cluster.grammar_protocol import row_bytes
from engine.kv.block_manager import BlockManager
from engine.model_runner import ModelRunner
from engine.sampling.constraint import Constrainer, Constraint, Words
from engine.sampling.params import SampleRow, SamplingParams
from engine.sampling.rules import follow_constraints
from engine.sampling.sampler import Sampler
from engine.step_input import SequenceSlice, build_step
from engine.tp import SingleGroup
from router.tool_calls.format import Tool
from router.tool_calls.output import OutputForm
from router.tool_calls.registry import TOOL_FORMATS, thinking_of

MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny-shakespeare"
VOCAB_SIZE, EOS, BLOCK_SIZE = 1024, 0, 16
TABLE_TOKENS, TABLE_OUTPUTS = 200, 4


class InlineConstraint:
    """Masks on the calling thread."""

    def __init__(self, vocabulary: LLTokenizer, grammar: str) -> None:
        self._vocabulary = vocabulary
        self._start = LLMatcher(vocabulary, grammar, log_level=0)
        self._matchers: dict[int, tuple[LLMatcher, int]] = {}

    def allowed(self, index: int, output: Sequence[int], ends: Iterable[int]) -> Words:
        matcher, num_read = self._matchers.get(index) or (self._start.deep_copy(), 0)
        assert matcher.consume_tokens(list(output[num_read:])), matcher.get_error()
        self._matchers[index] = matcher, len(output)
        bits = bytearray(matcher.compute_bitmask()[: row_bytes(self._vocabulary.vocab_size)])
        for token_id in self._vocabulary.eos_tokens:
            bits[token_id >> 3] &= ~(1 << (token_id & 7))
        for token_id in ends if matcher.is_accepting() else ():
            bits[token_id >> 3] |= 1 << (token_id & 7)
        return np.frombuffer(bits, dtype=np.int32)


def grammar(number: int) -> str:
    """Of an object whose keys have this number in them."""
    properties: dict[str, Any] = {
        f"name{number}": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    }
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": r"[ \n]{1,32}"})


class Arm:
    """A batch of sequences that go on for ever: one that ends begins again as another sequence of its request."""

    def __init__(self, constraints: Sequence[Any], vocab_size: int, temperature: float) -> None:
        common: dict[str, Any] = {"stop_token_ids": frozenset({EOS}), "temperature": temperature}
        self._params = [SamplingParams(seed=i, constraint=c, **common) for i, c in enumerate(constraints)]
        self._sampler = Sampler(vocab_size)
        self._indices = [0] * len(constraints)
        self.outputs: list[list[int]] = [[] for _ in constraints]
        self.seconds: list[float] = []

    def step(self, runner: ModelRunner, slices: list[SequenceSlice]) -> None:
        given = zip(self._params, self._indices, self.outputs, strict=True)
        rows = [SampleRow(params, index, (1, 2, 3), output) for params, index, output in given]
        began = time.perf_counter()
        ahead = [row for row in rows if hasattr(row.params.constraint, "ask")]
        for row in ahead:
            row.params.constraint.ask(row.sequence_index, row.output_token_ids, [EOS])  # type: ignore[union-attr]
        if ahead:
            ahead[0].params.constraint.flush()  # type: ignore[union-attr]
        sampled = self._sampler.sample(runner.forward(build_step(slices, BLOCK_SIZE, [])), rows)
        self.seconds.append(time.perf_counter() - began)
        for i, token in enumerate(sampled):
            assert not token.problem, token.problem
            self.outputs[i].append(token.token_id)
            if token.token_id == EOS or len(self.outputs[i]) > 200:
                self.outputs[i], self._indices[i] = [], self._indices[i] + 1


def random_tokenizer(vocab_size: int) -> str:
    """A tokenizer.json whose tokens are bytes and random words of up to 8 letters, half of them after a space."""
    random, alphabet = Random(1), sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate(["<|end|>", *alphabet])}
    while len(vocabulary) < vocab_size:
        word = "".join(random.choices(string.ascii_letters, k=random.randint(2, 8)))
        vocabulary.setdefault(random.choice(("", "\u0120")) + word, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return str(tokenizer.to_str())


def measure_thread(
    batch: int, is_shared: bool, rounds: int, constrainer: Constrainer, vocabulary: LLTokenizer, step_s: float
) -> str:
    """The time of the engine's thread, in arms that take the same tokens: steps of a CPU, which wait and then choose
    the most likely of random logits, free and constrained; and what is not done when a GPU's step ends, up to the masks
    as one array, which it is sent."""
    grammars = [grammar(0 if is_shared else i) for i in range(batch)]
    constraints = {name: [constrainer.new(text) for text in grammars] for name in ("ahead", "beside")}
    inline = [InlineConstraint(vocabulary, text) for text in grammars]
    outputs: list[list[int]] = [[] for _ in grammars]
    size, ends, random = vocabulary.vocab_size, frozenset({EOS}), Random(2)
    params = {
        name: [SamplingParams(stop_token_ids=ends, temperature=0.0, constraint=each) for each in those]
        for name, those in {"free": [None] * batch, **constraints}.items()
    }
    logits = torch.randn(batch, size, generator=torch.Generator().manual_seed(1))
    samplers = {"free": Sampler(size), "ahead": Sampler(size)}
    words = np.zeros((batch, row_bytes(size) // 4), dtype=np.int32)  # as torch keeps page-locked memory
    taken: dict[str, list[float]] = {"inline": [], "ask": [], "choose": [], "choose free": []}
    used: dict[str, list[float]] = {"free": [], "ahead": []}
    steps: dict[str, list[float]] = {"free": [], "ahead": [], "wait": [], "beside": []}
    for number in range(rounds):
        rows = {
            name: [SampleRow(each, 0, (), output) for each, output in zip(those, outputs, strict=True)]
            for name, those in params.items()
        }
        for name in ("free", "ahead") if number % 2 else ("ahead", "free"):
            used_before, step_began = time.thread_time(), time.perf_counter()
            if name == "ahead":
                ask_all(constraints[name], outputs, ends)
                taken["ask"].append(time.perf_counter() - step_began)
            time.sleep(step_s)
            began = time.perf_counter()
            chosen = samplers[name].sample(logits, rows[name])
            taken["choose" if name == "ahead" else "choose free"].append(time.perf_counter() - began)
            steps[name].append(time.perf_counter() - step_began)
            used[name].append(time.thread_time() - used_before)
            assert not any(each.problem for each in chosen), chosen
        for name in ("wait", "beside"):
            step_began = time.perf_counter()
            if name == "beside":
                ask_all(constraints[name], outputs, ends)
                allowed, problems = follow_constraints(rows[name], range(batch))
                np.stack(list(allowed.values()), out=words)
                assert not problems, problems
            time.sleep(max(0.0, step_began + step_s - time.perf_counter()))
            steps[name].append(time.perf_counter() - step_began)
        time.sleep(step_s)
        began = time.perf_counter()
        same = [constraint.allowed(0, output, [EOS]) for constraint, output in zip(inline, outputs, strict=True)]
        taken["inline"].append(time.perf_counter() - began)
        assert (words == np.stack(same)).all()
        for output, mask in zip(outputs, words, strict=True):
            choices = np.unpackbits(mask.view(np.uint8), count=size, bitorder="little").nonzero()[0]
            output.append(int(choices[random.randrange(len(choices))]))
            if output[-1] == EOS:
                raise AssertionError("an object ended: use fewer rounds")
    medians = ", ".join(f"{name} {1000 * statistics.median(seconds):.2f} ms" for name, seconds in taken.items())
    slower, beside_gpu = (
        100 * statistics.median(a / b for a, b in zip(steps[name], steps[base], strict=True)) - 100
        for name, base in (("ahead", "free"), ("beside", "wait"))
    )
    which = "one grammar" if is_shared else "a grammar each"
    more_s = statistics.median(a - b for a, b in zip(used["ahead"], used["free"], strict=True))
    each = f"{1e6 * more_s / batch:.1f} us of processor time more a row"
    longer = f"{slower:.1f} % longer, {beside_gpu:.1f} % on a GPU"
    return f"{batch} rows, {which}: {medians}; {each}; a step of {1000 * step_s:g} ms {longer}"


def ask_all(constraints: Sequence[Constraint], outputs: Sequence[Sequence[int]], ends: Iterable[int]) -> None:
    for constraint, output in zip(constraints, outputs, strict=True):
        constraint.ask(0, output, ends)
    constraints[0].flush()


def tool_grammars() -> dict[str, str]:
    """Grammars of calls, by what they are."""

    def tool(number: int) -> Tool:
        text, path = {"type": "string"}, {"type": "string", "maxLength": 200}
        point = {"type": "object", "properties": {"line": {"type": "integer"}, "why": text}, "required": ["line"]}
        properties = {
            "path": path,
            "mode": {"enum": ["read", "write", "append"]},
            "text": text,
            "recursive": {"type": "boolean"},
            "marks": {"type": "array", "items": point},
        }
        return Tool(f"tool_{number}", {"type": "object", "properties": properties, "required": ["path", "mode"]})

    thinking, formats = thinking_of("<think>"), {each.name: each for each in TOOL_FORMATS}
    found = {"a JSON schema with 3 keys": grammar(0)}
    for name in ("hermes", "qwen3_coder", "pythonic", "harmony"):
        for count in (1, 16, 128):
            tools = {f"tool_{number}": tool(number) for number in range(count)}
            form = OutputForm(tools, formats[name], must_call=True)
            found[f"{name}, {count} tools"] = form.grammar({}) or ""
    form = OutputForm({"tool_0": tool(0)}, formats["hermes"], thinking=thinking, is_thinking=True)
    found["free text up to a call, after thinking"] = form.grammar({}) or ""
    form = OutputForm({}, thinking=thinking, is_thinking=True, most_thinking_tokens=10_000)
    found["free text, a budget of thinking"] = form.grammar({}) or ""
    return found


def print_table(vocabulary: LLTokenizer, definition: str, size: int) -> None:
    """Random outputs of each grammar, followed in this process for their time and in another for its memory."""
    processes = GrammarProcesses(lambda: definition, size, GrammarLimits(compile_s=60.0, follow_s=10.0))
    print("grammar | compiled in ms | µs a mask: median | 99th | longest | MiB")
    for name, text in tool_grammars().items():
        began = time.thread_time()
        start = LLMatcher(vocabulary, text, log_level=0)
        compile_s = time.thread_time() - began
        assert not start.is_error(), start.get_error()
        process, random, taken = processes.compile(text), Random(name), list[float]()
        for _ in range(TABLE_OUTPUTS):
            matcher, slot, output = start.deep_copy(), process.begin(), list[int]()
            assert slot is not None
            while len(output) < TABLE_TOKENS and not matcher.is_stopped():
                began = time.thread_time()
                bits = matcher.compute_bitmask()
                taken.append(time.thread_time() - began)
                process.ask(slot, max(0, len(output) - 1), output[-1:])
                assert not process.wait(slot)
                allowed = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=size, bitorder="little")
                allowed[vocabulary.eos_tokens] = 0
                if not allowed.any():
                    break
                output.append(int(random.choice(np.flatnonzero(allowed))))
                matcher.consume_token(output[-1])
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text("utf-8")
        private = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_"))
        process.close()
        taken.sort()
        at = [1e6 * taken[int(share * (len(taken) - 1))] for share in (0.5, 0.99, 1.0)]
        print(
            f"{name} | {1000 * compile_s:.1f} | {at[0]:.0f} | {at[1]:.0f} | {at[2]:.0f} | {private / 1024:.1f}",
            flush=True,
        )
    processes.close()


def measure(
    batch: int,
    is_shared: bool,
    rounds: int,
    constrainer: Constrainer,
    vocabulary: LLTokenizer,
    model: Path,
    temperature: float,
) -> str:
    grammars = [grammar(0 if is_shared else i) for i in range(batch)]
    blocks = BlockManager(batch * 8, BLOCK_SIZE)
    runner = ModelRunner(
        model, tp=SingleGroup(), device="cpu", dtype="float32", num_blocks=batch * 8, block_size=BLOCK_SIZE
    )
    slices = [SequenceSlice((5,), 70, tuple(blocks.allocate(6)), True) for _ in range(batch)]
    arm = partial(Arm, vocab_size=vocabulary.vocab_size, temperature=temperature)
    arms = {
        "none": arm([None] * batch),
        "inline": arm([InlineConstraint(vocabulary, text) for text in grammars]),
        "ahead": arm([constrainer.new(text) for text in grammars]),
    }
    for _ in range(rounds):
        for arm in arms.values():
            arm.step(runner, slices)
    assert arms["inline"].outputs == arms["ahead"].outputs
    taken = {name: arm.seconds[rounds // 8 :] for name, arm in arms.items()}
    ratio, slower = (
        statistics.median(a / b for a, b in zip(taken["ahead"], taken[name], strict=True))
        for name in ("inline", "none")
    )
    medians = ", ".join(f"{name} {1000 * statistics.median(seconds):.2f} ms" for name, seconds in taken.items())
    which = "one grammar" if is_shared else "a grammar each"
    return f"{batch} rows, {which}: {medians}; ahead/inline {ratio:.2f}; a step {100 * slower - 100:.1f} % longer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--model", type=Path, help="whose steps are computed, with random tokens; else the bundled one")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--tools", action="store_true", help="a table of grammars of calls, and nothing else")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    run: Callable[..., str] = partial(measure, model=given.model or MODEL, temperature=given.temperature)
    size, definition = VOCAB_SIZE, (MODEL / "tokenizer.json").read_text("utf-8")
    if given.model is not None:
        size = json.loads((given.model / "config.json").read_text("utf-8"))["vocab_size"]
        definition = random_tokenizer(size)
    elif given.vocab_size is not None:
        size, definition = given.vocab_size, random_tokenizer(given.vocab_size)
        run = partial(measure_thread, step_s=given.step_ms / 1000)
    vocabulary = LLTokenizer(definition, n_vocab=size)
    if given.tools:
        print_table(vocabulary, definition, size)
        return
    constrainer = Constrainer(lambda: definition, size)
    for batch in (8, 32):
        for is_shared in (True, False):
            print(run(batch, is_shared, given.rounds, constrainer, vocabulary), flush=True)
    constrainer.close()


if __name__ == "__main__":
    main()
