"""The disaggregated path equals the single-process engine, whatever the layers of a model keep of a sequence, and sends
what decode needs of each group of layers: all, a window, a latent, the newest state.

`make test` hands requests over between some pairs of sizes for each kind of KV (whole KV alone:
test_integration_handoff.py). `make families` takes one model of each kind through every combination of tensor-parallel
sizes, block sizes, prefix cache, what befalls the request, and number of sequences, and each other family, and latents
that ranks divide among them, through combinations in which every pair of values occurs.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
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
from engine.models.config import ModelConfig
from engine.models.folder import read_model
from engine.sampling.params import SamplingParams
from kv_transfer.codec import HEADER_BYTES

NUM_TOKENS = 14
NUM_KNOWN = 5
"""Tokens that each sequence has when its request moves, or loses its worker."""
LENGTHS = (17, 101, 300)
TP_SIZES = (1, 2, 4)
BLOCK_SIZES = (16, 32)
EVENTS = ("none", "moves", "is lost")
DIMENSIONS = {
    "prefill": tuple(itertools.product(TP_SIZES, BLOCK_SIZES)),
    "decode": tuple(itertools.product(TP_SIZES, BLOCK_SIZES)),
    "is_cached": (False, True),
    "event": EVENTS,
    "n": (1, 3),
}
WINDOW = 24
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3": {"sliding_window": WINDOW},
    "deepseek-v3": {},
    "qwen3-next": {"num_key_value_heads": 1, "head_dim": 64},
}
"""By kind of KV: all of a sequence, a window, a latent, a recurrent state. In the last, ranks outnumber KV heads."""
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

SOME_KINDS = ("gemma3", "deepseek-v3", "qwen3-next")
SOME_PAIRS = [((1, 16), (2, 16)), ((2, 32), (1, 16))]
"""What `make test` runs; of a pair, tensor-parallel and block size of the prefill worker, and of the decode worker."""
OTHERS: list[dict[str, Any]] = [
    {"transport": "shm_pages", "tp_size": 2},
    {"transport": "gloo", "kv_cache_dtype": "int8", "block_size": 64},
]
Size = tuple[str, int, int]
"""A role, and a worker's tensor-parallel and block size."""


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


class One:
    """One process that generates by itself."""

    def __init__(self, folder: Path, kv_cache_dtype: str = "auto", block_size: int = 16) -> None:
        self._runner = make_runner(
            folder, num_blocks=256, block_size=block_size, attention="cpu", kv_cache_dtype=kv_cache_dtype
        )
        self._block_size = block_size

    def generate(self, length: int, n: int) -> list[tuple[int, ...]]:
        """Each sequence's tokens behind `prompt_of(length)`."""
        return self.go_on(prompt_of(length), n)

    def go_on(self, prompt: list[int], n: int = 1) -> list[tuple[int, ...]]:
        blocks = BlockManager(self._runner.kv.shape[2], self._block_size, groups=self._runner.config.kv_groups)
        params = SamplingParams(max_output_tokens=NUM_TOKENS, temperature=0.0 if n == 1 else 1.0, seed=7, n=n)
        engine = Engine(self._runner, blocks, VOCAB_SIZE, step_tokens(self._block_size))
        (completions,) = engine.generate([prompt], [params])
        return [completion.token_ids for completion in completions]


class Fleet:
    """A worker of each role and size of one model, and the tokens that one process generates."""

    def __init__(self, folder: Path, workers: dict[Size, Worker]) -> None:
        self.folder, self.config, self.workers = folder, read_model(folder), workers
        self.expected = cache(One(folder).generate)

    def outputs(self, scenario: Scenario, length: int) -> list[tuple[int, ...]]:
        """The request's sequences as its client would see them."""
        prefill, decode = (
            self.workers[role, *size] for role, size in (("prefill", scenario.prefill), ("decode", scenario.decode))
        )
        name, prompt = f"{scenario} {length}", prompt_of(length)
        if scenario.is_cached:
            self._finish(hand_off(f"{name}, before", prompt, prefill, decode, _how(1)), 1, prefill, decode)
        more = {"bypass_prefix_cache": not scenario.is_cached}
        key = hand_off(name, prompt, prefill, decode, _how(scenario.n), **more)
        if scenario.event == "none":
            return self._finish(key, scenario.n, prefill, decode)
        known = self._known(key, scenario.n, prefill, decode)
        decoding = {(tp, block): worker for (role, tp, block), worker in self.workers.items() if role == "decode"}
        other = next(worker for size, worker in decoding.items() if size != scenario.decode)
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

    @classmethod
    def of_prompt(cls, name: str, prompt: list[int], source: Worker, decode: Worker) -> tuple[int, ...]:
        """The tokens of one sequence, by what `source` and `decode` have of its prompt already."""
        (tokens,) = cls._finish(hand_off(name, prompt, source, decode, _how(1)), 1, source, decode)
        return tokens

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


