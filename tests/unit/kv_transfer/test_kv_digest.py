"""Every accident that a wire or a buffer can have changes a digest, whichever kind it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kv_cases import lets_other_threads_run

from kv_transfer import header
from kv_transfer.header import DigestKind, DigestPolicy, host_digest, words_digest

SEED = 0xFEDCBA9876543210
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def words(payload: torch.Tensor, seed: int = SEED) -> int:
    return int(words_digest(payload, seed))


def xxh3(payload: torch.Tensor, seed: int = SEED) -> int:
    return host_digest(payload, seed)


both = pytest.mark.parametrize("compute", [xxh3, words], ids=["XXH3", "WORDS"])
Compute = Callable[..., int]
# Sparse bytes too: words that differ in one high bit, or not at all, are the hard ones.
payloads = st.integers(1, 24).flatmap(
    lambda n: st.one_of(
        st.binary(min_size=8 * n, max_size=8 * n),
        st.lists(st.sampled_from([0, 1, 0x80]), min_size=8 * n, max_size=8 * n).map(bytes),
    )
)


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@both
@pytest.mark.parametrize("data", [bytes(264), bytes(range(256)) + bytes(8), b"\xff" * 264], ids=["0", "n", "255"])
def test_every_single_flipped_bit_is_found(compute: Compute, data: bytes) -> None:
    payload = tensor(data)
    seen = {compute(payload)}
    for bit in range(8 * len(data)):
        payload[bit // 8] ^= 1 << bit % 8
        seen.add(compute(payload))
        payload[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 8 * len(data) + 1


@both
@given(data=payloads, places=st.data())
@settings(max_examples=200)
def test_swapped_words_are_found(compute: Compute, data: bytes, places: st.DataObject) -> None:
    payload = tensor(data).view(torch.int64)
    one, other = (places.draw(st.integers(0, len(payload) - 1)) for _ in range(2))
    swapped = payload.clone()
    swapped[one], swapped[other] = payload[other].clone(), payload[one].clone()
    assume(not torch.equal(swapped, payload))
    assert compute(swapped.view(torch.uint8)) != compute(payload.view(torch.uint8))


@both
def test_words_that_differ_in_their_highest_bit_alone_are_no_exception(compute: Compute) -> None:
    payload = torch.zeros(64, dtype=torch.int64)
    payload[::2] = -(1 << 63)
    seen = {compute(payload.view(torch.uint8))}
    for other in range(1, 64, 2):
        swapped = payload.clone()
        swapped[0], swapped[other] = 0, -(1 << 63)
        seen.add(compute(swapped.view(torch.uint8)))
    assert len(seen) == 33


@both
@given(data=payloads, by=st.integers(1, 191))
@settings(max_examples=200)
def test_a_shifted_payload_is_found(compute: Compute, data: bytes, by: int) -> None:
    by %= len(data)
    shifted = data[by:] + data[:by]
    assume(shifted != data)
    assert compute(tensor(shifted)) != compute(tensor(data))


@both
@given(data=payloads, missing=st.integers(1, 192))
@settings(max_examples=200)
def test_a_payload_that_stops_early_is_found(compute: Compute, data: bytes, missing: int) -> None:
    kept = data[: max(0, len(data) - missing)]
    truncated = kept + bytes(len(data) - len(kept))
    assume(truncated != data)
    assert compute(tensor(truncated)) != compute(tensor(data))
    whole_words = data[: len(kept) // 8 * 8]
    assert compute(tensor(whole_words or bytes(8))) != compute(tensor(data)) or whole_words == data


@both
@given(data=payloads, other=payloads)
@settings(max_examples=100)
def test_another_payload_or_another_seed_has_another_digest(compute: Compute, data: bytes, other: bytes) -> None:
    assert compute(tensor(data), SEED) != compute(tensor(data), SEED + 1)
    assume(data != other)
    assert compute(tensor(data)) != compute(tensor(other))


def test_the_host_digest_is_xxh3_as_published() -> None:
    assert host_digest(torch.empty(0, dtype=torch.uint8), 0) == 0x2D06800538D394C2
    assert header.hash_bytes(b"") == 0x2D06800538D394C2


def test_a_words_digest_does_not_depend_on_how_many_words_are_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = torch.randint(0, 256, (8 * 1000,), dtype=torch.uint8)
    whole = words(payload)
    for at_once in (1, 7, 999, 1000):
        monkeypatch.setattr(header, "_WORDS_AT_ONCE", at_once)
        assert words(payload) == whole


def test_other_threads_run_while_a_large_payload_is_hashed() -> None:
    payload = torch.zeros(32 << 20, dtype=torch.uint8)
    view = payload.numpy().data
    assert lets_other_threads_run(lambda: header.xxhash.xxh3_64_intdigest(view))


def test_the_policy_says_which_slots_get_a_digest() -> None:
    on, sampled, off = (DigestPolicy(name) for name in ("on", "sampled", "off"))
    assert [on.next_kind(CPU) for _ in range(3)] == [DigestKind.XXH3] * 3
    assert [off.next_kind(CPU) for _ in range(3)] == [DigestKind.NONE] * 3
    kinds = [sampled.next_kind(CPU) for _ in range(33)]
    assert [i for i, kind in enumerate(kinds) if kind is not DigestKind.NONE] == [0, 16, 32]


def test_device_memory_is_digested_on_the_device() -> None:
    assert DigestPolicy("on").next_kind(GPU) is DigestKind.WORDS
    assert DigestPolicy("off").next_kind(GPU) is DigestKind.NONE


def test_an_unknown_policy_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="digest: 'auto' is none of on, sampled, off"):
        DigestPolicy("auto")
