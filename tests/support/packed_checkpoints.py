"""Small random checkpoints in fewer bits, each with the plain checkpoint that says the same, for transformers.

Packed one word at a time, as the formats' own packers do it, and with none of the code that is tested. Codes, zero
points and scales are drawn, not fitted: what is packed is exact, and every code and zero point occurs.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PLAIN_ORDER = tuple(range(8))
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SAME_INPUTS = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Layers whose groups are those of another: GPTQ orders inputs by their size, and these have the same."""
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
"""Two ranks cut the MLP's inputs at 192, within a group of 128."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Format:
    """One way to write a checkpoint."""

    method: str
    group_size: int = 128
    bits: int = 4
    is_symmetric: bool = False
    is_shuffled: bool = False
    """desc_act: each input's group is drawn, once for all layers with the same inputs."""
    layout: str | None = None
    """compressed-tensors: its `format`."""
    strategy: str = "group"
    """compressed-tensors: what shares a scale."""
    block: tuple[int, int] | None = None
    """fp8: the outputs and inputs that share a scale, where not all do."""
    kind: str = "int"
    """compressed-tensors: of its codes."""

    def config(self) -> dict[str, Any]:
        values = {"quant_method": self.method, "bits": self.bits, "group_size": self.group_size}
        if self.method == "fbgemm_fp8":
            return {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
        if self.method == "fp8":
            return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": _listed(self.block)}
        if self.method == "compressed-tensors":
            return self._compressed()
        if self.method == "awq":
            return {**values, "version": self.layout or "gemm", "zero_point": True}
        layout = self.layout or "gptq"
        return {**values, "desc_act": self.is_shuffled, "sym": self.is_symmetric, "checkpoint_format": layout}

    def _compressed(self) -> dict[str, Any]:
        weights = {"num_bits": self.bits, "type": self.kind, "symmetric": self.is_symmetric, "strategy": self.strategy}
        weights |= {"group_size": self.group_size if self.strategy == "group" else None, "dynamic": False}
        weights |= {"block_structure": _listed(self.block), "actorder": "group" if self.is_shuffled else None}
        scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        values = {"format": self.layout, "config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}
        return {"quant_method": "compressed-tensors", "quantization_status": "compressed", **values}


def _listed(block: tuple[int, int] | None) -> list[int] | None:
    return None if block is None else list(block)


def pack(codes: np.ndarray, bits: int, order: tuple[int, ...] = PLAIN_ORDER) -> torch.Tensor:
    """[rows, columns] of codes to int32 words, those of a word from one row."""
    per_word = 32 // bits
    words = np.zeros((codes.shape[0], codes.shape[1] // per_word), dtype=np.uint32)
    for column in range(words.shape[1]):
        for place, code in enumerate(order[:per_word]):
            words[:, column] |= codes[:, column * per_word + code].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32).copy())


def pack_layer(
    fmt: Format, num_outputs: int, num_inputs: int, seed: int, inputs: str = ""
) -> tuple[Tensors, torch.Tensor]:
    """The tensors of one linear layer by the end of their names, and the weight [O, I] that they are.

    Layers that name the same `inputs` have the same groups.
    """
    if fmt.layout != "pack-quantized" and fmt.method not in ("awq", "gptq"):
        return _scale_layer(fmt, num_outputs, num_inputs, seed)
    rng = np.random.default_rng(seed)
    group_size = num_inputs if fmt.group_size == -1 or fmt.strategy == "channel" else fmt.group_size
    num_groups, top = -(-num_inputs // group_size), 1 << fmt.bits
    groups = np.arange(num_inputs) // group_size
    if fmt.is_shuffled:
        groups = np.random.default_rng(list(inputs.encode()) or seed).permutation(groups)
    codes = rng.integers(0, top, (num_inputs, num_outputs))
    zeros = rng.integers(0, top, (num_groups, num_outputs))
    if fmt.is_symmetric:
        zeros[:] = top // 2
    scales = (rng.uniform(0.5, 1.5, (num_groups, num_outputs)) * 4 / top / num_inputs**0.5).astype(np.float16)
    weight = (codes - zeros[groups]).astype(np.float32) * scales.astype(np.float32)[groups]
    return packed_tensors(fmt, codes, zeros, scales, groups), torch.from_numpy(weight.T.copy())


def packed_tensors(
    fmt: Format, codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray
) -> Tensors:
    """The tensors of one linear layer by the end of their names, from codes [I, O], zero points and float16 scales
    [G, O], and the group of each input [I]."""
    num_inputs, num_outputs = codes.shape
    tensors = {"scales": torch.from_numpy(scales)}
    if fmt.method == "compressed-tensors":
        shape = torch.tensor([num_outputs, num_inputs])
        scale = torch.from_numpy(scales.T.copy())
        tensors = {"weight_packed": pack(codes.T, fmt.bits), "weight_scale": scale, "weight_shape": shape}
        if not fmt.is_symmetric:
            tensors["weight_zero_point"] = pack(zeros, fmt.bits).T.contiguous()
        if fmt.is_shuffled:
            tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    elif fmt.method == "awq":
        tensors |= {"qweight": pack(codes, 4, AWQ_ORDER), "qzeros": pack(zeros, 4, AWQ_ORDER)}
    else:
        words = pack(zeros, fmt.bits)
        if fmt.layout in (None, "gptq"):  # as GPTQModel does it: a zero of 0 borrows from its neighbour
            words -= 0x11111111 if fmt.bits == 4 else 0x01010101
        tensors |= {"qweight": pack(codes.T, fmt.bits).T.contiguous(), "qzeros": words}
        tensors["g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return tensors


def _scale_layer(fmt: Format, num_outputs: int, num_inputs: int, seed: int) -> tuple[Tensors, torch.Tensor]:
    """Codes of eight bits with scales, by blocks that need not divide the weight."""
    generator = torch.Generator().manual_seed(seed)
    channel = fmt.method == "fbgemm_fp8" or fmt.strategy == "channel"
    rows, columns = fmt.block or ((1, num_inputs) if channel else (num_outputs, num_inputs))
    scales = 0.5 + torch.rand((-(-num_outputs // rows), -(-num_inputs // columns)), generator=generator)
    whole = scales.repeat_interleave(rows, 0)[:num_outputs].repeat_interleave(columns, 1)[:, :num_inputs]
    values = torch.randn((num_outputs, num_inputs), generator=generator) * num_inputs**-0.5
    if fmt.kind == "int" and fmt.method == "compressed-tensors":
        codes, scales, whole = (values * 500).round().clamp(-127, 127).to(torch.int8), scales / 500, whole / 500
    else:
        codes = values.to(torch.float8_e4m3fn)
    return scaled_tensors(fmt, codes, scales), codes.float() * whole


def scaled_tensors(fmt: Format, codes: torch.Tensor, scales: torch.Tensor) -> Tensors:
    """The same of eight bits: codes [O, I] and scales [blocks of outputs, blocks of inputs]."""
    name = "weight_scale_inv" if fmt.method == "fp8" and fmt.block else "weight_scale"
    return {"weight": codes, name: scales.flatten() if scales.numel() == 1 else scales, "input_scale": torch.ones(())}


def _int4_steps(num_outputs: int, num_inputs: int) -> torch.Tensor:
    """A weight that Baton's own int4 holds exactly, so that rounding the head changes nothing."""
    steps = torch.randint(-8, 8, (num_outputs, num_inputs), generator=torch.Generator().manual_seed(5))
    steps[:, ::32] = -8
    return steps * 2.0**-5


def make_packed(fmt: Format, folder: Path, kind: str = "llama", **overrides: Any) -> tuple[Path, Path]:
    """Writes two folders of the same model, packed and plain in float32."""
    plain = make_checkpoint(kind, folder / "plain", **{**SIZES, **overrides})
    packed = folder / "packed"
    shutil.copytree(plain, packed)
    tensors = load_file(plain / "model.safetensors")
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = _int4_steps(*tensors["lm_head.weight"].shape)
    held = dict(tensors)
    for seed, name in enumerate(sorted(tensors)):
        layer, _, ending = name.rpartition(".")
        if ending == "weight" and layer.endswith(LINEARS):
            block, _, kind = layer.rpartition(".")
            inputs = f"{block}.{SAME_INPUTS.get(kind, kind)}"
            parts, tensors[name] = pack_layer(fmt, *tensors[name].shape, seed, inputs)
            del held[name]  # which some formats write anew
            held |= {f"{layer}.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(held, packed / "model.safetensors", metadata={"format": "pt"})
    edit_config(packed, quantization_config=fmt.config())
    return packed, plain


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
