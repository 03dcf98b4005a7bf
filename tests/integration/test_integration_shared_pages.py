"""Hand-offs between workers that share pages equal the single-process engine; unequal ones are refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from workers import ROOT, Worker, hand_off, merged, running, sampling

MODEL = ROOT / "models" / "tiny-shakespeare"
PROMPTS = [[(i * step) % 1000 + 5 for i in range(length)] for step, length in ((37, 101), (11, 300), (53, 17))]
NUM_TOKENS = 12


def worker(name: str, role: str, transport: str, tp_size: int = 1, block_size: int = 16) -> Worker:
    return Worker(
        worker_id=name,
        role=role,
        model_path=str(MODEL),
        tp_size=tp_size,
        block_size=block_size,
        kv_cache_tokens=2048,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        chunk_tokens=32,
        transport=transport,
    )


@pytest.fixture(scope="module")
def fleet() -> Iterator[dict[str, Worker]]:
    named = {
        "p": worker("p", "prefill", "shm_pages"),
        "d": worker("d", "decode", "shm_pages"),
        "slots": worker("slots", "decode", "auto"),
        "p2": worker("p2", "prefill", "shm_pages", tp_size=2),
        "d2": worker("d2", "decode", "shm_pages", tp_size=2),
        "ps": worker("ps", "prefill", "auto"),
    }
    with running(*named.values()):
        yield named


def outputs(prefill: Worker, decode: Worker, tag: str) -> list[list[int]]:
    """Of all prompts at once."""
    keys = [
        hand_off(f"{tag} {number}", prompt, prefill, decode, sampling(max_output_tokens=NUM_TOKENS))
        for number, prompt in enumerate(PROMPTS)
    ]
    found = []
    for key in keys:
        decode.wait_for(lambda key=key: decode.outputs[key].finished)
        prefill.wait_for(lambda key=key: prefill.outputs[key].tokens)
        found.append(merged(key, prefill, decode).sequence())
    for one in (prefill, decode):
        one.wait_idle()
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("prefill", "decode"), [("p", "d"), ("p2", "d2")])
def test_what_is_read_out_of_pages_decodes_as_what_went_through_slots(
    fleet: dict[str, Worker], prefill: str, decode: str
) -> None:
    expected = outputs(fleet["ps"], fleet["slots"], f"slots {prefill}")
    before = fleet[prefill].stats.kv_bytes_sent
    assert outputs(fleet[prefill], fleet[decode], "pages") == expected
    sent = fleet[prefill].stats.kv_bytes_sent - before
    assert sent == 4 * 2 * 4 * 32 * 4 * sum(map(len, PROMPTS))  # layers, k and v, heads, head_dim, float32: no headers
    assert outputs(fleet[prefill], fleet[decode], "again") == expected  # from the prefix caches
