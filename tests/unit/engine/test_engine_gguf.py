"""GGUF files: the model that transformers computes with what their blocks say, how it is kept, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from engine_steps import held_bytes, make_runner, on_each_rank, run_in_chunks
from gguf_files import decoded_folder, encode, write_gguf
from packed_checkpoints import Format, make_packed
from test_engine_packed import IDS, logits_of, reference_logits

from cluster.errors import CheckpointError
from engine.checkpoint import Checkpoint, TensorSlice
from engine.gguf_checkpoint import open_checkpoint
from engine.model_cost import describe_weights, weight_bytes
from engine.models.folder import read_model
from engine.native import native
from engine.native.structures import BF16, INT4_ZEROS, INT8_GROUPS
from engine.quantization.blocks import keep_blocks, kept_kind
from engine.quantization.integers import Quantized, make_quantized, stored_bytes
from engine.quantization.interface import TiledMatrix
from engine.quantization.stored import Blocks

KERNELS, WHY_NOT = native()
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_hidden_layers": 2}
EXPERTS = {
    "mixtral": {"intermediate_size": 256},
    "qwen2-moe": {
        "head_dim": None,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3-moe": {"mlp_only_layers": [], "moe_intermediate_size": 256},
}
"""What a file can say of them."""
needs_kernels = pytest.mark.skipif(KERNELS is None or not KERNELS.has_products, reason=f"no kernels: {WHY_NOT}")


def mixed(name: str) -> str:
    """As Q4_K_M has it: values and outputs of some layers in more bits."""
    return "Q6_K" if ("attn_v" in name or "ffn_down" in name) and ".0." in name else "Q4_K"


Files = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Makes a GGUF file and the folder that says the same in float32."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def make(kind: str, types: str) -> tuple[Path, Path]:
        if (kind, types) not in made:
            target = tmp_path_factory.mktemp("gguf")
            sizes = SIZES | ({"head_dim": None} if kind == "qwen2" else {})
            sizes |= EXPERTS.get(kind, {})
            if kind.startswith("gemma"):  # whose files cannot say another scale of attention
                sizes |= {"query_pre_attn_scalar": 32}
            folder = make_checkpoint(kind, target / "folder", **sizes)
            file = write_gguf(folder, target / "model.gguf", mixed if types == "mixed" else types)
            made[kind, types] = file, decoded_folder(folder, file, target / "decoded")
        return made[kind, types]

    return make


@pytest.mark.parametrize(
    "types",
    [
        "BF16",
        "Q8_0",
        "Q4_1",
        "Q4_K",
        "mixed",
        *(pytest.param(name, marks=pytest.mark.battery) for name in ("F32", "F16", "Q4_0", "Q5_0", "Q6_K")),
    ],
)
def test_logits_are_those_of_transformers_on_one_rank_and_on_two(types: str, files: Files) -> None:
    file, decoded = files("llama", types)
    expected = reference_logits(decoded)
    for tp_size in (1, 2):
        assert (logits_of(file, tp_size) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["llama3-rope", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_other_models(kind: str, files: Files) -> None:
    for types in ("F32", "Q8_0"):
        file, decoded = files(kind, types)
        expected = reference_logits(decoded)
        assert (logits_of(file, 4) - expected).abs().max() < 1e-4 * max(1.0, expected.abs().max().item() / 10)


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        pytest.param(kind, types, marks=[pytest.mark.battery] if (types == "mixed") == (kind != "mixtral") else [])
        for kind in EXPERTS
        for types in ("F32", "mixed")
    ],
)
def test_experts(kind: str, types: str, files: Files) -> None:
    """In one tensor for each matrix of a layer, of which each rank has a slice, or some."""
    file, decoded = files(kind, types)
    expected = reference_logits(decoded)
    near = 1e-4 * max(1.0, expected.abs().max().item() / 10)
    assert (logits_of(file) - expected).abs().max() < near
    ranks = on_each_rank(2, lambda tp: run_in_chunks(make_runner(file, tp=tp, expert_parallel=2), IDS, [len(IDS)]))
    assert (ranks[1] - expected).abs().max() < near


@pytest.mark.parametrize("types", ["F16", "Q8_0", "Q4_0", "mixed"])
def test_the_memory_that_experts_take_is_known_before(types: str, files: Files) -> None:
    for kind in EXPERTS:
        for dtype in ("float32", "bfloat16"):
            runner = make_runner(files(kind, types)[0], dtype=dtype)
            assert held_bytes(runner) == weight_bytes(runner.config, 1, runner.weight_form), (kind, dtype)


@needs_kernels
def test_experts_are_multiplied_in_the_bits_of_the_file(files: Files) -> None:
    kept = make_runner(files("qwen3-moe", "Q4_0")[0], dtype="bfloat16")
    tiles = [linear.matrix.tiles.kind for layer in kept._model.layers for linear in layer.mlp.experts.linears]
    assert set(tiles) == {INT4_ZEROS}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3-moe", {"qwen3moe.expert_gating_func": 2}, "qwen3moe.expert_gating_func 2 is not supported; Baton"),
        ("qwen3-moe", {"qwen3moe.expert_count": 7}, "blk.0.ffn_gate_exps.weight has shape [8, 256, 256] (expected"),
        ("llama", {"llama.expert_count": 4}, "blk.0.ffn_gate_exps.weight is missing (expected shape [4, width, 256])"),
        ("qwen2", {"qwen2.expert_count": 4}, "a qwen2 with experts is not read from GGUF"),
    ],
)
def test_experts_that_are_not_read_are_refused_by_key(
    kind: str, changes: dict[str, int], message: str, tmp_path: Path
) -> None:
    sizes = SIZES | EXPERTS.get(kind, {}) | ({"head_dim": None} if kind == "qwen2" else {})
    folder = make_checkpoint(kind, tmp_path / "folder", **sizes)
    used = {f"{next(iter(changes)).split('.')[0]}.expert_used_count": 2}
    with pytest.raises(CheckpointError) as caught:
        read_model(write_gguf(folder, tmp_path / "wrong.gguf", replaced={**used, **changes}))
    assert message in str(caught.value) and "wrong.gguf" in str(caught.value)


@needs_kernels
@pytest.mark.parametrize(
    ("types", "quantization", "kinds"),
    [
        ("Q8_0", "none", {INT8_GROUPS}),
        ("Q8_0", "int8", {INT8_GROUPS}),
        ("Q5_0", "none", {INT8_GROUPS}),
        ("Q4_0", "none", {INT4_ZEROS}),
        ("Q4_K", "none", {INT4_ZEROS}),
        ("Q4_K", "int4", {INT4_ZEROS}),
        ("Q6_K", "none", {BF16}),
        ("mixed", "none", {INT4_ZEROS, BF16}),
    ],
)
def test_a_cpu_multiplies_with_the_bits_of_the_file(
    types: str, quantization: str, kinds: set[int], files: Files
) -> None:
    file, decoded = files("llama", types)
    kept = make_runner(file, dtype="bfloat16", quantization=quantization)
    matrices = [
        linear.matrix
        for layer in kept._model.layers
        for linear in (layer.attention.qkv, layer.attention.out, *layer.mlp.linears)
    ]
    assert {matrix.tiles.kind for matrix in matrices if isinstance(matrix, TiledMatrix)} == kinds
    assert kept.decode_reason == "decode steps are one call"
    exact, plain = logits_of(decoded), logits_of(decoded, dtype="bfloat16")
    logits = run_in_chunks(kept, IDS, [1] * len(IDS))
    # Activations are rounded to 8 bits for the product, of the size of what bfloat16 rounds elsewhere.
    limit = 4 if quantization == "none" else 12
    assert (logits - exact).abs().mean() < limit * (plain - exact).abs().mean()


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("types", ["F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "mixed"])
def test_the_memory_that_weights_take_is_known_before(types: str, quantization: str, files: Files) -> None:
    file, _ = files("llama", types)
    for dtype in ("float32", "bfloat16"):
        for tp_size in (1, 2):

            def held(tp: object, dtype: str = dtype) -> tuple[int, int]:
                runner = make_runner(file, tp=tp, dtype=dtype, quantization=quantization)  # type: ignore[arg-type]
                return held_bytes(runner), weight_bytes(runner.config, tp.size, runner.weight_form)  # type: ignore[attr-defined]

            for is_held, is_told in on_each_rank(tp_size, held):
                assert is_held == is_told, (dtype, tp_size)


def test_a_start_says_how_weights_are_kept_and_what_they_take(files: Files, tmp_path: Path) -> None:
    runner = make_runner(files("llama", "F16")[0], dtype="float32")
    told = describe_weights(runner.config, 1, runner.weight_form)
    assert told.startswith("GGUF F16 computed in float32, ") and "; vocabulary and norms in float32, " in told
    if KERNELS is not None and KERNELS.has_products:
        runner = make_runner(files("llama", "mixed")[0], dtype="bfloat16")
        told = describe_weights(runner.config, 1, runner.weight_form)
        assert "GGUF Q4_K kept as int4 in groups of 32, 573.4 kB; " in told
        assert "GGUF Q4_K + Q6_K decoded to bfloat16, 262.1 kB; GGUF Q6_K decoded to bfloat16, 262.1 kB" in told
    packed, _ = make_packed(Format("fp8", block=(128, 128)), tmp_path)
    runner = make_runner(packed, quantization="int8")
    told = describe_weights(runner.config, 1, runner.weight_form)
    assert told.startswith("fp8 in blocks of 128x128 rounded to int8, ") and ", head in int8, " in told


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q4_0", "Q4_K"])
def test_kept_codes_say_what_the_blocks_say(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "folder", **{**SIZES, "num_hidden_layers": 1})
    file = write_gguf(folder, tmp_path / "m.gguf", kind)
    with open_checkpoint(file) as checkpoint:
        for part in (
            TensorSlice("model.layers.0.self_attn.q_proj.weight", (256, 256), 0, 32, 160),
            TensorSlice("model.layers.0.mlp.down_proj.weight", (256, 512), 1, 96, 352),
            TensorSlice("model.layers.0.mlp.down_proj.weight", (256, 512), 1, 480, 512),
        ):
            exact = torch.empty(part.local_shape)
            checkpoint.read(part, exact)
            kept = keep_blocks(
                checkpoint, [part], INT4_ZEROS if kind.startswith("Q4") else INT8_GROUPS, torch.device("cpu")
            )
            assert kept is not None
            found = kept.dequantize(torch.float32)
            if kind != "Q4_K":
                assert torch.equal(found, exact)
            else:
                assert (found - exact).abs().max() < 2.0**-10 * exact.abs().max()


def test_a_group_of_nothing_but_its_minimum_is_kept(tmp_path: Path) -> None:
    """llama.cpp gives a group of equal negative weights a scale of 0 and a minimum."""
    block = encode(np.linspace(-1, 1, 256, dtype=np.float32)[None], "Q4_K")
    block[0, 4:8] &= 0xC0  # the scales of the first four groups
    weight = np.repeat(block, 256, axis=0)
    folder = make_checkpoint("llama", tmp_path / "folder", **{**SIZES, "num_hidden_layers": 1})
    file = write_gguf(folder, tmp_path / "m.gguf", "Q4_K")
    raw, place = bytearray(file.read_bytes()), {t.name: t for t in gguf.GGUFReader(file).tensors}["blk.0.attn_v.weight"]
    raw[place.data_offset : place.data_offset + 128 * 144] = weight[:128].tobytes()
    file.write_bytes(raw)
    with open_checkpoint(file) as checkpoint:
        part = TensorSlice("model.layers.0.self_attn.v_proj.weight", (128, 256))
        exact = torch.empty(part.local_shape)
        checkpoint.read(part, exact)
        kept = keep_blocks(checkpoint, [part], INT4_ZEROS, torch.device("cpu"))
    assert kept is not None and exact[0, :32].unique().numel() == 1 and exact[0, 0] < 0
    assert (kept.dequantize(torch.float32) - exact).abs().max() < 2.0**-10


@needs_kernels
@pytest.mark.parametrize("shape", [(64, 128), (100, 96), (1, 32), (257, 1056)], ids=str)
def test_int8_in_groups_is_multiplied_as_it_is(shape: tuple[int, int]) -> None:
    num_outputs, num_inputs = shape
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
    scales = (torch.rand((num_outputs, num_inputs // 32), generator=generator) * 0.01).half()
    weight = Quantized(codes, scales, INT8_GROUPS, 32)
    matrix = make_quantized(weight, KERNELS)
    assert matrix.nbytes == stored_bytes(shape, INT8_GROUPS, 32, True)
    bias = torch.randn(num_outputs, generator=generator).bfloat16()
    for num_rows in (1, 2, 5, 6, 7, 13, 97, 200):
        steps = torch.randint(-126, 127, (num_rows, num_inputs), generator=generator)
        steps[:, ::128] = 127  # so that rounding to 8 bits changes nothing
        x = (steps * 2.0**-5).bfloat16()
        expected = x.float() @ weight.dequantize(torch.float32).T + bias.float()
        found = matrix(x, bias, torch.float32)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_file_is_refused_by_tensor_and_file(files: Files, tmp_path: Path) -> None:
    file, decoded = files("llama", "Q8_0")
    folder = make_checkpoint("llama", tmp_path / "folder", **SIZES)
    for changes, message in (
        ({"llama.block_count": 3}, "tensor model.layers.2.input_layernorm.weight is missing (expected shape [256])"),
        ({"llama.block_count": 1}, "tensor model.layers.1"),
        (
            {"llama.feed_forward_length": 256},
            "(blk.0.ffn_gate.weight) has shape [512, 256], but the file's metadata ask",
        ),
    ):
        wrong = write_gguf(folder, tmp_path / "wrong.gguf", replaced=changes)
        with pytest.raises(CheckpointError) as caught:
            logits_of(wrong)
        assert message in str(caught.value) and "wrong.gguf" in str(caught.value)
    with open_checkpoint(file) as checkpoint, Checkpoint(decoded) as plain:
        assert (checkpoint.files, checkpoint.num_tensors) == (("model.gguf",), plain.num_tensors)
        part = TensorSlice("model.layers.0.self_attn.q_proj.weight", (256, 256))
        with pytest.raises(CheckpointError, match=r"has type Q8_0, not torch\.int32"):
            checkpoint.read(part, torch.empty(part.shape, dtype=torch.int32))


def test_inputs_that_ranks_cut_within_a_group_are_decoded(files: Files) -> None:
    """Of 8 ranks each has 64 inputs of down and 32 of o; of 16, whose slices of o cut blocks, 16."""
    packing = read_model(files("llama", "Q4_0")[0]).packing
    assert isinstance(packing, Blocks)
    name = ["model.layers.0.self_attn.o_proj.weight"]
    assert kept_kind(packing, name, 32, "none", False) == INT4_ZEROS
    assert kept_kind(packing, name, 16, "none", False) is None
    assert kept_kind(packing, name, 32, "none", True) == INT4_ZEROS
    assert kept_kind(packing, name, 32, "int8", False) is None
    eight = read_model(files("llama", "Q8_0")[0]).packing
    assert isinstance(eight, Blocks) and kept_kind(eight, name, 32, "none", True) is None
