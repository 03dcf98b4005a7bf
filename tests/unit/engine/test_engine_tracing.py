"""Whole steps on a CUDA device that is not there (`fake_cuda`): every format, on one rank and on two.

A tensor on the wrong device, types that do not go together, and a value that is read back, for which a GPU would be
waited for, all raise here. What is launched is counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from checkpoints import KINDS, VOCAB_SIZE, make_checkpoint
from engine_steps import step_of
from fake_cuda import DEVICE, EmptyCheckpoint, Launches, Waited, fake_cuda
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import DataDependentOutputException

from engine.attention.registry import ATTENTION_BACKENDS
from engine.decode_inputs import InputMemory, choose_advance
from engine.model_runner import ModelRunner
from engine.quantization.interface import TritonProducts, weight_formats
from engine.sampling.params import SampleRow, SamplingParams
from engine.sampling.sampler import Sampler
from engine.step_input import ScoredSpan, SequenceSlice, StepInput, build_step
from engine.tp import ProcessGroupTP, SingleGroup, TPGroup

BLOCK_SIZE = 256
FORMATS = list(product(("bfloat16", "float16"), weight_formats(), ("auto", "int8", "fp8")))
BACKENDS = [name for name in ("flash_attn", "triton") if name in ATTENTION_BACKENDS]
MOST_LAUNCHES = {
    ("none", "auto"): 9,
    ("int8", "auto"): 9,
    ("int4", "auto"): 9,
    ("fp8", "auto"): 10,
    ("none", "int8"): 9,
    ("none", "fp8"): 9,
}
"""Operations of one layer in a decode step, by the formats of weights and KV. They may only become fewer; no format may
have more than 12."""
SAVED = {("none", "auto"): 7, ("none", "int8"): 25, ("none", "fp8"): 23, ("fp8", "auto"): 34}
"""How many of them plain torch launches beyond the kernels of `engine.triton.fused`."""

DECODE = build_step([SequenceSlice((1,), 7, (block,), True) for block in range(3)], BLOCK_SIZE)
MIXED = build_step(
    [
        SequenceSlice((1,), 300, (3, 4), True),
        SequenceSlice((1,) * 40, 9, (0,), True, ScoredSpan(0, (2,) * 39, 3)),
        SequenceSlice((1,) * 5, 0, (1,), False),
    ],
    BLOCK_SIZE,
    [(5, 6)],
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make_checkpoint(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


def _runner(
    folder: Path, attention: str, tp: TPGroup | None = None, num_blocks: int = 8, **formats: Any
) -> ModelRunner:
    return ModelRunner(
        folder,
        tp=tp or SingleGroup(),
        device="cuda",
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        attention=attention,
        open_weights=EmptyCheckpoint,
        **formats,
    )


def _launched(runner: ModelRunner, step: StepInput, sampled: torch.Tensor | None = None) -> Launches:
    with Launches() as launches:
        output = runner.run(step, sampled=sampled)
    assert not launches.blocking
    assert output.logits.shape == (len(step.logits_indices), VOCAB_SIZE)
    assert output.logits.dtype == torch.float32 and output.logits.device == torch.device(DEVICE)
    assert output.scores is None or output.scores.logprobs.device == torch.device(DEVICE)
    return launches


def test_a_value_that_is_read_and_a_tensor_elsewhere_are_found() -> None:
    with fake_cuda():
        there, here = torch.ones(3, device=DEVICE), torch.ones(3)
        with pytest.raises(DataDependentOutputException):
            there.sum().item()
        with pytest.raises(RuntimeError, match="device"):
            there.add(here)
        with Launches() as launches:
            torch.nn.functional.linear(there[None, 1:], there[:2].expand(4, 2)).view(2, 2)
    assert launches.names == {"aten::mm": 1}


def every_format() -> list[ParameterSet]:
    """`make test` has every other format in bfloat16 on one backend in turn; `make gpu-check` has them all."""
    return [
        pytest.param(
            number,
            formats,
            attention,
            marks=[] if formats[0] == "bfloat16" and number % (2 * len(BACKENDS)) == place else [pytest.mark.battery],
            id=" ".join((*formats, attention)),
        )
        for number, formats in enumerate(FORMATS)
        for place, attention in enumerate(BACKENDS)
    ]


@pytest.mark.parametrize(("number", "formats", "attention"), every_format())
def test_a_step_in_any_format_stays_on_its_device_and_waits_for_nothing(
    folders: dict[str, Path], number: int, formats: tuple[str, str, str], attention: str
) -> None:
    """Of each family in turn; two ranks each launch what the other does."""
    dtype, quantization, kv_cache_dtype = formats
    folder = folders[KINDS[number % len(KINDS)]]
    named = {"dtype": dtype, "quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    with fake_cuda():
        alone = _runner(folder, attention, **named)
        ranks = [
            _runner(folder, attention, ProcessGroupTP(FakeProcessGroup._create_internal(rank, 2)), **named)
            for rank in range(2)
        ]
        ahead = replace(DECODE, token_ids=-DECODE.token_ids)
        sampled = torch.zeros(3, dtype=torch.int32, device=DEVICE)
        assert _launched(alone, ahead, sampled.long()).total > 0
        for step in (DECODE, MIXED):
            assert _launched(alone, step).total > 0
            assert _launched(ranks[0], step).names == _launched(ranks[1], step).names
        for rank in ranks:  # after a step of three rows
            rank.run(DECODE)
        assert _launched(ranks[0], ahead, sampled).names == _launched(ranks[1], ahead).names


@pytest.mark.parametrize("kind", ["mixtral", "qwen2-moe", "qwen3-moe"])
def test_experts_are_chosen_and_multiplied_without_a_wait(kind: str, tmp_path: Path) -> None:
    """How many tokens choose which expert is known to the device alone."""
    sizes = {} if kind == "mixtral" else {"moe_intermediate_size": 32}
    folder = make_checkpoint(kind, tmp_path, dtype="bfloat16", **sizes)
    with fake_cuda():
        alone = _runner(folder, BACKENDS[-1], dtype="bfloat16")
        ranks = [
            _runner(folder, BACKENDS[-1], ProcessGroupTP(FakeProcessGroup._create_internal(rank, 2)), dtype="bfloat16")
            for rank in range(2)
        ]
        for step in (DECODE, MIXED):
            assert any("_grouped_mm" in name for name in _launched(alone, step).names)
            assert _launched(ranks[0], step).names == _launched(ranks[1], step).names


_WIDE = {"moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {},
    "gpt-oss": {"intermediate_size": 64},
    "deepseek-v3": _WIDE,
    "qwen3-next": _WIDE | {"shared_expert_intermediate_size": 32},
    "gemma2": {},
    "phi3": {},
    "granite": {},
    "olmo2": {},
    "olmo3": {},
    "glm4": {},
    "smollm3": {},
    "deepseek-v2": _WIDE,
    "glm4-moe": _WIDE,
}
"""With sizes that a grouped product takes on two ranks. `make test` has the first: windows, sinks, latents, states."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.battery] if n > 1 else []) for n, kind in enumerate(FAMILIES)]
)
def test_a_step_of_any_family_stays_on_its_device_and_waits_for_nothing(kind: str, tmp_path: Path) -> None:
    """On the attention that is chosen for it. The convolution over a prompt of a state has no fake without CUDA."""
    folder = make_checkpoint(kind, tmp_path, dtype="bfloat16", **FAMILIES[kind])
    attention = "auto" if kind.startswith("deepseek") else BACKENDS[-1]
    generated = [SequenceSlice((1,), 7, (block,), True) for block in range(3)]
    mixed = [SequenceSlice((1,), 300, (3, 4), True), SequenceSlice((1,) * 40, 9, (0,), True)]
    with fake_cuda():
        alone, *ranks = (
            _runner(folder, attention, tp, num_blocks=32, dtype="bfloat16")
            for tp in (None, *(ProcessGroupTP(FakeProcessGroup._create_internal(rank, 2)) for rank in range(2)))
        )
        for slices in (generated,) if kind == "qwen3-next" else (generated, mixed):
            step = step_of(alone, slices)
            assert _launched(alone, step).total > 0
            first, second = (_launched(rank, step).names for rank in ranks)
            assert first == second or kind == "gpt-oss"  # of whose outputs' biases the first rank adds all


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_next_step_is_queued_before_the_host_waits_for_the_tokens_of_this_one(
    folders: dict[str, Path], kernels: str
) -> None:
    """A step, the choice of its tokens and the step behind it; then one event."""
    params = [SamplingParams(temperature=0), SamplingParams(seed=1), SamplingParams(top_logprobs=2)]
    with fake_cuda():
        runner = _runner(folders["llama"], BACKENDS[0], dtype="bfloat16", kernels=kernels)
        sampler = Sampler(VOCAB_SIZE, kernels)
        with Launches() as launches:
            logits = runner.run(DECODE).logits
            samples = sampler.launch(logits, [SampleRow(p, 0, (1,), (2,)) for p in params])
            ahead = replace(DECODE, token_ids=np.array([-1, 5, -3], dtype=np.int32))
            assert runner.run(ahead, sampled=samples.token_ids).logits.shape == (3, VOCAB_SIZE)
        assert not launches.blocking
        with pytest.raises(Waited, match="for an event"):
            samples.read()


