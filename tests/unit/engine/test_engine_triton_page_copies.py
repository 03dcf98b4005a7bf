"""Ranges of pages copied by one kernel, interpreted (or on a GPU, if there is one): the bytes that the CPU copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interpreted_kernels import DEVICE

from engine.kv.pool import choose_page_copies, choose_pool_copies
from engine.triton import page_copies
from kv_transfer import pages
from kv_transfer.actions import Range
from kv_transfer.codec import SlotCodec
from kv_transfer.layout import WIRE_FORMATS, KvLayout

ROOT = Path(__file__).resolve().parents[3]
LAYERS, BLOCKS = 3, 7
TABLE = [5, 0, 3, 6]
FORMATS = [
    (torch.bfloat16, 4, 16),
    (torch.float16, 8, 64),
    (torch.float32, 2, 12),
    (torch.int8, 4, 20),
    (torch.uint8, 2, 132),
    (torch.int8, 1, 68),
    (torch.bfloat16, 2, 2),
]
"""Type, heads and elements of a head: tokens of 128 bytes and of 1 KiB, and of multiples of 16, 8 and 4 bytes."""


def random_bytes(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Of any type, NaNs among them."""
    size = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def buffer_of(what: Range, heads: slice, head_dim: int, dtype: torch.dtype, seed: int, planes: int = 2) -> torch.Tensor:
    shape = (what.layer_end - what.layer_start, planes, what.num_tokens, heads.stop - heads.start, head_dim)
    return random_bytes(*shape, dtype=dtype, seed=seed)


def must_copy(*arguments: object) -> bool:
    """The kernel, which has to take the range."""
    assert page_copies.copy_range(*arguments)  # type: ignore[arg-type]
    return True


def check_both_ways(
    dtype: torch.dtype,
    num_heads: int,
    head_dim: int,
    block_size: int,
    what: Range,
    heads: slice,
    planes: int = 2,
) -> None:
    pool = random_bytes(LAYERS, planes, BLOCKS, block_size, num_heads, head_dim, dtype=dtype)
    expected, found = (buffer_of(what, heads, head_dim, dtype, seed=1, planes=planes) for _ in range(2))
    found, source = found.to(DEVICE), buffer_of(what, heads, head_dim, dtype, seed=2, planes=planes)
    target = pool.to(DEVICE, copy=True)

    pages.gather(pool, TABLE, what, heads, expected)
    pages.gather(target, TABLE, what, heads, found, must_copy)
    assert torch.equal(as_bytes(found), as_bytes(expected))

    pages.scatter(pool, TABLE, what, heads, source)
    pages.scatter(target, TABLE, what, heads, source.to(DEVICE), must_copy)
    assert torch.equal(as_bytes(target), as_bytes(pool)), "the range, and nothing beside it"


@pytest.mark.parametrize(("dtype", "num_heads", "head_dim"), FORMATS, ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_any_pool_has_the_bytes_that_the_cpu_copies(
    dtype: torch.dtype, num_heads: int, head_dim: int, block_size: int
) -> None:
    end = 3 * block_size + (block_size + 1) // 2
    check_both_ways(dtype, num_heads, head_dim, block_size, Range(block_size // 3, end, 0, LAYERS), slice(0, num_heads))


@pytest.mark.parametrize("what", [Range(0, 64, 0, 3), Range(3, 4, 2, 3), Range(17, 37, 1, 3), Range(31, 33, 0, 1)])
@pytest.mark.parametrize("heads", [slice(0, 4), slice(1, 3), slice(3, 4)], ids=str)
def test_any_tokens_layers_and_heads_have_the_bytes_that_the_cpu_copies(what: Range, heads: slice) -> None:
    check_both_ways(torch.bfloat16, 4, 24, 16, what, heads)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 576), (torch.int8, 44)], ids=str)
@pytest.mark.parametrize("what", [Range(0, 64, 0, 3), Range(17, 37, 1, 3)])
def test_latents_are_copied_as_one_plane(dtype: torch.dtype, head_dim: int, what: Range) -> None:
    check_both_ways(dtype, 1, head_dim, 16, what, slice(0, 1), planes=1)


