"""What keeping sessions costs the books of a pool: bytes and time for each, and prompts with and without them.

    python -m benchmarks.session_books

10,000 sessions of 100 blocks each, of 20 tenants; then prompts of 16 blocks that nobody has cached, in two pools by
turns, of which one has half of it full of sessions. Times are the processor's.
"""

from __future__ import annotations

import os
import random
import statistics
import time
import tracemalloc

from engine.kv.kv_tier import TierKey
from engine.kv.retaining_blocks import RetainingBlocks
from engine.kv.retention import Retention, Session, SessionName

NUM_SESSIONS, NUM_BLOCKS, NUM_TENANTS = 10_000, 100, 20
POOL, BLOCK, PROMPT = 4096, 16, 16
ROUNDS, PROMPTS = 9, 2000


def fill(retention: Retention[TierKey], keys: list[TierKey]) -> None:
    for number in range(NUM_SESSIONS):
        name = SessionName(str(number % NUM_TENANTS), str(number))
        retention.retain(name, keys[number * NUM_BLOCKS : (number + 1) * NUM_BLOCKS], 60.0)


def ask(blocks: RetainingBlocks, draw: random.Random, session: Session | None = None) -> None:
    tokens = [draw.randrange(1000) for _ in range(PROMPT * BLOCK)]
    table = blocks.match_prefix(tokens)
    table += blocks.allocate(PROMPT - len(table))
    blocks.publish(tokens, table, b"", len(tokens))
    if session is not None:
        blocks.retain(session, table)
    blocks.release(table)


def main() -> None:
    keys: list[TierKey] = [(0, os.urandom(16)) for _ in range(NUM_SESSIONS * NUM_BLOCKS)]
    tracemalloc.start()
    fill(measured := Retention(len(keys)), keys)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    begun = time.process_time()
    fill(Retention(len(keys)), keys)
    each = (time.process_time() - begun) / NUM_SESSIONS
    begun = time.process_time()
    measured.expire(0.0)
    look = time.process_time() - begun
    print(f"{size / len(measured):.0f} bytes a block beside its digest, {1e6 * each:.0f} us a session of {NUM_BLOCKS}")
    print(f"a look for sessions whose time is over, once a second: {1e3 * look:.1f} ms of {NUM_SESSIONS}")

    usual, full = RetainingBlocks(POOL, BLOCK), RetainingBlocks(POOL, BLOCK)
    full.session_share = 0.5
    for number in range(POOL // 2 // PROMPT):
        ask(full, random.Random(number), Session(SessionName("", str(number)), 60.0))
    taken: dict[bool, list[float]] = {False: [], True: []}
    for number in range(ROUNDS):
        for blocks in (usual, full):
            draw, begun = random.Random(-1 - number), time.process_time()
            for _ in range(PROMPTS):
                ask(blocks, draw)
            taken[blocks is full].append((time.process_time() - begun) / PROMPTS)
    ratio = statistics.median(b / a for a, b in zip(taken[False], taken[True], strict=True))
    times = " and ".join(f"{1e6 * statistics.median(each):.0f}" for each in taken.values())
    print(f"a prompt of {PROMPT} blocks without and with sessions in half of the pool: {times} us, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
