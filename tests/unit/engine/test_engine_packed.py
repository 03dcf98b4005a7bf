"""Checkpoints in fewer bits: they are the model that transformers computes with the weights they stand for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_steps import make_runner, on_each_rank, run_in_chunks
from packed_checkpoints import Format, edit_config, make_packed, pack_layer
from safetensors.torch import load_file, save_file
from thread_group import ThreadGroup

from cluster.errors import CheckpointError
from engine.checkpoint import Checkpoint, TensorSlice
from engine.models.folder import read_model
from engine.quantization.packed import read_codes
from engine.quantization.stored import Packing
from engine.tp import SingleGroup

IDS = [(i * 37) % 317 + 3 for i in range(60)]
GROUP_SIZES = (32, 64, 128, -1)
FORMATS = [
    *(Format("awq", group_size) for group_size in GROUP_SIZES),
    *(
        Format("gptq", group_size, is_symmetric=is_symmetric, is_shuffled=is_shuffled)
        for group_size, is_symmetric, is_shuffled in product(GROUP_SIZES, (True, False), (True, False))
    ),
    Format("gptq", layout="gptq_v2"),
    Format("gptq", layout="gptq_v2", is_symmetric=True, is_shuffled=True),
    Format("gptq", bits=8),
    Format("gptq", bits=8, is_symmetric=True, is_shuffled=True, group_size=32),
    Format("gptq", bits=8, layout="gptq_v2"),
    *(
        Format("compressed-tensors", 64, is_symmetric=is_symmetric, is_shuffled=is_shuffled, layout="pack-quantized")
        for is_symmetric, is_shuffled in product((True, False), (True, False))
    ),
    Format("compressed-tensors", strategy="channel", is_symmetric=True, layout="pack-quantized"),
    Format("compressed-tensors", 32, bits=8, is_symmetric=True, layout="pack-quantized"),
]
IN_GROUPS_OF_32 = [Format("awq", 32), Format("gptq", 32), Format("gptq", 32, is_shuffled=True)]
Q_PROJ = "model.layers.1.self_attn.q_proj"


def name_of(fmt: Format) -> str:
    sym, order = "sym" if fmt.is_symmetric else "asym", "desc_act" if fmt.is_shuffled else "in order"
    return f"{fmt.layout or fmt.method} {fmt.bits} bits, group {fmt.group_size}, {sym}, {order}, {fmt.strategy}"


def reference_logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


def logits_of(folder: Path, tp_size: int = 1, **wanted: Any) -> torch.Tensor:
    def work(tp: SingleGroup | ThreadGroup) -> torch.Tensor:
        return run_in_chunks(make_runner(folder, tp=tp, **wanted), IDS, [len(IDS)])

    return on_each_rank(tp_size, work)[0]


@pytest.mark.parametrize(
    "fmt", [pytest.param(f, marks=[pytest.mark.battery] if n % 2 else [], id=name_of(f)) for n, f in enumerate(FORMATS)]
)
def test_logits_are_those_of_transformers_on_one_rank_and_on_two(fmt: Format, tmp_path: Path) -> None:
    packed, plain = make_packed(fmt, tmp_path)

    expected = reference_logits(plain)

    for tp_size in (1, 2):
        assert (logits_of(packed, tp_size) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("kind", "tp_size"), [("qwen2", 4), ("qwen3", 4), ("mistral", 8)])
def test_other_models_and_more_ranks(kind: str, tp_size: int, tmp_path: Path) -> None:
    """Biases stay plain; eight ranks cut the MLP's inputs every 48, and two of them share a KV head."""
    packed, plain = make_packed(Format("awq", 64), tmp_path, kind)

    assert (logits_of(packed, tp_size) - reference_logits(plain)).abs().max() < 1e-4


def layer_in(folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    save_file({f"layer.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return Checkpoint(folder)


def packing(method: Any, **changes: Any) -> Packing:
    fields = {"bits": 4, "group_size": 8, "is_symmetric": False, "has_lowered_zeros": False, "has_order": False}
    return Packing(method, **{**fields, **changes})


@pytest.mark.parametrize("group_size", [None, 1, 8, 1 << 70])
def test_awq_by_hand(group_size: int | None, tmp_path: Path) -> None:
    """One input of eight outputs with codes 0 to 7, and zero points 8 to 15: in a word 0, 2, 4, 6, 1, 3, 5, 7."""
    tensors = {
        "qweight": torch.tensor([[0x75316420]], dtype=torch.int32),
        "qzeros": torch.tensor([[0xFDB9ECA8 - (1 << 32)]], dtype=torch.int32),
        "scales": torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0.5]], dtype=torch.float16),
    }

    with layer_in(tmp_path, tensors) as checkpoint:
        codes = read_codes(checkpoint, packing("awq", group_size=group_size), TensorSlice("layer.weight", (8, 1)))
    weight = torch.empty(8, 1)
    codes.decode(weight)

    assert codes.codes.flatten().tolist() == list(range(8)) and codes.zeros.flatten().tolist() == list(range(8, 16))
    assert weight.flatten().tolist() == [-8, -16, -24, -32, -40, -48, -56, -4]