@pytest.mark.parametrize("formats", list(MOST_LAUNCHES), ids=" ".join)
def test_a_layer_of_a_decode_step_launches_no_more_than_before(
    tmp_path: Path, formats: tuple[str, str], record_property: Any
) -> None:
    names = _of_a_layer(tmp_path, formats)

    record_property("launches of a layer", names.total())
    assert names.total() <= MOST_LAUNCHES[formats] <= 12, names
    assert names["triton::add_rms_norm"] == 2
    assert names["triton::silu_and_mul"] == names["triton::turn_and_store"] == 1


@pytest.mark.parametrize(("capability", "most"), [((8, 0), 9), ((8, 9), 10)], ids=["A100", "L40S"])
def test_only_gpus_that_multiply_in_fp8_round_what_attention_gives(
    tmp_path: Path, capability: tuple[int, int], most: int
) -> None:
    names = _of_a_layer(tmp_path, ("fp8", "auto"), capability=capability)

    assert names.total() <= most, names
    assert (names["aten::_scaled_mm"], names["triton::quantized_product"]) == ((4, 0) if most == 10 else (0, 4))
    assert names["triton::round_rows"] == most - 9


@pytest.mark.parametrize("quantization", weight_formats())
def test_a_deterministic_step_has_no_kernel_whose_tiles_depend_on_the_step(tmp_path: Path, quantization: str) -> None:
    names = _of_a_layer(tmp_path, (quantization, "auto"), deterministic=True)

    assert names == {
        "triton::add_rms_norm": 2,
        "triton::quantized_product": 4,
        "triton::turn_and_store": 1,
        "triton::fixed_tiles": 1,
        "triton::fixed_join": 1,
        "triton::silu_and_mul": 1,
    }


