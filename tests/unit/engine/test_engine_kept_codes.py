"""Codes of four bits that a checkpoint brings along stay as they are: the same weights in a quarter of the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_steps import held_bytes, make_runner, on_each_rank
from packed_checkpoints import Format, make_packed, pack_layer
from test_engine_packed import FORMATS, layer_in, logits_of, name_of, packing, reference_logits

from cluster.settings import WorkerSettings
from engine.checkpoint import TensorSlice
from engine.layers.linear import Loader
from engine.model_cost import WeightForm, layers_multiplied_bytes, weight_bytes
from engine.native import native
from engine.quantization.interface import Matrix
from engine.quantization.packed import Codes, keep_codes, read_codes
from engine.tp import TPGroup
from worker.resolved import resolve

KERNELS, WHY_NOT = native()
needs_products = pytest.mark.skipif(
    KERNELS is None or not KERNELS.has_products, reason=f"no kernels for products here: {WHY_NOT}"
)
IN_FOUR_BITS = [fmt for fmt in FORMATS if fmt.bits == 4]
SHUFFLED = Format("gptq", 32, is_shuffled=True)


def read(fmt: Format, folder: Path, part: TensorSlice, seed: int = 2) -> tuple[Codes, torch.Tensor]:
    """A slice of a layer as it is packed, and the weights that it stands for."""
    tensors, weight = pack_layer(fmt, *part.shape, seed=seed)
    lowered = fmt.method == "gptq" and fmt.layout != "gptq_v2"
    group_size = None if fmt.group_size == -1 or fmt.strategy == "channel" else fmt.group_size
    how = packing(
        fmt.method,
        bits=fmt.bits,
        group_size=group_size,
        has_lowered_zeros=lowered,
        is_symmetric=fmt.method == "compressed-tensors" and fmt.is_symmetric,
    )
    with layer_in(folder, tensors) as checkpoint:
        codes = read_codes(checkpoint, how, part)
    return codes, weight.narrow(part.dim, part.start, part.local_shape[part.dim])


def kept(parts: Sequence[Codes]) -> torch.Tensor | None:
    """The weights that a product with what is kept would use, inputs in their natural order."""
    found = keep_codes(parts)
    if found is None:
        return None
    weight, order = found
    whole = weight.dequantize(torch.float32)
    return whole if order is None else whole[:, order.argsort()]


@pytest.mark.parametrize("fmt", IN_FOUR_BITS, ids=name_of)
def test_kept_weights_are_exact(fmt: Format, tmp_path: Path) -> None:
    codes, weight = read(fmt, tmp_path, TensorSlice("layer.weight", (24, 384)))

    found = kept([codes])

    assert found is not None and torch.equal(found, weight)


def test_slices_that_cut_groups_are_kept_in_smaller_ones(tmp_path: Path) -> None:
    codes, weight = read(Format("awq", 128), tmp_path, TensorSlice("layer.weight", (24, 384), 1, 192, 384))

    found = kept([codes])
    quantized = keep_codes([codes])

    assert found is not None and torch.equal(found, weight)
    assert quantized is not None and quantized[0].group == 64


def test_fused_parts_are_kept_one_after_another(tmp_path: Path) -> None:
    parts = [read(SHUFFLED, tmp_path, TensorSlice("layer.weight", (16, 128), 0, 0, stop), seed=2) for stop in (16, 8)]

    found = kept([codes for codes, _ in parts])

    assert found is not None and torch.equal(found, torch.cat([weight for _, weight in parts]))


@pytest.mark.parametrize(
    ("fmt", "part"),
    [
        (Format("gptq", 32, bits=8), TensorSlice("layer.weight", (16, 128))),
        (Format("awq", 48), TensorSlice("layer.weight", (16, 96))),
        (SHUFFLED, TensorSlice("layer.weight", (16, 128), 1, 0, 64)),
        (Format("awq", 32), TensorSlice("layer.weight", (16, 128), 1, 16, 64)),
    ],
    ids=["eight bits", "groups of 48", "a rank's share of shuffled groups", "half a group"],
)
def test_what_no_kernel_multiplies_is_not_kept(fmt: Format, part: TensorSlice, tmp_path: Path) -> None:
    codes, weight = read(fmt, tmp_path, part)
    decoded = torch.empty(part.local_shape)

    codes.decode(decoded)

    assert kept([codes]) is None and torch.equal(decoded, weight)


def test_parts_in_orders_of_their_own_and_scales_beyond_float16_are_not_kept(tmp_path: Path) -> None:
    part = TensorSlice("layer.weight", (16, 128))
    one, other = (read(SHUFFLED, tmp_path, part, seed)[0] for seed in (2, 3))

    assert kept([one]) is not None and kept([other]) is not None
    assert kept([one, other]) is None
    for scale in (1e-3, 1e6, float("nan")):
        assert kept([replace(one, scales=torch.full_like(one.scales, scale))]) is None


@pytest.mark.parametrize("fmt", IN_FOUR_BITS, ids=name_of)
def test_where_int4_is_asked_for_the_checkpoints_own_is_exact(fmt: Format, tmp_path: Path) -> None:
    """In float32 by torch, so that nothing else is rounded; one rank keeps all layers."""
    packed, plain = make_packed(fmt, tmp_path)

    logits = logits_of(packed, quantization="int4", kernels="torch")

    assert (logits - reference_logits(plain)).abs().max() < 1e-4


@needs_products
@pytest.mark.parametrize("fmt", [Format("awq", 64), SHUFFLED], ids=name_of)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_in_bfloat16_kept_codes_say_what_their_weights_say(fmt: Format, tp_size: int, tmp_path: Path) -> None:
    """Kernels round activations to 8 bits, which is of the size of what bfloat16 rounds."""
    packed, plain = make_packed(fmt, tmp_path)
    exact = reference_logits(plain)

    codes = logits_of(packed, tp_size, dtype="bfloat16")

    assert (codes - exact).square().mean().sqrt() < 0.08 * exact.square().mean().sqrt()
    assert (codes.argmax(1) == exact.argmax(1)).float().mean() > 0.85


def matrices_of(monkeypatch: pytest.MonkeyPatch) -> list[Matrix]:
    """Those that runners will have loaded, all but the head."""
    made: list[Matrix] = []
    linear = Loader.linear

    def record(loader: Loader, parts: Sequence[TensorSlice], *orders: Any) -> Matrix:
        made.append(linear(loader, parts, *orders))
        return made[-1]

    monkeypatch.setattr(Loader, "linear", record)
    return made


@pytest.mark.parametrize("fmt", [*IN_FOUR_BITS, Format("gptq", bits=8)], ids=name_of)
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(
    ("quantization", "kernels"),
    [("int4", "torch"), *(pytest.param(q, "auto", marks=needs_products) for q in ("int4", "none"))],
)
def test_planned_bytes_are_those_that_are_taken(
    quantization: str, kernels: str, tp_size: int, fmt: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = make_packed(fmt, tmp_path)
    made = matrices_of(monkeypatch)

    def load(tp: TPGroup) -> tuple[int, int, int]:
        """Planned for all linear layers, and planned and held in all."""
        runner = make_runner(packed, tp=tp, dtype="bfloat16", quantization=quantization, kernels=kernels)
        config, form = runner.config, runner.weight_form
        layers = layers_multiplied_bytes(config, tp_size, form)
        return layers, weight_bytes(config, tp_size, form), held_bytes(runner)

    layers, planned, held = map(sum, zip(*on_each_rank(tp_size, load), strict=True))

    # A rank's share of shuffled groups may by chance be whole spans.
    tolerance = 0.1 if fmt.is_shuffled and tp_size > 1 else 0.0
    assert layers == pytest.approx(sum(matrix.nbytes for matrix in made), rel=tolerance, abs=0)
    assert planned == pytest.approx(held, rel=tolerance, abs=0)


@pytest.mark.parametrize(
    ("wanted", "keeps"),
    [
        ({"dtype": "bfloat16"}, KERNELS is not None and KERNELS.has_products),
        ({"dtype": "bfloat16", "kernels": "torch"}, False),
        ({"dtype": "float32"}, False),
        ({"dtype": "bfloat16", "quantization": "int8"}, False),
        ({"dtype": "float32", "quantization": "int4", "kernels": "torch"}, True),
    ],
    ids=str,
)
def test_codes_are_kept_where_that_loses_nothing_or_is_asked_for(
    wanted: dict[str, str], keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = make_packed(Format("awq", 64), tmp_path)
    made = matrices_of(monkeypatch)
    settings = WorkerSettings.from_values(
        worker_id="prefill-0", role="prefill", model_path=str(packed), device="cpu", **wanted
    )

    runner = make_runner(packed, **wanted)

    assert runner.weight_form.keeps_codes == keeps == resolve(settings).weight_form.keeps_codes
    in_bfloat16 = layers_multiplied_bytes(runner.config, 1, WeightForm("bfloat16"))
    assert (sum(matrix.nbytes for matrix in made) < 0.3 * in_bfloat16) == keeps
