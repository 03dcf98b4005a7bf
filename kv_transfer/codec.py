"""Packs a chunk of KV into a slot, with a header that says which chunk it is, and unpacks it.

    64 bytes   header, little-endian: what the payload is and whose it is, and a digest of both
    payload    [l, P, T, h, D] in the wire dtype, padded with zeros to 8 bytes; P planes: keys and values, or latents
    scales     [l, P, T, h] float32, in the formats that have them, padded likewise

T counts the tokens that the route carries of the range (`kv_transfer.shares`). Of layers that keep a recurrent state
the payload is that of the route's heads behind the last token, float32 in every wire format. A route that carries no
heads of a group, or no token of a range, sends the header alone.

Both sides compute the same sizes from the range and the layouts; nothing that a header says is used for more than to
be compared with what is expected. So whatever arrives, either the pages get exactly the chunk that was sent for them,
or `Corrupted` is raised and they are as they were (with a digest; without one, as far as the header shows).

A codec belongs to one route on one side: `pack` is the sender's, `unpack` the receiver's; each is called by one thread
at a time. It knows pages and slots; it knows no transport, no request and no order.

The wire format `native` carries the sender's own dtype, bit for bit. `int8` and `fp8` carry one byte for each value and
a float32 scale for each (layer, plane, token, head), symmetric: the largest magnitude of the D values meets the
largest code. A value v of a row whose largest magnitude is m comes back within

    int8   m / 254                                  (half a step of m / 127)
    fp8    max(|v| / 16, m / 448 / 1024)            (e4m3: half a unit of 3 mantissa bits; below 2^-6, half of 2^-9)

and, on top of it, what rounding to the receiver's dtype costs. Rows of zeros come back as zeros. A row with a NaN or an
infinity comes back as NaNs: nothing that was broken looks whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from cluster.kv_groups import num_rows
from kv_transfer import header, pages
from kv_transfer.actions import Range
from kv_transfer.header import HEADER_BYTES, DigestPolicy, Header
from kv_transfer.layout import KvLayout, check_compatible, wire_dtype
from kv_transfer.shares import Carried, RouteTokens
from kv_transfer.states import StateHeads

_ALIGNMENT = 8
_CPU_PIECE_BYTES, _GPU_PIECE_BYTES = 1 << 22, 1 << 26
_LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_SMALLEST_SCALE = 2.0**-120
"""Its inverse is finite. Rows whose values are all below it come back as zeros."""
_LARGEST_VALUE = torch.finfo(torch.float32).max * (1 - 2.0**-22)
"""The largest value that a code may decode to: dividing and multiplying again must not end in infinity."""
_FLOAT16_OVER_FP8 = 2.0**8
SCALE_BYTES = 4


class ChunkCodec(Protocol):
    """The content of a route's slots. `pack` is the sender's, `unpack` the receiver's, as `SlotCodec` has them."""

    def slot_bytes(self, num_cells: int) -> int: ...

    def num_bytes(self, what: Range) -> int: ...

    def moved_bytes(self, what: Range) -> int:
        """Bytes that the worker's counters have for a range."""
        ...

    def pack(self, kv: Tensor, block_table: Sequence[int], what: Range, tag: int, slot: Tensor) -> int: ...

    def unpack(self, slot: Tensor, kv: Tensor, block_table: Sequence[int], what: Range, tag: int) -> None: ...


