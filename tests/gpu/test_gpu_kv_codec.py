"""Slots of a GPU, in device memory and in host memory, equal those of the CPU; damage is found in both."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kv_cases import POISON, RankCaches

from cluster.errors import Corrupted
from engine.kv.pool import choose_page_copies
from kv_transfer import pages
from kv_transfer.actions import Range
from kv_transfer.codec import SlotCodec
from kv_transfer.header import HEADER_BYTES, words_digest
from kv_transfer.layout import WIRE_FORMATS, KvLayout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LAYOUT = KvLayout(num_layers=3, num_kv_heads=4, head_dim=16, dtype="bfloat16", tp_size=1, block_size=16, model="m")
TOKENS, TABLE, TAG = 40, [5, 0, 3], 7
WHAT = Range(3, 37, 1, 3)
by_kernels = pytest.mark.parametrize("kernels", ["auto", "torch"])
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [slice(0, 4), slice(1, 3)], ids=["all heads", "some heads"])
@by_kernels
def test_page_copies_cast_as_on_the_cpu(dtype: torch.dtype, heads: slice, kernels: str) -> None:
    kernel = choose_page_copies(kernels, CUDA)
    kv = torch.randn(3, 2, 7, 16, 4, 16).to(dtype)
    out = torch.empty(2, 2, WHAT.num_tokens, heads.stop - heads.start, 16, dtype=torch.float32)
    gathered = out.cuda()
    pages.gather(kv, TABLE, WHAT, heads, out)
    pages.gather(kv.cuda(), TABLE, WHAT, heads, gathered, kernel)
    assert torch.equal(gathered.cpu(), out)
    target = torch.full_like(kv, POISON)
    scattered = target.cuda()
    pages.scatter(target, TABLE, WHAT, heads, out)
    pages.scatter(scattered, TABLE, WHAT, heads, gathered, kernel)
    assert torch.equal(scattered.cpu(), target)


def new_slot(codec: SlotCodec, where: str) -> torch.Tensor:
    size = codec.slot_bytes(WHAT.num_cells)
    if where == "device":
        return torch.zeros(size, dtype=torch.uint8, device="cuda")
    return torch.zeros(size, dtype=torch.uint8, pin_memory=where == "pinned")


def codecs(
    wire_format: str, digest: str = "on", dtype: str = "bfloat16", kernels: str = "torch"
) -> tuple[SlotCodec, SlotCodec]:
    other, kernel = replace(LAYOUT, dtype=dtype), choose_page_copies(kernels, CUDA)
    heads, options = slice(1, 4), {"wire_format": wire_format, "digest": digest, "kernel": kernel}
    return (
        SlotCodec(LAYOUT, other, heads, is_sender=True, **options),
        SlotCodec(other, LAYOUT, heads, is_sender=False, **options),
    )


def loaded() -> RankCaches:
    caches = RankCaches(LAYOUT, TOKENS)
    caches.load(torch.randn(3, 2, TOKENS, 4, 16))
    return caches


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
@pytest.mark.parametrize("where", ["device", "pinned", "pageable"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("digest", ["on", "off"])
@by_kernels
def test_what_a_gpu_packs_and_unpacks_equals_the_cpus(
    wire_format: str, where: str, dtype: str, digest: str, kernels: str
) -> None:
    on_cpus, (ours, theirs) = codecs(wire_format, digest, dtype), codecs(wire_format, digest, dtype, kernels)
    source, target = loaded(), RankCaches(replace(LAYOUT, dtype=dtype, block_size=8), TOKENS, seed=4)
    on_cpu, on_gpu = new_slot(ours, "pageable"), new_slot(ours, where)
    kv, written = source.caches[0], target.caches[0]
    written_by_gpu = written.cuda()
    size = on_cpus[0].pack(kv, source.table, WHAT, TAG, on_cpu)
    assert ours.pack(kv.cuda(), source.table, WHAT, TAG, on_gpu) == size
    on_cpus[1].unpack(on_cpu, written, target.table, WHAT, TAG)
    theirs.unpack(on_gpu, written_by_gpu, target.table, WHAT, TAG)
    if wire_format == "native":
        assert torch.equal(on_gpu.cpu()[HEADER_BYTES:size], on_cpu[HEADER_BYTES:size])
        assert torch.equal(written_by_gpu.cpu(), written)
    else:
        # A value between two codes may fall to either side.
        torch.testing.assert_close(written_by_gpu.cpu(), written, rtol=2**-3, atol=0.05)


@pytest.mark.parametrize("where", ["device", "pinned"])
def test_damage_in_any_byte_is_found_before_a_page_is_written(where: str) -> None:
    ours, theirs = codecs("native")
    source, slot = loaded(), new_slot(ours, where)
    target = torch.full_like(source.caches[0], POISON, device="cuda")
    size = ours.pack(source.caches[0].cuda(), source.table, WHAT, TAG, slot)
    for at in (*range(HEADER_BYTES), *range(HEADER_BYTES, size, 97), size - 1):
        slot[at] ^= 1
        with pytest.raises(Corrupted):
            theirs.unpack(slot, target, source.table, WHAT, TAG)
        slot[at] ^= 1
    assert target.eq(POISON).all()
    theirs.unpack(slot, target, source.table, WHAT, TAG)
    assert not target.eq(POISON).all()


def test_the_digest_of_words_is_the_same_on_every_device() -> None:
    payload = torch.randint(0, 256, (8 * ((1 << 20) + 77),), dtype=torch.uint8)
    assert int(words_digest(payload.cuda(), 5)) == int(words_digest(payload, 5))