def test_gptq_by_hand(tmp_path: Path) -> None:
    """Eight inputs of eight outputs; output o has the codes o, o + 1, ..., and a zero point of o, stored less one."""
    words = [sum((output + place) % 16 << 4 * place for place in range(8)) for output in range(8)]
    zeros = 0x76543210 - 0x11111111
    tensors = {
        "qweight": torch.tensor([words]).to(torch.int32),
        "qzeros": torch.tensor([[zeros]], dtype=torch.int32),
        "scales": torch.full((1, 8), 0.25, dtype=torch.float16),
    }

    with layer_in(tmp_path, tensors) as checkpoint:
        part = TensorSlice("layer.weight", (8, 8))
        codes = read_codes(checkpoint, packing("gptq", has_lowered_zeros=True), part)
    weight = torch.empty(8, 8)
    codes.decode(weight)

    assert codes.zeros.flatten().tolist() == list(range(8))
    assert weight.tolist() == [[0.25 * place for place in range(8)]] * 8


def test_symmetric_zero_points_that_were_stored_as_they_are_show_themselves(tmp_path: Path) -> None:
    """Some writers name GPTQ's first layout and leave out its subtraction."""
    tensors, weight = pack_layer(Format("gptq", 32, is_symmetric=True, layout="gptq_v2"), 16, 64, seed=1)
    out = torch.empty(16, 64)

    with layer_in(tmp_path, tensors) as checkpoint:
        first_layout = packing("gptq", group_size=32, is_symmetric=True, has_lowered_zeros=True)
        read_codes(checkpoint, first_layout, TensorSlice("layer.weight", (16, 64))).decode(out)

    assert torch.equal(out, weight)