def make_worker(folder: Path, role: str, tp_size: int, block_size: int, **more: Any) -> Worker:
    return Worker(
        worker_id=f"{role}-tp{tp_size}-b{block_size}",
        role=role,
        model_path=str(folder),
        tp_size=tp_size,
        block_size=block_size,
        kv_cache_tokens=4096,
        max_model_len=1024,
        max_num_batched_tokens=step_tokens(block_size),
        max_num_seqs=16,
        chunk_tokens=32,
        **{"transport": "shm", **more},
    )


def step_tokens(block_size: int) -> int:
    """Workers of blocks of 16 compute most prompts in several steps."""
    return 3 * 16 if block_size == 16 else 128


@contextmanager
def running_fleet(kind: str, folder: Path, sizes: Iterable[Size], split: Collection[str] = ()) -> Iterator[Fleet]:
    """`split`: the roles whose ranks divide latents among them."""
    make_checkpoint(kind, folder, **(KINDS | FAMILIES)[kind])
    config = read_model(folder)
    fitting = [size for size in sizes if config.allows_tp_size(size[1])]
    workers = {size: make_worker(folder, *size, split_latents=size[0] in split) for size in fitting}
    with running(*workers.values()):
        yield Fleet(folder, workers)


@pytest.fixture(scope="module", params=SOME_KINDS)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    sides = [("prefill", *prefill) for prefill, _ in SOME_PAIRS] + [("decode", *decode) for _, decode in SOME_PAIRS]
    with running_fleet(request.param, tmp_path_factory.mktemp(request.param), dict.fromkeys(sides)) as made:
        yield made


@pytest.mark.timeout(300)
@pytest.mark.parametrize("pair", SOME_PAIRS, ids=str)
def test_a_request_goes_from_worker_to_worker(pair: tuple[tuple[int, int], tuple[int, int]], fleet: Fleet) -> None:
    for length, n in [*((length, 1) for length in (1, 16, WINDOW, 300)), (WINDOW - 1, 3), (101, 3)]:
        outputs = fleet.outputs(Scenario(*pair, is_cached=False, event="none", n=n), length)
        assert outputs == fleet.expected(length, n), (length, n)


def bytes_of(config: ModelConfig, num_tokens: int) -> int:
    """What is kept of so many tokens by layers that keep all or a window of w, of which w - 1 are still seen."""
    windows = [window for layer, window in enumerate(config.layer_windows) if layer not in config.state_layers]
    cells = sum(num_tokens if window is None else min(num_tokens, window - 1) for window in windows)
    return cells * config.num_kv_planes * config.num_key_value_heads * config.head_dim * 4


def bytes_of_states(config: ModelConfig) -> int:
    net = config.delta_net
    return 0 if net is None else len(config.state_layers) * net.state.size_bytes(net.num_key_heads)


def test_what_is_sent_is_what_decode_needs_and_a_header_for_each_chunk(fleet: Fleet) -> None:
    length, sender = 203, (1, 16)
    for receiver in ((1, 16), (2, 16)):
        prefill, decode = fleet.workers["prefill", *sender], fleet.workers["decode", *receiver]
        before = prefill.stats.kv_bytes_sent, decode.stats.kv_bytes_received
        fleet.outputs(Scenario(sender, receiver, is_cached=False, event="none", n=1), length)
        sent, received = prefill.stats.kv_bytes_sent - before[0], decode.stats.kv_bytes_received - before[1]
        # Each receiving rank has a latent whole; so it has a KV head where ranks outnumber those.
        copies = receiver[0] if fleet.config.num_key_value_heads == 1 else 1
        wanted = copies * bytes_of(fleet.config, length) + bytes_of_states(fleet.config)
        assert wanted < sent == received < 1.1 * wanted
        assert (sent - wanted) % HEADER_BYTES == 0


def test_a_conversation_goes_on_with_what_both_workers_have(fleet: Fleet) -> None:
    """The second turn, and then the move of its sequence to another decode worker, which takes what it lacks."""
    prefill, decode, other = (fleet.workers[key] for key in (("prefill", 1, 16), ("decode", 1, 16), ("decode", 2, 16)))
    first = prompt_of(150)
    turns = [*first, *fleet.of_prompt("first", first, prefill, decode), *prompt_of(40)]
    before = decode.stats.kv_bytes_received
    second = fleet.of_prompt("second", turns, prefill, decode)
    received = decode.stats.kv_bytes_received - before
    assert [second] == One(fleet.folder).go_on(turns)
    new = len(turns) - (len(first) + NUM_TOKENS - 1) // 16 * 16
    assert received < 1.2 * (bytes_of(fleet.config, new) + bytes_of_states(fleet.config))
    assert fleet.of_prompt("moved", [*turns, *second[:5]], decode, other)[:9] == second[5:]