@pytest.mark.parametrize("formats", list(SAVED), ids=" ".join)
def test_fused_kernels_save_launches(tmp_path: Path, formats: tuple[str, str]) -> None:
    fused, plain = (_of_a_layer(tmp_path / kernels, formats, kernels=kernels) for kernels in ("auto", "torch"))

    assert plain.total() - fused.total() == SAVED[formats], (fused, plain)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # to see whether tokens are in place
@pytest.mark.parametrize(("kernels", "most"), [(TritonProducts(), 1), (None, 18)], ids=["triton", "torch"])
def test_a_recorded_step_begins_with_one_launch_and_sends_only_what_is_new(
    kernels: TritonProducts | None, most: int, record_property: Any
) -> None:
    """A step that goes on sends nothing, one with a new block a copy that is put to its place by one launch more."""
    if kernels is not None:
        pytest.importorskip("triton", reason="triton has no build for this platform")
    steps = [
        build_step([SequenceSlice((-1,), position, (4, 7)[: position // 16 + 1], True)], 16)
        for position in (14, 15, 16)
    ]
    with fake_cuda(), torch.no_grad():
        memory = InputMemory(8, 4, 16, 99, torch.device(DEVICE), choose_advance(kernels))
        memory.fill(steps[0], 1, memory.sampled[:1])
        launched = []
        for step in steps[1:]:
            with Launches() as launches:
                memory.fill(step, 1, memory.sampled[:1])
            assert not launches.blocking
            launched.append(dict(launches.names))
        with Launches() as launches:
            memory.advance(8)
        record_property("launches of a recording before its model", launches.total)
    assert launched == [{}, {"aten::copy_": 1, "aten::index_copy_": 1}]
    assert launches.total <= most, launches.names


def _of_a_layer(
    tmp_path: Path, formats: tuple[str, str], *, capability: tuple[int, int] = (9, 0), **options: Any
) -> Counter[str]:
    """Launches of one layer of a decode step in bfloat16."""
    named = {"dtype": "bfloat16", "quantization": formats[0], "kv_cache_dtype": formats[1], **options}
    folders = [make_checkpoint("llama", tmp_path / str(count), num_hidden_layers=count) for count in (1, 3)]
    with fake_cuda(capability):
        few, many = (_launched(_runner(folder, BACKENDS[-1], **named), DECODE).names for folder in folders)
    return Counter({name: (many[name] - few[name]) // 2 for name in many if many[name] > few[name]})
