"""A model's checkpoint in every format that Baton reads: its weights rounded to nearest, as the formats' writers do
without data to calibrate with; and beside each the folder in float32 that says the same.

    PYTHONPATH=.:tests/support python tests/support/converted.py models/tiny-shakespeare DIR

`python benchmarks/formats.py --checkpoints` measures what comes of it.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf_files import decoded_folder, write_gguf
from mxfp4_checkpoints import round_to_mxfp4
from packed_checkpoints import LINEARS, Format, Tensors, packed_tensors, scaled_tensors
from safetensors.torch import load_file, save_file

Rounded = tuple[Tensors, torch.Tensor]
"""Tensors of a layer by the end of their names, and the weight [O, I] that they are."""

_EIGHT = {"bits": 8, "is_symmetric": True}
_GROUP = 64
"""Inputs of a group in four bits: 128 does not divide the bundled model's sizes on two ranks."""
FORMATS: dict[str, Format] = {
    "fp8, 128x128 blocks (DeepSeek)": Format("fp8", block=(128, 128)),
    "fp8, one scale": Format("fp8"),
    "fp8, by outputs (FBGEMM)": Format("fbgemm_fp8"),
    "fp8, by outputs (compressed-tensors)": Format(
        "compressed-tensors", strategy="channel", kind="float", layout="float-quantized", **_EIGHT
    ),
    "W8A8 (compressed-tensors)": Format("compressed-tensors", strategy="channel", layout="int-quantized", **_EIGHT),
    "W4A16 (compressed-tensors)": Format("compressed-tensors", _GROUP, is_symmetric=True, layout="pack-quantized"),
    "W4A16 with zero points (compressed-tensors)": Format("compressed-tensors", _GROUP, layout="pack-quantized"),
    "AWQ": Format("awq", _GROUP),
    "GPTQ": Format("gptq", _GROUP, is_symmetric=True),
    "GPTQ, desc_act": Format("gptq", _GROUP, is_symmetric=True, is_shuffled=True),
}
_ALPHA = 1.702
"""gpt-oss's gate is x * sigmoid(alpha * x), where Llama's alpha is 1."""
_UP = 64.0
"""Factor of what the gate multiplies, beside which gpt-oss adds 1: large, so that bfloat16 rounds little there."""
GGUF_TYPES = ("F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")


def convert(folder: Path, target: Path) -> Iterator[tuple[str, Path, Path]]:
    """Writes a folder's model in each format, below `target`. Yields the format, the checkpoint, and the folder in
    float32 that says the same."""
    for number, (name, fmt) in enumerate(FORMATS.items()):
        yield name, *_convert(folder, target / str(number), fmt)
    yield "MXFP4 (gpt-oss)", *_convert_to_mxfp4(folder, target / "mxfp4")
    for kind in GGUF_TYPES:
        below = target / kind
        below.mkdir(parents=True)
        file = write_gguf(folder, below / f"{folder.name}-{kind}.gguf", kind)
        yield f"GGUF {kind}", file, decoded_folder(folder, file, below / "decoded")


def _convert(folder: Path, target: Path, fmt: Format) -> tuple[Path, Path]:
    packed, decoded = target / folder.name, target / "decoded"
    shutil.copytree(folder, packed)
    shutil.copytree(folder, decoded)
    is_scaled = fmt.layout != "pack-quantized" and fmt.method not in ("awq", "gptq")
    rounding: Callable[[Format, torch.Tensor], Rounded] = _in_eight_bits if is_scaled else _in_groups
    held: Tensors = {}
    said: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer, _, ending = name.rpartition(".")
        said[name] = tensor.float()
        if ending != "weight" or not layer.endswith(LINEARS):
            held[name] = tensor
            continue
        parts, said[name] = rounding(fmt, tensor.float())
        held |= {f"{layer}.{part}": value for part, value in parts.items()}
    _write(packed, held, quantization_config=fmt.config())
    _write(decoded, said, dtype="float32")
    return packed, decoded


def _write(folder: Path, tensors: Tensors, **changes: Any) -> None:
    """Replaces the tensors of a folder, and some of its config."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def _convert_to_mxfp4(folder: Path, target: Path) -> tuple[Path, Path]:
    """The format is of gpt-oss's experts alone: a Llama becomes a gpt-oss with one expert in each layer."""
    packed, decoded = target / folder.name, target / "decoded"
    shutil.copytree(folder, packed)
    shutil.copytree(folder, decoded)
    plain, changes = as_gpt_oss(folder)
    held, said = dict(plain), {name: tensor.float() for name, tensor in plain.items()}
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        weight = held.pop(name).transpose(1, 2)  # outputs before inputs
        held[f"{name}_blocks"], held[f"{name}_scales"], exact = round_to_mxfp4(weight)
        said[name] = exact.transpose(1, 2).contiguous()
    _write(packed, held, **changes, quantization_config={"quant_method": "mxfp4"})
    _write(decoded, said, **changes, dtype="float32")
    return packed, decoded


