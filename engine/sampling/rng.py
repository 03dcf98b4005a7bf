"""Owns randomness: Gumbel noise as a pure function of (seed, sequence, position, token id), without state.

So a sequence that moves, is preempted or is replayed draws the same tokens, whatever else is in its batch. The hash is
counter-based: splitmix64 makes a 64-bit key for each row, then a 32-bit multiply-xorshift mixer (the constants of
Wellons' triple32) turns key and token id into bits, the second half of the key entering midway so that two rows are
never shifts of one another. Not for secrets.

Legend: R rows, V token ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

UINT64_MASK = (1 << 64) - 1
TINY_BELOW_ONE = 1.0 - 2.0**-24
"""The largest float32 below 1: keeps every draw finite."""


def _signed(constant: int) -> int:
    """The int32 of the same bits: torch's int32 wraps, and has kernels that its uint32 lacks."""
    return constant - (1 << 32) if constant >= 1 << 31 else constant


TOKEN_STRIDE = _signed(0x9E3779B1)
MULTIPLIER_1 = _signed(0xED5AD4BB)
MULTIPLIER_2 = _signed(0xAC4C1B51)
MULTIPLIER_3 = _signed(0x31848BAB)


def row_keys(seeds: Sequence[int], sequence_indices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.int32]:
    """One 64-bit key a row, as int32 [R, 2]. Seeds are taken modulo 2**64."""
    return _halves(_splitmix64(_sequence_keys(seeds, sequence_indices) ^ np.array(positions, dtype=np.uint64)))


def sequence_keys(seeds: Sequence[int], sequence_indices: Sequence[int]) -> npt.NDArray[np.int32]:
    """Returns the part of a row's key that every position has, int32 [R, 2]: the key is splitmix64 of it ^ position."""
    return _halves(_sequence_keys(seeds, sequence_indices))


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 [R, V], for keys int32 [R, 2] and token ids int32 [V], on their device."""
    uniform = _hash(keys, token_ids).float().add_(0.5).mul_(2.0**-31).clamp_(max=TINY_BELOW_ONE)
    # The largest of many draws decides. It comes from the smallest uniforms, where float32 is finest; hence 1 - u.
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _hash(keys: Tensor, token_ids: Tensor) -> Tensor:
    """31 random bits for each key and token id: int32 [R, V] in [0, 2**31)."""
    bits = (token_ids * TOKEN_STRIDE).unsqueeze(0) + keys[:, :1]  # [R, V]
    scratch = torch.empty_like(bits)
    _xor_shift(bits, 17, scratch).mul_(MULTIPLIER_1)
    _xor_shift(bits, 11, scratch).add_(keys[:, 1:]).mul_(MULTIPLIER_2)
    _xor_shift(bits, 15, scratch).mul_(MULTIPLIER_3)
    _xor_shift(bits, 14, scratch)
    return bits.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF)


def _xor_shift(bits: Tensor, shift: int, scratch: Tensor) -> Tensor:
    """bits ^= bits >>> shift; the mask undoes the sign that int32's shift drags in."""
    torch.bitwise_right_shift(bits, shift, out=scratch)
    return bits.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))


def _sequence_keys(seeds: Sequence[int], sequence_indices: Sequence[int]) -> npt.NDArray[np.uint64]:
    key = _splitmix64(np.array([seed & UINT64_MASK for seed in seeds], dtype=np.uint64))
    return _splitmix64(_splitmix64(key ^ np.array(sequence_indices, dtype=np.uint64)))


def _halves(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
    return keys.astype("<u8").view("<i4").reshape(-1, 2).astype(np.int32)


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