@pytest.mark.parametrize(
    "fmt", [Format("awq", 32), Format("gptq", 32), Format("gptq", 32, is_shuffled=True)], ids=name_of
)
@pytest.mark.parametrize(("dim", "start", "stop"), [(0, 3, 29), (0, 8, 16), (1, 5, 91), (1, 32, 64), (1, 95, 96)])
def test_a_slice_that_cuts_words_and_groups_is_what_slicing_the_whole_gives(
    fmt: Format, dim: int, start: int, stop: int, tmp_path: Path
) -> None:
    tensors, weight = pack_layer(fmt, 32, 96, seed=2)
    part = TensorSlice("layer.weight", (32, 96), dim, start, stop)
    out = torch.empty(part.local_shape)

    with layer_in(tmp_path, tensors) as checkpoint:
        lowered = fmt.method == "gptq"
        read_codes(checkpoint, packing(fmt.method, group_size=32, has_lowered_zeros=lowered), part).decode(out)

    assert torch.equal(out, weight.narrow(dim, start, stop - start))


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_rank_reads_its_share_of_what_is_packed(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = make_packed(Format(method, 32), tmp_path)
    tensors = load_file(packed / "model.safetensors")
    common = sum(tensor.nbytes for name, tensor in tensors.items() if "norm" in name or "g_idx" in name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    read: list[int] = []
    lock, close = threading.Lock(), Checkpoint.close

    def count(checkpoint: Checkpoint) -> None:
        with lock:
            read.append(checkpoint.bytes_read)
        close(checkpoint)

    monkeypatch.setattr(Checkpoint, "close", count)
    for group in ThreadGroup.create(2):
        make_runner(packed, tp=group)

    assert read == [(total - common) // 2 + common] * 2


def test_a_layer_that_was_left_plain_is_read_as_it_is(tmp_path: Path) -> None:
    packed, plain = make_packed(Format("awq", 32), tmp_path)
    tensors, whole = load_file(packed / "model.safetensors"), load_file(plain / "model.safetensors")
    for ending in ("qweight", "qzeros", "scales"):
        del tensors[f"{Q_PROJ}.{ending}"]
    tensors[f"{Q_PROJ}.weight"] = whole[f"{Q_PROJ}.weight"]
    save_file(tensors, packed / "model.safetensors")

    assert (logits_of(packed) - reference_logits(plain)).abs().max() < 1e-4


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_biases_of_zeros_are_passed_over_and_others_are_not(tmp_path: Path) -> None:
    packed, plain = make_packed(Format("gptq", 32), tmp_path)
    rewrite(packed, lambda tensors: tensors.update({f"{Q_PROJ}.bias": torch.zeros(128, dtype=torch.float16)}))
    assert (logits_of(packed) - reference_logits(plain)).abs().max() < 1e-4

    rewrite(packed, lambda tensors: tensors.update({f"{Q_PROJ}.bias": torch.ones(128, dtype=torch.float16)}))
    with pytest.raises(CheckpointError, match=r"q_proj.bias has no place in the architecture"):
        make_runner(packed)


def _set(name: str, value: torch.Tensor | None) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(f"{Q_PROJ}.{name}")
        if value is not None:
            tensors[f"{Q_PROJ}.{name}"] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("qweight", None), "q_proj.qweight is missing (expected shape [16, 128])"),
        (_set("qzeros", None), "q_proj.qzeros is missing (expected shape [4, 16])"),
        (_set("scales", None), "q_proj.scales is missing (expected shape [4, 128])"),
        (_set("g_idx", None), "q_proj.g_idx is missing (expected shape [128])"),
        (_set("qweight", torch.zeros(16, 64, dtype=torch.int32)), "q_proj.qweight has shape [16, 64]"),
        (_set("qweight", torch.zeros(16, 128)), "q_proj.qweight has type F32; Baton reads I32"),
        (_set("qzeros", torch.zeros(1, 16, dtype=torch.int32)), "q_proj.qzeros has shape [1, 16]"),
        (_set("scales", torch.zeros(4, 128, dtype=torch.int32)), "q_proj.scales has type I32"),
        (_set("scales", torch.ones(4)), "q_proj.scales has shape [4]"),
        (_set("g_idx", torch.full((128,), 4, dtype=torch.int32)), "q_proj.g_idx names group 4; there are 4, from 0 on"),
        (_set("g_idx", torch.tensor([-1, *range(1, 128)], dtype=torch.int32) // 32), "q_proj.g_idx names group -1"),
        (
            _set("g_idx", torch.zeros(128, dtype=torch.int32)),
            "puts 128 inputs into group 0; config.json's",
        ),
        (_set("g_idx", torch.zeros(0, dtype=torch.int32)), "q_proj.g_idx has shape [0]"),
    ],
)
def test_a_layer_that_is_wrong_is_refused_by_name(change: Any, message: str, tmp_path: Path) -> None:
    packed, _ = make_packed(Format("gptq", 32, is_shuffled=True), tmp_path)
    rewrite(packed, change)

    with pytest.raises(CheckpointError) as caught:
        make_runner(packed)

    assert message in str(caught.value) and str(packed / "model.safetensors") in str(caught.value)


@pytest.mark.parametrize(("method", "shape"), [("awq", (12, 8)), ("gptq", (8, 12))])
def test_sizes_that_no_word_divides_are_refused(method: str, shape: tuple[int, int], tmp_path: Path) -> None:
    with (
        layer_in(tmp_path, {"scales": torch.ones(1, shape[0])}) as checkpoint,
        pytest.raises(CheckpointError, match=r"do not divide the 12 that config\.json asks for"),
    ):
        read_codes(checkpoint, packing(method, group_size=None), TensorSlice("layer.weight", shape))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported; Baton reads awq, gptq"),
        ({"quant_method": None}, "quant_method None is not supported"),
        ({"bits": 3}, "bits 3 is not supported for gptq; Baton reads 4 or 8"),
        ({"bits": 2}, "bits 2 is not supported for gptq"),
        ({"bits": "4"}, "bits must be a positive integer (got '4')"),
        ({"quant_method": "awq", "bits": 8, "checkpoint_format": None}, "bits 8 is not supported for awq"),
        ({"quant_method": "awq", "checkpoint_format": "gemv"}, "checkpoint_format 'gemv' is not supported"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported; Baton reads gptq, gptq_v2"),
        ({"checkpoint_format": []}, "checkpoint_format [] is not supported"),
        ({"group_size": 0}, "group_size must be a positive integer (got 0)"),
        ({"group_size": -2}, "group_size must be a positive integer (got -2)"),
        ({"desc_act": "no"}, "desc_act must be true or false (got 'no')"),
        ({"sym": 1}, "sym must be true or false (got 1)"),
        ({"lm_head": True}, "lm_head True is not supported"),
        ({"dynamic": {"+:.*q_proj": {"bits": 8}}}, "dynamic {'+:.*q_proj': {'bits': 8}} is not supported"),
        ({"is_marlin_format": True}, "is_marlin_format True is not supported"),
        ({"pack_dtype": "int16"}, "pack_dtype 'int16' is not supported; only int32 is"),
    ],
)
def test_a_format_that_cannot_be_read_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "refused"
    if not folder.exists():
        make_packed(Format("gptq"), folder)
    edit_config(folder / "packed", quantization_config={**Format("gptq").config(), **changes})

    with pytest.raises(CheckpointError) as caught:
        read_model(folder / "packed")

    assert f"config.json: quantization_config: {message}" in str(caught.value)


def test_a_quantization_that_is_no_object_is_refused(tmp_path: Path) -> None:
    packed, _ = make_packed(Format("awq"), tmp_path)
    edit_config(packed, quantization_config=[4])

    with pytest.raises(CheckpointError, match=r"quantization_config must be an object \(got \[4\]\)"):
        read_model(packed)