class SlotCodec:
    """Packs and unpacks the slots of one route. `heads` are the local heads that the route carries."""

    def __init__(
        self,
        local: KvLayout,
        remote: KvLayout,
        heads: slice,
        *,
        is_sender: bool,
        states: StateHeads | None = None,
        tokens: RouteTokens | None = None,
        wire_format: str = "native",
        digest: str = "on",
        kernel: pages.PageKernel | None = None,
    ) -> None:
        """`states`: the heads of recurrent states that the route carries; `tokens`: which of them, None: all. `digest`
        (`on`, `sampled`, `off`) is the sender's choice; a receiver checks what the header says. `kernel` copies pages.

        Raises LayoutMismatch, and ValueError for heads that this rank does not hold or an unknown digest policy.
        """
        has_heads = heads.start < heads.stop or (states is not None and heads.start == heads.stop)
        if not has_heads or not 0 <= heads.start <= heads.stop <= local.num_local_heads:
            raise ValueError(f"heads [{heads.start}, {heads.stop}) are no range of {local.num_local_heads} local heads")
        sender, receiver = (local, remote) if is_sender else (remote, local)
        check_compatible(sender, receiver)
        self._wire_dtype_name = wire_dtype(sender, wire_format)
        self._wire_dtype: torch.dtype = getattr(torch, self._wire_dtype_name)
        self._wire_format = wire_format
        self._groups, self._states = local.groups, states
        self._tokens, self._num_shares = tokens, local.num_token_shares
        self._heads = heads
        self._num_heads = heads.stop - heads.start
        self._num_planes, self._head_dim = local.num_planes, local.head_dim
        self._num_rows = self._num_planes * self._num_heads
        self._policy = DigestPolicy(digest)
        self._kernel = kernel

    def slot_bytes(self, num_cells: int) -> int:
        """Size of a slot that holds any range of up to `num_cells` tokens times layers, a multiple of 64."""
        if self._tokens is not None:
            num_cells = self._tokens.most_cells(num_cells, num_rows(self._groups))
        most = self._code_bytes(num_cells) + self._scale_bytes(num_cells)
        if self._states is not None:  # all layers of a group at a time
            most = max(most, _padded(self._states.size_bytes(num_rows(self._groups)), _ALIGNMENT))
        return _padded(HEADER_BYTES + most, 64)

    def num_bytes(self, what: Range) -> int:
        """Bytes of a slot that the range fills, header included; equal on both sides."""
        if self._groups[what.group].has_state:
            assert self._states is not None, "layers keep a state that has no shape"
            return HEADER_BYTES + _padded(self._states.size_bytes(what.layer_end - what.layer_start), _ALIGNMENT)
        num_cells = self._carried(what).num_cells
        return HEADER_BYTES + self._code_bytes(num_cells) + self._scale_bytes(num_cells)

    def moved_bytes(self, what: Range) -> int:
        """All that is sent."""
        return self.num_bytes(what)

    def pack(self, kv: Tensor, block_table: Sequence[int], what: Range, tag: int, slot: Tensor) -> int:
        """Copies the range from the pages into the slot, under a header; returns the bytes to send.

        `kv` is [L, P, N, B, H, D]; `slot` uint8, contiguous, at an address that 8 divides. With both on a GPU, work is
        launched on the current stream and not waited for; otherwise the slot is ready on return. Raises ValueError.
        """
        pages.check_range(kv, block_table, what, self._num_shares)
        size = self._check_slot(slot, what)
        with torch.inference_mode():
            filled = slot[:size]
            staged = filled if slot.device == kv.device else torch.empty(size, dtype=torch.uint8, device=kv.device)
            self._encode(kv, block_table, what, staged)
            if staged is not filled:
                filled[HEADER_BYTES:].copy_(staged[HEADER_BYTES:])
            header.seal(filled, self._header(what, tag), self._policy.next_kind(slot.device))
        return size

    def unpack(self, slot: Tensor, kv: Tensor, block_table: Sequence[int], what: Range, tag: int) -> None:
        """Copies what lies in the slot to the range of the pages, having checked that it is that chunk, as it was sent.

        Raises Corrupted, and ValueError for a range or slot that does not fit; no page has been written then.
        """
        pages.check_range(kv, block_table, what, self._num_shares)
        size = self._check_slot(slot, what)
        with torch.inference_mode():
            filled = slot[:size]
            header.check(filled, self._header(what, tag))
            self._decode(filled.to(kv.device), kv, block_table, what)

    def _encode(self, kv: Tensor, block_table: Sequence[int], what: Range, slot: Tensor) -> None:
        if len(slot) == HEADER_BYTES:
            return  # another route's
        if self._groups[what.group].has_state:
            slot[-_ALIGNMENT:].zero_()
            heads, values = self._state_values(slot, what)
            heads.gather(kv, block_table, what, values)
            return
        carried = self._carried(what)
        codes, scales = self._views(slot, carried)
        self._clear_padding(slot, carried.num_cells)
        if scales is None:
            pages.gather(kv, block_table, carried.span, self._heads, codes, self._kernel, carried.places)
            return
        for piece, place in self._pieces(kv, carried):
            values = torch.empty(codes[place].shape, dtype=kv.dtype, device=kv.device)
            pages.gather(kv, block_table, piece.span, self._heads, values, self._kernel, piece.places)
            quantize(values, codes[place], scales[place])

    def _decode(self, slot: Tensor, kv: Tensor, block_table: Sequence[int], what: Range) -> None:
        if len(slot) == HEADER_BYTES:
            return
        if self._groups[what.group].has_state:
            heads, values = self._state_values(slot, what)
            heads.scatter(kv, block_table, what, values)
            return
        carried = self._carried(what)
        codes, scales = self._views(slot, carried)
        if scales is None:
            pages.scatter(kv, block_table, carried.span, self._heads, codes, self._kernel, carried.places)
            return
        for piece, place in self._pieces(kv, carried):
            values = torch.empty(codes[place].shape, dtype=kv.dtype, device=kv.device)
            dequantize(codes[place], scales[place], values)
            pages.scatter(kv, block_table, piece.span, self._heads, values, self._kernel, piece.places)

    def _carried(self, what: Range) -> Carried:
        return Carried(what) if self._tokens is None else self._tokens.carried(what)

    def _state_values(self, slot: Tensor, what: Range) -> tuple[StateHeads, Tensor]:
        """The route's heads of states, and the view of a slot that has their values, float32 [l, V]."""
        assert self._states is not None
        num_layers = what.layer_end - what.layer_start
        end = HEADER_BYTES + self._states.size_bytes(num_layers)
        return self._states, slot[HEADER_BYTES:end].view(torch.float32).view(num_layers, -1)

    def _pieces(self, kv: Tensor, carried: Carried) -> Iterator[tuple[Carried, tuple[slice, slice, slice]]]:
        """Cuts a range so that what is in work at once stays in a cache; with each piece its place in the views."""
        cell_bytes = self._num_rows * self._head_dim * torch.float32.itemsize
        room = max(1, (_GPU_PIECE_BYTES if kv.is_cuda else _CPU_PIECE_BYTES) // cell_bytes)
        num_tokens, what = min(room, carried.num_tokens), carried.span
        num_layers = room // num_tokens
        for layer in range(what.layer_start, what.layer_end, num_layers):
            layers = slice(layer, min(layer + num_layers, what.layer_end))
            for token in range(0, carried.num_tokens, num_tokens):
                tokens = slice(token, min(token + num_tokens, carried.num_tokens))
                yield carried.part(layers, tokens), (_moved(layers, -what.layer_start), slice(None), tokens)

    def _views(self, slot: Tensor, carried: Carried) -> tuple[Tensor, Tensor | None]:
        """Codes [l, P, T, h, D] and scales [l, P, T, h] of a slot; no scales in the native format."""
        what, num_cells = carried.span, carried.num_cells
        shape = (what.layer_end - what.layer_start, self._num_planes, carried.num_tokens, self._num_heads)
        num_codes = num_cells * self._num_rows * self._head_dim
        used = num_codes * self._wire_dtype.itemsize
        codes = slot[HEADER_BYTES : HEADER_BYTES + used].view(self._wire_dtype).view(*shape, self._head_dim)
        if not self._scale_bytes(num_cells):
            return codes, None
        start = HEADER_BYTES + self._code_bytes(num_cells)
        used = num_cells * self._num_rows * SCALE_BYTES
        return codes, slot[start : start + used].view(torch.float32).view(shape)

    def _clear_padding(self, slot: Tensor, num_cells: int) -> None:
        start = HEADER_BYTES + self._code_bytes(num_cells)
        slot[start - _ALIGNMENT : start].zero_()
        slot[-_ALIGNMENT:].zero_()

    def _code_bytes(self, num_cells: int) -> int:
        return _padded(num_cells * self._num_rows * self._head_dim * self._wire_dtype.itemsize, _ALIGNMENT)

    def _scale_bytes(self, num_cells: int) -> int:
        if self._wire_format == "native":
            return 0
        return _padded(num_cells * self._num_rows * SCALE_BYTES, _ALIGNMENT)

    def _check_slot(self, slot: Tensor, what: Range) -> int:
        size = self.num_bytes(what)
        if slot.dtype != torch.uint8 or slot.dim() != 1 or not slot.is_contiguous() or slot.numel() < size:
            raise ValueError(f"the slot is {slot.dtype} {tuple(slot.shape)}; give contiguous uint8 [>= {size}]")
        if slot.data_ptr() % _ALIGNMENT or slot.storage_offset() % _ALIGNMENT:
            raise ValueError(f"the slot begins at an address that {_ALIGNMENT} does not divide")
        return size

    def _header(self, what: Range, tag: int) -> Header:
        return Header(
            tag=tag,
            range=what,
            wire_format=self._wire_format,
            wire_dtype=self._wire_dtype_name,
            num_heads=self._num_heads,
            head_dim=self._head_dim,
            payload_bytes=self.num_bytes(what) - HEADER_BYTES,
        )


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def _padded(num_bytes: int, to: int) -> int:
    return -(-num_bytes // to) * to


def quantize(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Encodes `values` [..., D] of any float dtype into `codes` [..., D], int8 or fp8, and `scales` [...], float32."""
    largest_code = _LARGEST_CODE[codes.dtype]
    exact = values.float()
    magnitudes = exact.abs()
    scale = magnitudes.amax(dim=-1).div_(largest_code)
    is_broken = scale.isfinite().logical_not_()
    scale.clamp_(_SMALLEST_SCALE, _LARGEST_VALUE / largest_code)
    # What the codes of a broken row are does not matter: its scale makes NaN of every one.
    scales.copy_(scale.masked_fill_(is_broken, float("nan")))
    scaled = torch.mul(exact, scale.reciprocal_().unsqueeze(-1), out=magnitudes)
    codes.copy_(scaled.round_() if codes.dtype == torch.int8 else scaled)


def dequantize(codes: Tensor, scales: Tensor, values: Tensor) -> None:
    """Decodes into `values` [..., D] of any float dtype."""
    if codes.dtype == torch.int8:
        values.copy_(codes.float().mul_(scales.unsqueeze(-1)))
    else:
        values.copy_(_fp8_as_float(codes).mul_((scales * _FLOAT16_OVER_FP8).unsqueeze(-1)))


def _fp8_as_float(codes: Tensor) -> Tensor:
    """e4m3 codes as float32, 2^-8 of their values: torch's CPU converts one at a time, this all at once.

    The seven low bits of e4m3 fit the lower exponent and upper mantissa of a float16, whose exponent begins 8 lower.
    """
    bits = codes.view(torch.int8).to(torch.int16)  # the sign fills the upper half
    return bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16).float()
