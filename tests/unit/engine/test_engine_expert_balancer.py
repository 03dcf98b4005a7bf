"""Experts that change places between groups of ranks while steps run: load, output, and every form of weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from checkpoints import make_checkpoint
from engine_steps import make_runner, on_each_rank, run_in_chunks
from test_engine_expert_parallel import KERNELS, WHY_NOT, experts_of

from cluster.errors import ConfigError
from engine.expert_balancer import ExpertBalancer
from engine.expert_placement import busiest_over_mean, imbalance, rounds_to
from engine.layers.experts import RoutedExperts, SeparateExperts, StackedExperts
from engine.models.experts import ExpertLoad
from engine.models.folder import read_model
from engine.native import Native
from engine.native.structures import NativeExperts
from engine.quantization import integers, plain
from engine.quantization.interface import TiledMatrix
from engine.tp import TPGroup

IDS = [Random(0).choice((3, 4, 5, 200)) if i % 3 else i + 3 for i in range(96)]
"""A few tokens come again and again, and their experts with them."""
CHUNKS = [24] * 4
SPLITS = [(2, 2), (4, 4), (4, 2)]
"""Ranks, and the groups of them."""


@pytest.mark.parametrize(("size", "groups"), SPLITS)
def test_a_skewed_load_becomes_even_and_the_output_stays(size: int, groups: int, tmp_path: Path) -> None:
    """Two terms add up to the same bits in any order, as long as no expert is sliced."""
    folder = make_checkpoint("mixtral", tmp_path, num_local_experts=15, num_hidden_layers=2)

    def passes(tp: TPGroup, interval: int, count: int) -> tuple[list[torch.Tensor], list[float], ExpertLoad]:
        """Logits, and how uneven the groups' loads were, of the same tokens in each pass."""
        runner = make_runner(folder, tp=tp, expert_parallel=groups, expert_rebalance_tokens=interval)
        logits, uneven, before = [], [], runner.expert_load().experts
        for _ in range(count):
            placements = {number: mlp.placement for number, mlp in runner._expert_mlps().items()}
            logits.append(run_in_chunks(runner, IDS, CHUNKS))
            now = runner.expert_load().experts
            loads = {n: [new - old for new, old in zip(now[n], before[n], strict=True)] for n in now}
            uneven.append(fmean(imbalance(loads[n], placements[n]) for n in now))
            before = now
        return logits, uneven, runner.expert_load()

    (expected,), (slices,), still = on_each_rank(size, lambda tp: passes(tp, 0, 1))[0]
    assert still.num_moved == 0
    found = on_each_rank(size, lambda tp: passes(tp, len(IDS), 3))
    for logits, uneven, load in found:
        for each in logits:
            assert torch.equal(each, expected) if size == groups else (each - expected).abs().max() < 1e-5
        assert load == found[0][2], "ranks disagree"
        assert load.num_moved > 0
        assert uneven[0] == slices, "moved before there was a load"
        assert uneven[2] < 1 + (slices - 1) / 2, (slices, uneven)
        assert fmean(map(busiest_over_mean, load.groups.values())) < slices


@pytest.mark.parametrize("kind", ["deepseek-v3", "gpt-oss"])
def test_sums_of_more_experts_stay_within_rounding(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path)

    def twice(tp: TPGroup, interval: int) -> tuple[torch.Tensor, int]:
        runner = make_runner(folder, tp=tp, expert_parallel=2, expert_rebalance_tokens=interval)
        run_in_chunks(runner, IDS, CHUNKS)
        return run_in_chunks(runner, IDS, CHUNKS), runner.expert_load().num_moved

    expected, _ = on_each_rank(2, lambda tp: twice(tp, 0))[0]
    for logits, num_moved in on_each_rank(2, lambda tp: twice(tp, 24)):
        assert num_moved > 0
        assert (logits - expected).abs().max() < 1e-4


FORMS = [("none", "float32", "auto"), ("none", "bfloat16", "torch"), ("int8", "float32", "torch")]
FORMS += [("int4", "bfloat16", "torch"), ("fp8", "bfloat16", "torch")]
NATIVE_FORMS = [("none", "bfloat16", "auto"), ("int8", "bfloat16", "auto"), ("int4", "bfloat16", "auto")]
needs_kernels = pytest.mark.skipif(
    KERNELS is None or not KERNELS.has_bf16_products, reason=f"no products in bfloat16: {WHY_NOT}"
)


