"""The disaggregated path equals the single-process engine, whatever the layers of a model keep of a sequence.

A kind of KV has one model that goes through every combination of tensor-parallel sizes, block sizes, prefix cache,
what befalls the request, and number of sequences; each other family goes through combinations in which every pair of
values occurs. `make families` runs them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import VOCAB_SIZE, make_checkpoint
from engine_steps import make_runner
from pairwise import pairwise
from reference_engine import Engine
from workers import Output, Worker, hand_off, merged, running, sampling

from cluster.lifecycle import RequestKey
from cluster.pb import worker_pb2
from engine.kv.block_manager import BlockManager
from engine.models.folder import read_model
from engine.sampling.params import SamplingParams

NUM_TOKENS = 14
NUM_KNOWN = 5
"""Tokens that each sequence has when its request moves, or loses its worker."""
LENGTHS = (17, 101, 300)
TP_SIZES = (1, 2, 4)
BLOCK_SIZES = (16, 32)
DIMENSIONS = {
    "prefill": tuple(itertools.product(TP_SIZES, BLOCK_SIZES)),
    "decode": tuple(itertools.product(TP_SIZES, BLOCK_SIZES)),
    "is_cached": (False, True),
    "event": ("none", "moves", "is lost"),
    "n": (1, 3),
}
KINDS: dict[str, dict[str, Any]] = {"llama": {}, "gemma3": {}, "deepseek-v3": {}, "qwen3-next": {}}
"""By kind of KV: all of a sequence, a window, a latent, a recurrent state."""
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {},
    "qwen2": {"num_key_value_heads": 1},
    "qwen3": {},
    "gemma2": {},
    "mixtral": {},
    "qwen2-moe": {},
    "qwen3-moe": {},
    "deepseek-v2": {},
    "glm4-moe": {},
    "gpt-oss": {},
    "phi3": {},
    "granite": {},
    "olmo2": {},
    "olmo3": {},
    "glm4": {},
    "smollm3": {},
}


@dataclass(frozen=True)
class Scenario:
    """One request; workers are named by tensor-parallel and block size."""

    prefill: tuple[int, int]
    decode: tuple[int, int]
    is_cached: bool
    event: str
    n: int

    def __str__(self) -> str:
        sizes = f"{self.prefill[0]}x{self.prefill[1]}>{self.decode[0]}x{self.decode[1]}"
        return f"{sizes}{' cached' * self.is_cached} {self.event} n={self.n}"


def scenarios(kind: str) -> list[Scenario]:
    combinations = itertools.product(*DIMENSIONS.values()) if kind in KINDS else pairwise(DIMENSIONS)
    return [Scenario(*combination) for combination in combinations]


def prompt_of(length: int) -> list[int]:
    return [(i * 37 + length) % (VOCAB_SIZE - 1) + 1 for i in range(length)]


class Fleet:
    """A worker of each role and size of one model, and the tokens that one process generates."""

    def __init__(self, folder: Path, workers: dict[tuple[str, int, int], Worker]) -> None:
        self._folder, self._workers = folder, workers
        self._runner = make_runner(folder, num_blocks=256, attention="cpu")
        self.expected = cache(self._generate)

    def _generate(self, length: int, n: int) -> list[tuple[int, ...]]:
        blocks = BlockManager(self._runner.kv.shape[2], 16, groups=self._runner.config.kv_groups)
        params = SamplingParams(max_output_tokens=NUM_TOKENS, temperature=0.0 if n == 1 else 1.0, seed=7, n=n)
        (completions,) = Engine(self._runner, blocks, VOCAB_SIZE).generate([prompt_of(length)], [params])
        return [completion.token_ids for completion in completions]

    def outputs(self, scenario: Scenario, length: int) -> list[tuple[int, ...]]:
        """The request's sequences as its client would see them."""
        prefill, decode = (
            self._workers[role, *size] for role, size in (("prefill", scenario.prefill), ("decode", scenario.decode))
        )
        name, prompt = f"{scenario} {length}", prompt_of(length)
        if scenario.is_cached:
            self._finish(hand_off(f"{name}, before", prompt, prefill, decode, _how(1)), 1, prefill, decode)
        more = {"bypass_prefix_cache": not scenario.is_cached}
        key = hand_off(name, prompt, prefill, decode, _how(scenario.n), **more)
        if scenario.event == "none":
            return self._finish(key, scenario.n, prefill, decode)
        known = self._known(key, scenario.n, prefill, decode)
        other = self._workers["decode", *next(size for size in DIMENSIONS["decode"] if size != scenario.decode)]
        if scenario.event == "is lost":
            for worker in (prefill, decode):
                worker.send(cancel=worker_pb2.Cancel(key=key.to_proto()))
        source = decode if scenario.event == "moves" else prefill
        tokens = [worker_pb2.KnownTokens(sequence_index=i, token_ids=ids) for i, ids in enumerate(known)]
        again = hand_off(name, prompt, source, other, _how(scenario.n), attempt=2, known_tokens=tokens, **more)
        if scenario.event == "moves":
            decode.send(cancel=worker_pb2.Cancel(key=key.to_proto()))
        rest = self._finish(again, scenario.n, source, other, first=NUM_KNOWN)
        for worker in (prefill, decode):
            worker.wait_idle()
        return [(*before, *after) for before, after in zip(known, rest, strict=True)]

    @staticmethod
    def _known(key: RequestKey, n: int, prefill: Worker, decode: Worker) -> list[tuple[int, ...]]:
        """The first tokens of each sequence, as soon as they are there."""

        def has_enough() -> bool:
            told = [decode.outputs[key].tokens.get(index, {}) for index in range(n)]
            return all(NUM_KNOWN - 1 in tokens for tokens in told)

        decode.wait_for(has_enough)
        prefill.wait_for(lambda: len(prefill.outputs[key].tokens) == n)
        output: Output = merged(key, prefill, decode)
        return [tuple(output.tokens[index][i] for i in range(NUM_KNOWN)) for index in range(n)]

    @staticmethod
    def _finish(key: RequestKey, n: int, prefill: Worker, decode: Worker, first: int = 0) -> list[tuple[int, ...]]:
        """The tokens of each sequence from `first` on, once all have ended and nothing is held."""
        decode.wait_for(lambda: len(decode.outputs[key].finished) == n or decode.outputs[key].failed is not None)
        assert decode.outputs[key].failed is None, decode.outputs[key].failed
        if first == 0 or n == 1:  # known tokens of one sequence are prefilled, and the one behind them is sampled there
            prefill.wait_for(lambda: len(prefill.outputs[key].tokens) == n)
        prefill.wait_idle()
        decode.wait_idle()
        output = merged(key, prefill, decode)
        return [tuple(output.tokens[i][at] for at in range(first, len(output.tokens[i]) + first)) for i in range(n)]