@pytest.mark.parametrize(("dtype", "num_heads", "head_dim"), FORMATS, ids=str)
@pytest.mark.parametrize("what", [Range(0, 64, 0, 3), Range(3, 4, 2, 3), Range(17, 37, 1, 3)])
def test_pages_of_another_pool_have_the_bytes_that_the_cpu_copies(
    dtype: torch.dtype, num_heads: int, head_dim: int, what: Range
) -> None:
    source = random_bytes(LAYERS, 2, BLOCKS + 2, 16, num_heads, head_dim, dtype=dtype)
    pool = random_bytes(LAYERS, 2, BLOCKS, 16, num_heads, head_dim, dtype=dtype, seed=1)
    target, theirs = pool.to(DEVICE, copy=True), [8, 1, 2, 6][what.token_start // 16 : (what.token_end - 1) // 16 + 1]

    def must_copy_between(*arguments: object) -> bool:
        assert page_copies.copy_between(*arguments)  # type: ignore[arg-type]
        return True

    pages.copy_across(source, theirs, pool, TABLE, what)
    pages.copy_across(source.to(DEVICE), theirs, target, TABLE, what, must_copy_between)
    assert torch.equal(as_bytes(target), as_bytes(pool)), "the range, and nothing beside it"
    for token in range(what.token_start, what.token_end):
        block = theirs[token // 16 - what.token_start // 16]
        for layer in range(what.layer_start, what.layer_end):
            expected = source[layer, :, block, token % 16]
            assert torch.equal(as_bytes(pool[layer, :, TABLE[token // 16], token % 16]), as_bytes(expected))


def test_a_range_of_several_tiles_is_one_launch_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, ...]] = []
    launch = page_copies.copy_tokens.run
    monkeypatch.setattr(
        page_copies.copy_tokens,
        "run",
        lambda *args, grid, **kwargs: (grids.append(grid), launch(*args, grid=grid, **kwargs)),
    )
    check_both_ways(torch.float32, 4, 128, 16, Range(5, 64, 0, LAYERS), slice(0, 4))
    assert grids == [(8, 2 * LAYERS)] * 2  # 59 tokens of 512 words, 4,096 at a time


@pytest.mark.parametrize("head_dim", [3, 5])
def test_heads_that_are_no_words_are_left_to_torch(head_dim: int) -> None:
    pool = random_bytes(LAYERS, 2, BLOCKS, 16, 2, head_dim, dtype=torch.int8)
    what, answers = Range(3, 37, 0, LAYERS), []

    def copies(*arguments: object) -> bool:
        answers.append(page_copies.copy_range(*arguments))  # type: ignore[arg-type]
        return answers[-1]

    expected, found = (buffer_of(what, slice(1, 2), head_dim, torch.int8, seed=1) for _ in range(2))
    pages.gather(pool, TABLE, what, slice(1, 2), expected)
    pages.gather(pool, TABLE, what, slice(1, 2), found, copies)
    assert torch.equal(found, expected) and answers == [False]


def test_values_of_another_type_are_cast_before_they_are_copied() -> None:
    """To a pool of bfloat16 from a sender in float32; a wire of fewer bits goes by the same way."""
    pool = torch.zeros(LAYERS, 2, BLOCKS, 16, 4, 16, dtype=torch.bfloat16)
    what, heads = Range(3, 37, 1, 3), slice(1, 3)
    source = torch.randn(2, 2, what.num_tokens, 2, 16)
    target = pool.to(DEVICE, copy=True)
    pages.scatter(pool, TABLE, what, heads, source)
    pages.scatter(target, TABLE, what, heads, source.to(DEVICE), must_copy)
    assert torch.equal(target.cpu(), pool)


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
def test_a_slot_that_is_packed_by_the_kernel_is_the_one_that_the_cpu_packs(wire_format: str) -> None:
    layout = KvLayout(
        num_layers=LAYERS, num_kv_heads=4, head_dim=16, dtype="bfloat16", tp_size=1, block_size=16, model="m"
    )
    pool = torch.randn(LAYERS, 2, BLOCKS, 16, 4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    what, used = Range(3, 37, 0, LAYERS), []

    def kernel(*arguments: object) -> bool:
        used.append(arguments)
        return must_copy(*arguments)

    slots, written = [], []
    for each in (None, kernel):
        ours, theirs = (
            SlotCodec(layout, layout, slice(1, 3), is_sender=side, wire_format=wire_format, kernel=each)
            for side in (True, False)
        )
        slot = torch.zeros(ours.slot_bytes(what.num_cells), dtype=torch.uint8)
        size = ours.pack(pool, TABLE, what, 7, slot)
        target = torch.zeros_like(pool)
        theirs.unpack(slot, target, TABLE[::-1], what, 7)
        slots.append(slot[:size])
        written.append(target)
    assert torch.equal(*slots) and torch.equal(*written)
    assert len(used) == 2 and not torch.equal(written[0], torch.zeros_like(pool))


def test_the_kernel_is_chosen_where_triton_runs_and_torch_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_page_copies("auto", torch.device("cpu")) is None
    monkeypatch.setattr("engine.kv.pool.obstacle", lambda device: "")
    assert choose_page_copies("auto", torch.device("cuda")) is page_copies.copy_range
    assert choose_page_copies("torch", torch.device("cuda")) is None
    assert choose_pool_copies("auto", torch.device("cuda")) is page_copies.copy_between
    assert choose_pool_copies("torch", torch.device("cuda")) is None


ACCESSES = """
import json, re
from triton.compiler import CompiledKernel
from engine.triton import compile_report, page_copies

texts, make = [], CompiledKernel.__init__
def note(kernel, *arguments):
    make(kernel, *arguments)
    texts.append(kernel.asm["ptx"])
CompiledKernel.__init__ = note
for case in page_copies.cases():
    texts.clear()
    list(compile_report.usages([80], [case]))
    found = [re.findall(r"(?:ld|st)[.]global[.]?(v[24])?[.]b32", text) for text in texts]
    print(json.dumps([case.name, [{width: widths.count(width) for width in set(widths)} for widths in found]]))
"""


def widths_of_accesses() -> dict[str, list[dict[str, int]]]:
    """Of each case: for the gather and the scatter, how often a thread reads or writes 4 words, 2, or one."""
    command = [sys.executable, "-c", ACCESSES]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return dict(json.loads(line) for line in result.stdout.splitlines())


def test_threads_read_and_write_16_bytes_at_once_and_each_block_id_once() -> None:
    found = widths_of_accesses()
    assert set(found) == {case.name for case in page_copies.cases()}
    for name, copies in found.items():
        if "from pool to pool" in name:
            assert copies == [{"": 128} if "1 heads" in name else {"v4": 16, "": 16}], name
            continue
        assert len(copies) == 2, name
        narrow = {"uint8, 132, heads 0-2": {"v2": 32, "": 16}, "int8, 132, heads 0-1": {"": 96}}
        expected = next((widths for part, widths in narrow.items() if part in name), {"v4": 16, "": 8})
        assert copies == [expected, expected], name
