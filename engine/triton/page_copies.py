"""Copies a range of tokens, of several layers, between a paged KV pool and a contiguous buffer, or another worker's
pool: one launch for all.

Bytes are copied as they are, whatever a head is made of, in words of four. A thread loads and stores 16 bytes at once
where the heads of a token that are copied, those that are not, and both addresses are multiples of 16 bytes; 8 or 4
where they are multiples of no more than that. Programs share the words of the range alone, so neither the block size
nor the number of heads leaves threads idle. Nothing outside the range is read or written.

Legend: L layers of the pool, V planes of a layer (keys and values: 2; latents: 1), N blocks, B tokens of a block, P
words of a token in one plane, l layers and T tokens of the range, W of a token's words that are copied.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from engine.triton.target import Case

_TILE_WORDS, _NUM_WARPS = 4096, 4  # 8 times 16 bytes on their way for each thread; chosen without a GPU
_WORD_BYTES, _MOST_AT_ONCE = 4, 4
_MOST_WORDS = 1 << 30


@triton.jit(do_not_specialize=["num_blocks", "first_plane", "first_token", "num_tokens"])
def copy_tokens(
    pool,  # int32 [V L, N, B, P]
    buffer,  # int32 [V l, T, W]
    blocks,  # int32: the blocks of the range, in order
    num_blocks,  # N
    first_plane,
    first_token,  # in its block
    num_tokens,  # T
    B: tl.constexpr,
    P: tl.constexpr,
    FIRST: tl.constexpr,
    W: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    IS_GATHER: tl.constexpr,
):
    """Grid: tiles of T W words, V l planes. `FIRST`: the first of a token's words that is copied."""
    plane = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = piece < num_tokens * (W // UNIT)
    token = first_token + piece // (W // UNIT)
    block = tl.load(blocks + token // B, mask=inside, other=0).to(tl.int64)
    slot = (first_plane + plane) * num_blocks * B + block * B + token % B
    word = tl.arange(0, UNIT)[None, :]
    words = pool + ((slot * (P // UNIT) + FIRST // UNIT + piece % (W // UNIT)) * UNIT)[:, None] + word
    copied = buffer + ((plane * num_tokens * (W // UNIT) + piece) * UNIT)[:, None] + word
    mask = tl.broadcast_to(inside[:, None], words.shape)
    if IS_GATHER:
        tl.store(copied, tl.load(words, mask=mask), mask=mask)
    else:
        tl.store(words, tl.load(copied, mask=mask), mask=mask)


@triton.jit(
    do_not_specialize=["num_blocks", "source_blocks", "target_blocks", "first_plane", "first_token", "num_tokens"]
)
def copy_between_pools(
    source,  # int32 [V L, N of the source, B, P]
    target,  # int32 [V L, N of the target, B, P]
    blocks,  # int32 [2, num_blocks]: the blocks of the range, in order: the source's, then the target's
    num_blocks,
    source_blocks,  # N of the source
    target_blocks,  # N of the target
    first_plane,
    first_token,  # in its block
    num_tokens,  # T
    B: tl.constexpr,
    P: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid: tiles of T P words, V l planes."""
    plane = first_plane + tl.program_id(1).to(tl.int64)
    piece = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = piece < num_tokens * (P // UNIT)
    token = first_token + piece // (P // UNIT)
    theirs = tl.load(blocks + token // B, mask=inside, other=0).to(tl.int64)
    ours = tl.load(blocks + num_blocks + token // B, mask=inside, other=0).to(tl.int64)
    word, within = tl.arange(0, UNIT)[None, :], token % B
    read = (((plane * source_blocks + theirs) * B + within) * (P // UNIT) + piece % (P // UNIT)) * UNIT
    written = (((plane * target_blocks + ours) * B + within) * (P // UNIT) + piece % (P // UNIT)) * UNIT
    mask = tl.broadcast_to(inside[:, None], (TILE, UNIT))
    tl.store(target + written[:, None] + word, tl.load(source + read[:, None] + word, mask=mask), mask=mask)


def copy_between(
    source: torch.Tensor,
    source_blocks: Sequence[int],
    target: torch.Tensor,
    target_blocks: Sequence[int],
    first_token: int,
    num_tokens: int,
    layers: slice,
) -> bool:
    """Copies pages of one pool to pages of another, whole tokens, on the current stream; waits for nothing.

    Both are contiguous [L, V, N, B, H, D] of one type, and equal but for N; `source` may be on another GPU that this
    one can read. Each list has the blocks that hold the T tokens, the first of which is `first_token` of the first.
    Returns False, and has done nothing, where a token is no multiple of a word or the range has too many words.
    """
    layers_, planes, num_source_blocks, block_size, num_heads, head_dim = source.shape
    assert source.is_contiguous() and target.is_contiguous() and source.dtype == target.dtype
    assert target.shape == (layers_, planes, target.shape[2], block_size, num_heads, head_dim)
    token_bytes = num_heads * head_dim * source.element_size()
    if any(size % _WORD_BYTES for size in (token_bytes, source.data_ptr(), target.data_ptr())):
        return False
    token_words = token_bytes // _WORD_BYTES
    if num_tokens * token_words > _MOST_WORDS:
        return False
    unit = math.gcd(token_words, _MOST_AT_ONCE)
    ids = torch.tensor([[*source_blocks], [*target_blocks]], dtype=torch.int32, pin_memory=target.is_cuda)
    copy_between_pools[(triton.cdiv(num_tokens * token_words, _TILE_WORDS), planes * (layers.stop - layers.start))](
        source.view(-1).view(torch.int32),
        target.view(-1).view(torch.int32),
        ids.to(target.device, non_blocking=True),
        ids.shape[1],
        num_source_blocks,
        target.shape[2],
        planes * layers.start,
        first_token,
        num_tokens,
        block_size,
        token_words,
        unit,
        _TILE_WORDS // unit,
        num_warps=_NUM_WARPS,
    )
    return True


def copy_range(
    pool: torch.Tensor,
    blocks: Sequence[int],
    first_token: int,
    layers: slice,
    heads: slice,
    buffer: torch.Tensor,
    is_gather: bool,
) -> bool:
    """Copies pages to the buffer, or the buffer to pages, on the current stream; waits for nothing.

    `pool` is [L, V, N, B, H, D], `buffer` [l, V, T, h, D] of the same type, both contiguous; `blocks` are the ids of
    the blocks that hold the T tokens, the first of which is `first_token` of the first block. Returns False, and has
    done nothing, where a word would have parts of two heads or the range has too many words.
    """
    _, planes, num_blocks, block_size, num_heads, head_dim = pool.shape
    assert pool.is_contiguous() and buffer.is_contiguous() and pool.dtype == buffer.dtype
    head_bytes, num_tokens = head_dim * pool.element_size(), buffer.shape[2]
    sizes = [count * head_bytes for count in (num_heads, heads.start, heads.stop - heads.start)]
    if any(size % _WORD_BYTES for size in (*sizes, pool.data_ptr(), buffer.data_ptr())):
        return False
    token_words, first_word, copied_words = (size // _WORD_BYTES for size in sizes)
    if num_tokens * copied_words > _MOST_WORDS:
        return False
    unit = math.gcd(token_words, first_word, copied_words, _MOST_AT_ONCE)
    ids = torch.tensor([int(block) for block in blocks], dtype=torch.int32, pin_memory=pool.is_cuda)
    copy_tokens[(triton.cdiv(num_tokens * copied_words, _TILE_WORDS), planes * (layers.stop - layers.start))](
        pool.view(-1).view(torch.int32),
        buffer.view(-1).view(torch.int32),
        ids.to(pool.device, non_blocking=True),
        num_blocks,
        planes * layers.start,
        first_token,
        num_tokens,
        block_size,
        token_words,
        first_word,
        copied_words,
        unit,
        _TILE_WORDS // unit,
        is_gather,
        num_warps=_NUM_WARPS,
    )
    return True


def cases() -> Iterator[Case]:
    """Heads of common models in each type, all of them and some; the last two 8 and 4 bytes at once."""
    for dtype, head_dim, num_heads, heads, block_size in (
        (torch.bfloat16, 128, 8, slice(0, 8), 16),
        (torch.bfloat16, 128, 8, slice(0, 8), 24),
        (torch.bfloat16, 128, 8, slice(2, 4), 16),
        (torch.float32, 64, 2, slice(0, 2), 16),
        (torch.int8, 132, 8, slice(0, 8), 16),
        (torch.uint8, 132, 2, slice(0, 2), 16),
        (torch.int8, 132, 1, slice(0, 1), 16),
    ):
        yield _case(dtype, block_size, num_heads, head_dim, heads)
    for dtype, head_dim, num_heads in ((torch.bfloat16, 128, 8), (torch.int8, 132, 8), (torch.int8, 132, 1)):
        yield _case_between(dtype, num_heads, head_dim)


def _case(dtype: torch.dtype, block_size: int, num_heads: int, head_dim: int, heads: slice) -> Case:
    def launch() -> None:
        pool = torch.zeros((2, 2, 3, block_size, num_heads, head_dim), dtype=dtype)
        buffer = torch.zeros((2, 2, 20, heads.stop - heads.start, head_dim), dtype=dtype)
        for is_gather in (True, False):
            assert copy_range(pool, (2, 0), 3, slice(0, 2), heads, buffer, is_gather)

    kind = f"{str(dtype).removeprefix('torch.')}, {head_dim}"
    return Case(f"tokens of {kind}, heads {heads.start}-{heads.stop} of {num_heads}, blocks of {block_size}", launch)


def _case_between(dtype: torch.dtype, num_heads: int, head_dim: int) -> Case:
    def launch() -> None:
        source, target = (torch.zeros((2, 2, count, 16, num_heads, head_dim), dtype=dtype) for count in (3, 4))
        assert copy_between(source, (2, 0), target, (1, 3), 3, 20, slice(0, 2))

    kind = f"{str(dtype).removeprefix('torch.')}, {head_dim}"
    return Case(f"tokens of {kind}, {num_heads} heads, from pool to pool", launch)