def _how(n: int) -> worker_pb2.Sampling:
    return sampling(max_output_tokens=NUM_TOKENS, temperature=0.0 if n == 1 else 1.0, seed=7, n=n)


@pytest.fixture(scope="module", params=[*KINDS, *FAMILIES])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Fleet]]:
    kind = request.param
    folder = make_checkpoint(kind, tmp_path_factory.mktemp(kind), **(KINDS | FAMILIES)[kind])
    config = read_model(folder)
    sizes = list(itertools.product(("prefill", "decode"), *(TP_SIZES, BLOCK_SIZES)))
    sizes = [size for size in sizes if config.allows_tp_size(size[1])]
    workers = [
        Worker(
            worker_id=f"{role}-tp{tp_size}-b{block_size}",
            role=role,
            model_path=str(folder),
            tp_size=tp_size,
            block_size=block_size,
            kv_cache_tokens=4096,
            max_model_len=1024,
            max_num_batched_tokens=3 * 16 if block_size == 16 else 128,
            max_num_seqs=16,
            chunk_tokens=32,
            transport="shm",
        )
        for role, tp_size, block_size in sizes
    ]
    with running(*workers):
        yield kind, Fleet(folder, dict(zip(sizes, workers, strict=True)))


@pytest.mark.battery
@pytest.mark.timeout(1800)
def test_a_handed_off_request_equals_the_single_process_engine(fleet: tuple[str, Fleet]) -> None:
    kind, workers = fleet
    for scenario, length in zip(scenarios(kind), itertools.cycle(LENGTHS), strict=False):
        assert workers.outputs(scenario, length) == workers.expected(length, scenario.n), f"{kind}: {scenario} {length}"