@pytest.mark.parametrize("kind", ["qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize(
    ("quantization", "dtype", "kernels"),
    [*FORMS, *(pytest.param(*form, marks=(needs_kernels, pytest.mark.battery)) for form in NATIVE_FORMS)],
)
def test_an_expert_in_any_form_computes_the_same_at_another_rank(
    kind: str, quantization: str, dtype: str, kernels: str, tmp_path: Path
) -> None:
    """There and back again: also what is read of a place must be that of its new expert."""
    count = {"qwen3-moe": "num_experts", "gpt-oss": "num_local_experts"}[kind]
    folder = make_checkpoint(kind, tmp_path, dtype="bfloat16", **{count: 7})
    x = torch.randn((5, read_model(folder).hidden_size), generator=torch.Generator().manual_seed(1))
    how: dict[str, Any] = {"quantization": quantization, "dtype": getattr(torch, dtype), "kernels": kernels}
    x = x.to(how["dtype"])
    for size, groups in SPLITS:

        def outputs(tp: TPGroup, groups: int = groups) -> list[torch.Tensor]:
            experts = experts_of(folder, tp, groups, **how)
            found, first = [experts(x)], experts.placement
            shuffled = Random(groups).sample(range(7), 7)
            other = [{shuffled.pop() for _ in held} for held in first]
            for goal in (other, [set(held) for held in first]):
                experts.move(*rounds_to(goal, experts.placement))
                found.append(experts(x))
            return found

        for before, moved, back in on_each_rank(size, outputs):
            assert torch.equal(before, back)
            assert (moved.float() - before.float()).abs().mean() <= 0.01 * before.float().abs().mean()


@pytest.mark.parametrize("kind", ["qwen3-moe", "gpt-oss"])
def test_experts_of_a_gpu_change_places_in_their_stack(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the memory that CUDA graphs read: no tensor is another one afterwards."""
    monkeypatch.setattr("engine.layers.experts.SeparateExperts", StackedExperts)
    count = {"qwen3-moe": "num_experts", "gpt-oss": "num_local_experts"}[kind]
    folder = make_checkpoint(kind, tmp_path, dtype="bfloat16", hidden_size=64, **{count: 7})
    x = torch.randn((9, 64), generator=torch.Generator().manual_seed(1)).bfloat16()

    def outputs(tp: TPGroup) -> list[torch.Tensor]:
        experts = experts_of(folder, tp, 4, kernels="torch")
        assert isinstance(experts.experts, StackedExperts) and experts.experts._place is not None
        read = [experts.experts._weights.gate_up.data_ptr(), experts.experts._place.data_ptr()]
        found, first = [experts(x)], experts.placement
        for goal in ([{6, 0}, {5, 1}, {2, 4}, {3}], [set(held) for held in first]):
            experts.move(*rounds_to(goal, experts.placement))
            found.append(experts(x))
        assert read == [experts.experts._weights.gate_up.data_ptr(), experts.experts._place.data_ptr()]
        return found

    for before, moved, back in on_each_rank(4, outputs):
        assert torch.equal(before, back)
        assert (moved.float() - before.float()).abs().mean() <= 0.01 * before.float().abs().mean()


def test_experts_of_two_forms_are_refused_on_every_rank() -> None:
    def refused(forms: list[str]) -> list[str]:
        def of_rank(tp: TPGroup) -> str:
            mlp = SimpleNamespace(
                forms=lambda: forms[2 * tp.rank : 2 * tp.rank + 2],
                placement=((0, 1), (2, 3)),
                num_tokens=torch.zeros(4, dtype=torch.int64),
            )
            try:
                ExpertBalancer({0: cast(RoutedExperts, mlp)}, tp, 10)
            except ConfigError as error:
                return str(error)
            return ""

        return on_each_rank(2, of_rank)

    why = "the checkpoint keeps a layer's experts in different formats"
    assert refused(["int4 ", "int4 ", "int4 ", "int4 "]) == ["", ""]
    assert all(why in each for each in refused(["int4 ", "int4 ", "int4 ", "bf16 "]))
    assert all(why in each for each in refused(["int4 ", "int4 ", "bf16 ", "bf16 "]))


@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4"])
def test_tiles_are_renewed_where_native_kernels_read_them(form: str) -> None:
    random = torch.Generator().manual_seed(1)

    def tiled() -> TiledMatrix:
        weight = torch.randn((70, 64), generator=random).bfloat16()
        tiles = plain._tile(weight) if form == "bfloat16" else integers._tile(integers.quantize(weight, form))
        return TiledMatrix(replace(tiles, order=torch.randperm(64, generator=random)), cast(Native, None))

    one, other = tiled(), tiled()
    given: list[torch.Tensor] = []
    other.renew(lambda tensor: given.append(tensor) or tensor)  # type: ignore[func-returns-value]
    read = one.tiles.weight.data, one.tiles.weight.scales, one.tiles.weight.order
    parts = iter(given)
    one.renew(lambda tensor: next(parts).clone())
    tensors = [(tiles.data, tiles.scales, tiles.order) for tiles in (one.tiles, other.tiles)]
    for mine, theirs in zip(*tensors, strict=True):
        assert mine is None or torch.equal(mine, cast(torch.Tensor, theirs))
    assert read == tuple(None if mine is None else mine.data_ptr() for mine in tensors[0])


def test_native_kernels_are_told_where_an_expert_is() -> None:
    experts = SeparateExperts.__new__(SeparateExperts)
    experts.experts = cast(Any, ["first", "second"])
    experts.native = cast(NativeExperts, SimpleNamespace(count=5, places=[0, 1, -1, -1, -1]))
    experts.hold([3, 0])
    assert experts.native.places == [1, -1, -1, 0, -1]
    assert experts._by_number == {3: "first", 0: "second"}