def as_gpt_oss(folder: Path) -> tuple[Tensors, dict[str, Any]]:
    """Returns the tensors of a Llama's folder as those of the gpt-oss that computes the same, experts in float32, and
    what its config.json says instead: one expert, sinks that take nothing, a clamp and a window out of reach."""
    config = json.loads((folder / "config.json").read_text())
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    changes: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
        "attention_bias": False,
        "layer_types": ["full_attention"] * layers,
        "swiglu_limit": 1e4,
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]},
    }
    found = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in found.items() if ".mlp." not in name}
    for layer in range(layers):
        block = f"model.layers.{layer}"
        gate, up, down = (found[f"{block}.mlp.{name}_proj.weight"].float() for name in ("gate", "up", "down"))
        num_outputs, num_inputs = gate.shape
        both = torch.stack([gate / _ALPHA, up * _UP], dim=1).flatten(0, 1)  # outputs of the two in turn
        tensors |= {
            f"{block}.self_attn.sinks": torch.full((heads,), -1e4),
            f"{block}.mlp.router.weight": torch.zeros(1, num_inputs),
            f"{block}.mlp.router.bias": torch.zeros(1),
            f"{block}.mlp.experts.gate_up_proj": both.T[None].contiguous(),
            f"{block}.mlp.experts.gate_up_proj_bias": torch.tensor([[0.0, -1.0] * num_outputs]),
            f"{block}.mlp.experts.down_proj": (down.T[None] * _ALPHA / _UP).contiguous(),
            f"{block}.mlp.experts.down_proj_bias": torch.zeros(1, num_inputs),
        }
    return tensors, changes


def _in_eight_bits(fmt: Format, weight: torch.Tensor) -> Rounded:
    """The largest of a block becomes the largest of the format."""
    num_outputs, num_inputs = weight.shape
    by_output = fmt.method == "fbgemm_fp8" or fmt.strategy == "channel"
    rows, columns = fmt.block or ((1, num_inputs) if by_output else (num_outputs, num_inputs))
    is_int = fmt.method == "compressed-tensors" and fmt.kind == "int"
    shape = (-(-num_outputs // rows), -(-num_inputs // columns))
    scales = torch.zeros(shape)
    for row in range(shape[0]):
        for column in range(shape[1]):
            block = weight[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
            scales[row, column] = block.abs().max() / (127 if is_int else 448)
    whole = scales.repeat_interleave(rows, 0)[:num_outputs].repeat_interleave(columns, 1)[:, :num_inputs]
    codes = (weight / whole).round().to(torch.int8) if is_int else (weight / whole).to(torch.float8_e4m3fn)
    return scaled_tensors(fmt, codes, scales), codes.float() * whole


def _in_groups(fmt: Format, weight: torch.Tensor) -> Rounded:
    """Codes of four bits, from a group's least to its largest weight or, symmetric, around the middle."""
    num_inputs = weight.shape[1]
    groups = np.arange(num_inputs) // fmt.group_size
    if fmt.is_shuffled:  # inputs in the order of their size, which is the same for layers with the same inputs
        order = np.random.default_rng(num_inputs).permutation(num_inputs)
        groups = groups[order]
    values = weight.T.numpy()  # [I, O]
    members = [values[groups == group] for group in range(groups.max() + 1)]
    least = np.stack([np.minimum(group.min(axis=0), 0) for group in members])
    largest = np.stack([np.maximum(group.max(axis=0), 0) for group in members])
    if fmt.is_symmetric:
        scales = (np.maximum(-least / 8, largest / 7)).astype(np.float16)
        zeros = np.full(scales.shape, 8)
    else:
        scales = ((largest - least) / 15).astype(np.float16)
        zeros = np.clip(np.rint(-least / scales.astype(np.float32)), 0, 15).astype(int)
    steps = scales.astype(np.float32)[groups]
    codes = np.clip(np.rint(values / steps) + zeros[groups], 0, 15).astype(int)
    said = (codes - zeros[groups]).astype(np.float32) * steps
    return packed_tensors(fmt, codes, zeros, scales, groups), torch.from_numpy(said.T.copy())


if __name__ == "__main__":
    for name, checkpoint, _ in convert(Path(sys.argv[1]), Path(sys.argv[2])):
        print(f"{name}: {checkpoint}")
