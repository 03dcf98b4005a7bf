"""Checkpoints of gpt-oss whose experts are in MXFP4, as the makers publish them, and the same in plain numbers.

A converter of its own: what the engine reads is compared with the numbers that were rounded here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
GROUP = 32


def round_to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks uint8 [.., I / 32, 16], scales uint8 [.., I / 32], and the numbers [.., I] that they stand for.

    The largest number of a group lies between 4 and 8 steps, or is zero.
    """
    groups = weight.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    exponents = torch.where(largest > 0, largest.log2().floor() - 2, torch.zeros_like(largest))
    steps = groups.ldexp(-exponents)
    codes = (steps.abs().unsqueeze(-1) - VALUES).abs().argmin(-1)
    numbers = VALUES[codes].copysign(steps).ldexp(exponents).flatten(-2)
    signed = (codes + 8 * (steps < 0)).to(torch.uint8)
    blocks = signed[..., ::2] | signed[..., 1::2] << 4
    return blocks, (exponents.squeeze(-1) + 127).to(torch.uint8), numbers


def make_mxfp4(folder: Path, *, plain: Path, dtype: str = "float32", **overrides: object) -> tuple[Path, Path]:
    """Writes a random gpt-oss in MXFP4 into `folder`, and one with the same numbers, as they are, into `plain`."""
    fields = {"hidden_size": 64, "intermediate_size": 128, **overrides}
    make_checkpoint("gpt-oss", plain, dtype=dtype, **fields)
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    file = "model.safetensors"
    packed, numbers = load_file(plain / file), load_file(plain / file)
    for name in [name for name in packed if name.endswith(("gate_up_proj", "down_proj"))]:
        weight = packed.pop(name)  # inputs before outputs
        packed[f"{name}_blocks"], packed[f"{name}_scales"], exact = round_to_mxfp4(weight.transpose(1, 2))
        numbers[name] = exact.transpose(1, 2).contiguous().to(weight.dtype)
    save_file(packed, folder / file, metadata={"format": "pt"})
    save_file(numbers, plain / file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder, plain
