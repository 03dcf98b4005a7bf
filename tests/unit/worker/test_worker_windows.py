"""Layers that keep a window or a state of a sequence beside layers that keep all: the real core and the real engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from engine_steps import make_runner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.failure_detector import FailureTimeouts
from cluster.kv_groups import KvGroup, group_layers
from cluster.pb import generation_pb2, worker_pb2
from cluster.settings import WorkerSettings
from engine.kv.block_manager import BlockManager
from engine.model_runner import ModelRunner
from engine.sampling.params import SampledToken, SampleRow
from engine.sampling.sampler import Sampler
from engine.sequence import most_blocks
from engine.step_input import StepInput
from worker.core import Core, Inbox
from worker.handoff_connection import HandoffContext
from worker.handoff_metrics import HandoffMetrics
from worker.steps import StepLog

NUM_OUTPUT = 24
LENGTHS = (1, 15, 16, 17, 100, 1000)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {"sliding_window": 40}),
    "gemma2, window of 5": ("gemma2", {"sliding_window": 5}),
    "gemma3": ("gemma3", {}),
    "gpt-oss": ("gpt-oss", {}),
    "gpt-oss, window of 5": ("gpt-oss", {"sliding_window": 5, "num_key_value_heads": 1, "head_dim": 24}),
    "mistral": ("mistral", {}),
    "mistral, window of 3": ("mistral", {"sliding_window": 3}),
    **{kind: (kind, {}) for kind in ("deepseek-v2", "deepseek-v3", "qwen3-next")},
    "qwen3": ("qwen3", {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 2}),
}
IN_SHORT = ("gemma2, window of 5", "gpt-oss", "mistral, window of 3", "deepseek-v3", "qwen3-next")
"""Of each kind of KV one; the rest is a battery's."""
LAYERS: list[Any] = [
    *[((None, 5), ()), ((None, 1), ()), ((3, 3), ()), ((None, 2, 7), ()), ((6, None, 6, 6), ()), ((17,), ())],
    *[((2, None), (0,)), ((2, 2, 2, None), (0, 1, 2)), ((None, 2, 6), (1,)), ((2, 2, None), (0,)), ((2,), (0,))],
]
"""Windows of a model's layers, and its layers with a state."""

POOLS = [("gemma2, window of 5", 20), ("gemma3", 40), ("mistral", 6), ("qwen3-next", 24), ("deepseek-v2", 16)]


class _Step:
    is_done = True
    span = None

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def sample(self, rows: Sequence[Sequence[SampleRow]]) -> None:
        self._rows = [row for of_one in rows for row in of_one]
        counts = torch.tensor([len(of_one) for of_one in rows], dtype=torch.int64)
        self._logits = self._logits.repeat_interleave(counts, dim=0)

    def tokens(self) -> list[SampledToken]:
        return Sampler(VOCAB_SIZE).sample(self._logits, self._rows)

    def scores(self) -> list[SampledToken]:
        return []


