"""The noise is what its definition says, has no visible pattern, and differs wherever an input differs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.sampling import rng
from engine.sampling.rng import gumbel, row_keys

MASK64 = (1 << 64) - 1
MASK32 = (1 << 32) - 1


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def reference_bits(seed: int, sequence_index: int, position: int, token_id: int) -> int:
    """The definition in unbounded integers."""
    key = splitmix64(splitmix64(splitmix64(splitmix64(seed) ^ sequence_index)) ^ position)
    x = (token_id * 0x9E3779B1 + (key & MASK32)) & MASK32
    x = ((x ^ (x >> 17)) * 0xED5AD4BB) & MASK32
    x = (((x ^ (x >> 11)) + (key >> 32)) * 0xAC4C1B51) & MASK32
    x = ((x ^ (x >> 15)) * 0x31848BAB) & MASK32
    return (x ^ (x >> 14)) >> 1


def bits_of(
    seeds: list[int], sequence_indices: list[int], positions: list[int], vocab_size: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    keys = torch.from_numpy(row_keys(seeds, sequence_indices, positions))
    return rng._hash(keys, torch.arange(vocab_size, dtype=torch.int32)).numpy()


def chi_square(counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> float:
    """Distance from uniform in standard deviations; a good hash stays within a few."""
    expected = counts.sum() / counts.size
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.size - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_the_bits_are_those_of_the_definition() -> None:
    seeds, sequence_indices, positions = [0, 1, MASK64, 12345], [0, 15, 3, 0], [0, 1, 100_000, 7]
    bits = bits_of(seeds, sequence_indices, positions, 200_000)
    for row, (seed, sequence_index, position) in enumerate(zip(seeds, sequence_indices, positions, strict=True)):
        for token_id in (0, 1, 2, 1023, 65_536, 199_999):
            assert bits[row, token_id] == reference_bits(seed, sequence_index, position, token_id)


def test_the_noise_is_the_double_logarithm_of_the_bits() -> None:
    keys = torch.from_numpy(row_keys([7], [0], [0]))
    token_ids = torch.arange(5000, dtype=torch.int32)
    uniform = (rng._hash(keys, token_ids).double() + 0.5) / 2**31
    torch.testing.assert_close(gumbel(keys, token_ids), -(-(-uniform).log1p()).log().float(), rtol=1e-5, atol=1e-5)


def test_the_noise_has_the_moments_of_the_gumbel_distribution() -> None:
    keys = torch.from_numpy(row_keys([11] * 8, [0] * 8, list(range(8))))
    drawn = gumbel(keys, torch.arange(200_000, dtype=torch.int32)).double()
    assert drawn.isfinite().all()
    assert abs(drawn.mean().item() - 0.5772157) < 4 * math.pi / math.sqrt(6 * drawn.numel())
    assert abs(drawn.var().item() - math.pi**2 / 6) < 0.01


def test_the_extreme_bits_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = torch.tensor([[0, 1, 2**31 - 2, 2**31 - 1]], dtype=torch.int32)
    monkeypatch.setattr(rng, "_hash", lambda keys, token_ids: extremes)
    drawn = gumbel(torch.zeros(1, 2, dtype=torch.int32), torch.arange(4, dtype=torch.int32))[0]
    assert drawn.isfinite().all()
    assert drawn[0] > drawn[1] > drawn[2] >= drawn[3]
    assert drawn[0].item() == pytest.approx(-math.log(2**-32), abs=1e-3)


@pytest.mark.parametrize("shift", [23, 11, 0])
def test_the_tokens_of_one_row_are_uniform(shift: int) -> None:
    """High, middle and low bits of a vocabulary of 200,000."""
    bits = bits_of([42], [0], [0], 200_000)[0]
    counts = np.bincount((bits >> shift) & 0xFF, minlength=256)
    assert abs(chi_square(counts)) < 4


@pytest.mark.parametrize("varying", ["seed", "sequence_index", "position"])
def test_one_token_over_counting_inputs_is_uniform(varying: str) -> None:
    count, zeros = 20_000, [0] * 20_000
    steps = list(range(count))
    inputs = {"seed": zeros, "sequence_index": zeros, "position": zeros, varying: steps}
    bits = bits_of(inputs["seed"], inputs["sequence_index"], inputs["position"], 3)
    for token_id in range(3):
        assert abs(chi_square(np.bincount(bits[:, token_id] >> 23, minlength=256))) < 4


def test_neighbouring_tokens_and_positions_are_independent() -> None:
    """Pairs of 4-bit values fill their 256 cells evenly."""
    bits = bits_of([3] * 64, [0] * 64, list(range(64)), 4096) >> 27
    along_tokens = (bits[:, :-1] * 16 + bits[:, 1:]).ravel()
    along_positions = (bits[:-1] * 16 + bits[1:]).ravel()
    for pairs in (along_tokens, along_positions):
        assert abs(chi_square(np.bincount(pairs, minlength=256))) < 4


def test_no_row_is_another_row_shifted() -> None:
    bits = bits_of([0] * 32, [0] * 32, list(range(32)), 4096)
    values, counts = np.unique(bits, return_counts=True)
    assert counts.max() <= 3  # 131,072 draws of 2**31 values: repeats are rare, shifted rows would be full of them
    assert len(values) > bits.size - 50


def test_every_input_bit_flips_about_half_of_the_output_bits() -> None:
    def flips(a: list[int], b: list[int]) -> float:
        changed = bits_of([a[0]], [a[1]], [a[2]], 4096) ^ bits_of([b[0]], [b[1]], [b[2]], 4096)
        return float(np.unpackbits(changed.view(np.uint8)).mean() * 32 / 31)

    for which, width in ((0, 64), (1, 4), (2, 20)):
        for bit in range(width):
            other = [123, 5, 77]
            other[which] ^= 1 << bit
            assert 0.48 < flips([123, 5, 77], other) < 0.52


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    together = bits_of([1, 2, 3], [0, 1, 2], [9, 8, 7], 1000)
    assert (together[1] == bits_of([2], [1], [8], 1000)[0]).all()


def test_sequence_and_position_do_not_stand_in_for_one_another() -> None:
    bits = bits_of([0, 0, 1], [0, 1, 0], [1, 0, 0], 8)
    assert len({tuple(row) for row in bits.tolist()}) == 3


def test_a_seed_wider_than_64_bits_wraps() -> None:
    assert (row_keys([2**64 + 5, -1], [0, 0], [0, 0]) == row_keys([5, MASK64], [0, 0], [0, 0])).all()