@pytest.mark.parametrize("more", OTHERS, ids=str)
def test_other_transports_and_rounded_kv_give_one_workers_tokens(fleet: Fleet, more: dict[str, Any]) -> None:
    how = {"tp_size": 1, "block_size": 16, **more}
    one = One(fleet.folder, str(how.get("kv_cache_dtype", "auto")), how["block_size"])
    sides = [make_worker(fleet.folder, role, **how) for role in ("prefill", "decode")]
    with running(*sides) as (prefill, decode):
        for length in (17, 300):
            tokens = fleet.of_prompt(f"{length}", prompt_of(length), prefill, decode)
            assert [tokens] == one.generate(length, 1), length


SPLITS = [("prefill", "decode"), ("prefill",), ("decode",)]
"""Roles whose ranks divide latents among them; `make test` has the first."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("split", "decode"), [(SPLITS[0], (2, 16)), pytest.param(SPLITS[2], (4, 16), marks=pytest.mark.battery)], ids=str
)
def test_ranks_that_divide_latents_hand_requests_over_to_any_other(
    split: tuple[str, ...], decode: tuple[int, int], tmp_path: Path
) -> None:
    """A move or a loss goes on at a worker of other sizes. Of latents that both sides divide, each is sent once."""
    prefill = (2, 16)
    sizes = [("prefill", *prefill), ("decode", *decode), ("decode", 1, 32)]
    with running_fleet("deepseek-v3", tmp_path, sizes, split) as fleet:
        for length, n, is_cached, event in [
            *((length, 1, False, "none") for length in (1, 15, 16, 17, 300)),
            *((101, *how) for how in [(1, True, "moves"), (3, False, "moves"), (3, True, "is lost")]),
        ]:
            scenario = Scenario(prefill, decode, is_cached, event, n)
            assert fleet.outputs(scenario, length) == fleet.expected(length, n), f"{scenario} {length}"
        sender, receiver = fleet.workers["prefill", *prefill], fleet.workers["decode", *decode]
        before = sender.stats.kv_bytes_sent, receiver.stats.kv_bytes_received
        fleet.outputs(Scenario(prefill, decode, is_cached=False, event="none", n=1), 203)
        sent, received = sender.stats.kv_bytes_sent - before[0], receiver.stats.kv_bytes_received - before[1]
        copies = 1 if "decode" in split else 4
        assert copies * bytes_of(fleet.config, 203) < sent == received < 1.3 * copies * bytes_of(fleet.config, 203)


@pytest.mark.parametrize("more", OTHERS, ids=str)
def test_other_transports_and_rounded_latents_are_divided_too(more: dict[str, Any], tmp_path: Path) -> None:
    make_checkpoint("deepseek-v2", tmp_path)
    how = {"block_size": 16, **more, "tp_size": 2, "expert_parallel": 2, "split_latents": True}
    one = One(tmp_path, str(how.get("kv_cache_dtype", "auto")), how["block_size"])
    sides = [make_worker(tmp_path, role, **how) for role in ("prefill", "decode")]
    with running(*sides) as (prefill, decode):
        assert {side.info.transport for side in (prefill, decode)} == {more["transport"]}
        for length in (17, 300):
            tokens = Fleet.of_prompt(f"{length}", prompt_of(length), prefill, decode)
            assert [tokens] == one.generate(length, 1), length


@pytest.mark.battery
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_scenario_of_divided_latents_equals_the_single_process_engine(
    split: tuple[str, ...], tmp_path: Path
) -> None:
    sizes = itertools.product(("prefill", "decode"), TP_SIZES, BLOCK_SIZES)
    with running_fleet("deepseek-v3", tmp_path, sizes, split) as fleet:
        for scenario, length in zip(scenarios("deepseek-v2"), itertools.cycle(LENGTHS), strict=False):
            assert fleet.outputs(scenario, length) == fleet.expected(length, scenario.n), f"{scenario} {length}"


@pytest.mark.battery
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", [*KINDS, *FAMILIES])
def test_every_scenario_equals_the_single_process_engine(kind: str, tmp_path: Path) -> None:
    sizes = itertools.product(("prefill", "decode"), TP_SIZES, BLOCK_SIZES)
    with running_fleet(kind, tmp_path, sizes) as fleet:
        for scenario, length in zip(scenarios(kind), itertools.cycle(LENGTHS), strict=False):
            assert fleet.outputs(scenario, length) == fleet.expected(length, scenario.n), f"{scenario} {length}"