class _Ranks:
    """One rank, which computes a step when it is launched."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self.num_steps = runner, 0

    def launch(self, step: StepInput, rows: object = None) -> _Step:
        self.num_steps += 1
        return _Step(self._runner.forward(StepInput.from_bytes(step.to_bytes())))


class NoRanks:
    """Steps that compute nothing."""

    num_steps = 0

    def launch(self, step: StepInput, rows: object = None) -> _Step:
        assert (step.slot_mapping >= 0).all()
        return _Step(torch.zeros(len(step.logits_indices), VOCAB_SIZE))


class HashedPages:
    """Ranks whose KV is a hash of the tokens so far, (before the token, behind it), in each group's slots; of a state
    in the first of a block. A step reads all that its tokens see, and fails where that is not of its sequence."""

    def __init__(self, groups: Sequence[KvGroup], num_blocks: int, block_size: int) -> None:
        self.num_steps, self._size, self._groups = 0, block_size, groups
        self._slots = np.zeros((len(groups), num_blocks * block_size, 2), dtype=np.int64)

    def launch(self, step: StepInput, rows: object = None) -> _HashedStep:
        self.num_steps += 1
        assert (step.slot_mapping >= 0).all(), "a token has no place"
        if step.has_unread_tokens:
            step = step.with_tokens(np.array(self.latest.sampled, dtype=np.int32))
        for source, target in step.block_copies.tolist():
            for slots in self._slots:
                slots.reshape(-1, self._size, 2)[target] = slots.reshape(-1, self._size, 2)[source]
        states = [self._write(step, sequence) for sequence in range(len(step.seqlens_k))]
        ends = [step.cu_seqlens_q[1:].tolist().index(row + 1) for row in step.logits_indices.tolist()]
        self.latest = _HashedStep([states[sequence] for sequence in ends])
        return self.latest

    def _write(self, step: StepInput, sequence: int) -> int:
        rows = range(*step.cu_seqlens_q[sequence : sequence + 2].tolist())
        position = int(step.positions[rows[0]])
        before = 0 if position == 0 else -1
        for place, group in enumerate(self._groups):
            own, pages, first = step.of_group(place), self._slots[place], group.first_seen(position)
            at = np.arange(first, position)
            inner = at % self._size * (not group.has_state)
            seen = pages[own.block_tables[sequence][at // self._size] * self._size + inner]
            assert (seen[1:, 0] == seen[:-1, 1]).all(), f"tokens from {first} on are not one sequence's in {group}"
            assert first or not len(seen) or seen[0, 0] == 0, "a sequence does not begin at its beginning"
            if len(seen):
                assert before in (-1, seen[-1, 1]), "groups have the KV of different tokens"
                before = int(seen[-1, 1])
            state = before
            assert state >= 0, "the first group sees nothing"
            for row in rows:
                after = following(state, int(own.token_ids[row]))
                slot = own.slot_mapping[row]
                pages[slot - slot % self._size * group.has_state] = state, after
                state = after
        return state


def following(state: int, token_id: int) -> int:
    return (state * 1_000_003 + token_id + 1) % (1 << 31)


def next_token(state: int, index: int) -> int:
    return (state // 7 + index) % 4 + 1


class _HashedStep:
    is_done = True
    span = None

    def __init__(self, states: list[int]) -> None:
        self._states = states

    def sample(self, rows: Sequence[Sequence[SampleRow]]) -> None:
        self.sampled = [
            next_token(state, row.sequence_index)
            for state, of_one in zip(self._states, rows, strict=True)
            for row in of_one
        ]

    def tokens(self) -> list[SampledToken]:
        return [SampledToken(token_id) for token_id in self.sampled]

    def scores(self) -> list[SampledToken]:
        return []


class Bench:
    """A decode worker that computes its prompts itself."""

    def __init__(
        self,
        runner: ModelRunner | None,
        budget: int = 2048,
        *,
        ranks: Any = None,
        num_blocks: int | None = None,
        blocks: BlockManager | None = None,
        overlaps: bool = False,
    ) -> None:
        of_worker = WorkerSettings.from_values(
            worker_id="decode-0", role="decode", model_path="", max_num_batched_tokens=budget
        )
        nobody: Any = None  # nothing is handed over here
        inbox = Inbox()
        if blocks is None:
            assert runner is not None
            groups = runner.config.kv_groups
            blocks = BlockManager(num_blocks or runner.kv.shape[2], runner.block_size, groups=groups)
        self.blocks = blocks
        self.core = Core(
            inbox,
            ranks or _Ranks(cast(ModelRunner, runner)),
            self.blocks,
            HandoffContext(inbox.post, nobody, nobody, FailureTimeouts(1.0, 2.0, 3.0), HandoffMetrics()),
            nobody,
            of_worker,
            max_model_len=1 << 16,
            vocab_size=VOCAB_SIZE,
            step_log=StepLog(None),
            overlaps=overlaps,
        )
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.num_cached: dict[str, int] = {}
        self.core.session_opened(self._told, worker_pb2.WorkerInfo())

    def admit(self, name: str, prompt: Sequence[int], *, n: int = 1, most: int = NUM_OUTPUT) -> None:
        sampling = worker_pb2.Sampling(
            params=generation_pb2.SamplingParams(temperature=0, n=n),
            stopping=generation_pb2.StoppingCriteria(max_output_tokens=most, ignore_eos=True),
        )
        key = worker_pb2.RequestKey(request_id=name, attempt=1)
        admit = worker_pb2.Admit(key=key, role=worker_pb2.ROLE_DECODE, prompt_token_ids=prompt, sampling=sampling)
        self.core.command(self._told, worker_pb2.Command(admit=admit))

    def run(self) -> int:
        """Until nothing is left to do; returns the most blocks that were held."""
        most = 0
        while self.core.turn(wait=False):
            self.blocks.check()
            most = max(most, self.blocks.num_held)
        assert self.blocks.num_held == 0
        return most

    def output(self, name: str, index: int = 0) -> list[int]:
        return self.outputs[name, index]

    def _told(self, events: list[worker_pb2.Event]) -> None:
        for event in events:
            if event.HasField("tokens"):
                told = self.outputs.setdefault((event.tokens.key.request_id, event.tokens.sequence_index), [])
                told += event.tokens.token_ids
            if event.HasField("phase") and event.phase.phase == generation_pb2.Heartbeat.PHASE_PREFILL:
                self.num_cached[event.phase.key.request_id] = event.phase.num_cached_tokens


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def make(name: str) -> Path:
        kind, fields = MODELS[name]
        return make_checkpoint(kind, tmp_path_factory.mktemp(kind), **fields)

    return cache(make)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()


def expected(folder: Path, prompt: Sequence[int], num_output: int = NUM_OUTPUT) -> list[int]:
    """The greedy tokens of transformers."""
    model = _reference(folder)
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=num_output, min_new_tokens=num_output, do_sample=False)
    return out[0, len(prompt) :].tolist()


@cache
def _reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        pytest.param(name, budget, marks=[] if budget == 100 and name in IN_SHORT else [pytest.mark.battery])
        for name in MODELS
        for budget in (2048, 100)
    ],
)
def test_greedy_tokens_are_those_of_transformers(folder_of: Any, name: str, budget: int) -> None:
    """All prompts share steps, in one chunk and in several."""
    folder = folder_of(name)
    bench = Bench(make_runner(folder, num_blocks=200), budget)
    for length in LENGTHS:
        bench.admit(f"{length}", prompt_of(length))
    bench.run()

    for length in LENGTHS:
        assert bench.output(f"{length}") == expected(folder, prompt_of(length)), length


@pytest.mark.parametrize("name", ["gemma3", "mistral, window of 3", "qwen3-next", "deepseek-v3"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_sequences_of_one_prompt_share_its_windows(folder_of: Any, name: str, kv_cache_dtype: str) -> None:
    folder = folder_of(name)
    block_size = 32 if name == "qwen3-next" and kv_cache_dtype == "int8" else 16  # which has room for a state
    runner = make_runner(folder, num_blocks=200, block_size=block_size, kv_cache_dtype=kv_cache_dtype)
    for length in (15, 16, 17, 100):
        bench = Bench(runner)
        bench.admit("three", prompt_of(length), n=3)
        bench.admit("one", prompt_of(length))
        bench.run()

        assert bench.output("three", 0) == bench.output("three", 1) == bench.output("three", 2) == bench.output("one")
        if kv_cache_dtype == "auto":
            assert bench.output("one") == expected(folder, prompt_of(length))


@pytest.mark.parametrize(("name", "num_blocks"), POOLS)
def test_preempted_sequences_go_on_with_the_same_tokens(
    folder_of: Any, name: str, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(name)
    if name == "qwen3-next":  # else one has no room
        monkeypatch.setattr("engine.sequence.AHEAD_TOKENS", 32)
    bench = Bench(make_runner(folder, num_blocks=num_blocks), num_blocks=num_blocks)
    prompts = [prompt_of(length, seed=1) for length in (10, 11, 14)]
    for number, prompt in enumerate(prompts):
        bench.admit(f"{number}", prompt, most=100)
    bench.run()

    assert bench.core.decode.num_preemptions > 0
    assert [bench.output(f"{number}") for number in range(3)] == [expected(folder, one, 100) for one in prompts]


@pytest.mark.parametrize("name", ["gemma2, window of 5", "gemma3", "mistral, window of 3", "qwen3-next", "deepseek-v3"])
def test_a_conversation_goes_on_from_the_prefix_cache(folder_of: Any, name: str) -> None:
    """Also after the beginning of what the windows kept has been evicted."""
    folder = folder_of(name)
    bench = Bench(make_runner(folder, num_blocks=24))
    first = prompt_of(150)
    bench.admit("first", first)
    bench.run()
    second = [*first, *bench.output("first"), *prompt_of(20)]
    bench.admit("second", second)
    bench.run()
    assert bench.output("second") == expected(folder, second)
    assert bench.num_cached["second"] == (150 + NUM_OUTPUT - 1) // 16 * 16

    for seed in range(3):  # others take the blocks
        bench.admit(f"other {seed}", prompt_of(200, seed))
        bench.run()
    bench.admit("again", second)
    bench.run()
    assert bench.output("again") == expected(folder, second)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_every_step_reads_its_own_tokens_in_every_group(data: st.DataObject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that begin alike, several sequences of one, a pool that is too small, steps that overlap."""
    monkeypatch.setattr("engine.sequence.AHEAD_TOKENS", data.draw(st.sampled_from([4, 9, 2048])))
    windows, states = data.draw(st.sampled_from(LAYERS))
    groups, size = group_layers(windows, states), data.draw(st.sampled_from([1, 4]))
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
    output = data.draw(st.integers(1, 20))
    least = most_blocks(groups, 80, size) + 6 * len(groups)
    num_blocks = least + data.draw(st.integers(0, 2 * least))
    blocks = BlockManager(num_blocks, size, groups=groups)
    bench = Bench(
        None,
        data.draw(st.integers(3, 40)),
        ranks=HashedPages(groups, num_blocks, size),
        blocks=blocks,
        overlaps=data.draw(st.booleans()),
    )
    requests = {}
    for number, length in enumerate(lengths):
        shared, n = data.draw(st.integers(0, length)), data.draw(st.integers(1, 3))
        prompt = [*([1, 2, 3] * 20)[:shared], *([number + 5] * (length - shared))]
        requests[f"{number}"] = prompt, n
        bench.admit(f"{number}", prompt, n=n, most=output)
        for _ in range(data.draw(st.integers(0, 5))):
            bench.core.turn(wait=False)
    bench.run()

    for name, (prompt, n) in requests.items():
        for index in range(n):
            state, expected_tokens = 0, []
            for token_id in prompt:
                state = following(state, token_id)
            for _ in range(output):
                expected_tokens.append(next_token(state, index))
                state = following(state, expected_tokens[-1])
            assert bench.output(name, index) == expected_tokens
