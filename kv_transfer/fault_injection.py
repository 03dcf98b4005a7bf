"""Makes a share of a rank's transfers fail on purpose, as `transfer_faults` sets it, for tests of recovery.

A pair is wrapped where it is made; nothing else knows of it. Each operation draws one number: most go through, the
others get one of the faults of their direction. Faults are counted and logged.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.errors import TransferFailed
from kv_transfer.header import HEADER_BYTES
from kv_transfer.transports.interface import Pair, TransferWork

logger = logging.getLogger(__name__)

SEND_FAULTS = ("corrupt", "fail", "close", "delay")
RECEIVE_FAULTS = ("fail", "close", "delay")
MAX_DELAY_S = 0.05


class Faults:
    """Draws faults: the same for the same seed and order of operations. Safe to use from any thread."""

    def __init__(self, rate: float, seed: int) -> None:
        """`rate`: the share of operations that get a fault, 0 to 1. Raises ValueError."""
        if not 0 <= rate <= 1:
            raise ValueError(f"transfer_faults: {rate} is not between 0 and 1")
        self.counts: Counter[str] = Counter()
        """The number of times each fault was made."""
        self._rate = rate
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def wrap(self, pair: Pair) -> Pair:
        """The pair, with faults."""
        return FaultyPair(pair, self)

    def draw(self, faults: Sequence[str], where: object) -> str | None:
        """The fault that the next operation on `where` gets."""
        with self._lock:
            if self._random.random() >= self._rate:
                return None
            fault = self._random.choice(faults)
            self.counts[fault] += 1
        logger.warning("injected: %s on %s", fault, where)
        return fault

    def below(self, limit: int) -> int:
        """A random number from 0 to before `limit`."""
        with self._lock:
            return self._random.randrange(limit)

    def delay_s(self) -> float:
        with self._lock:
            return self._random.uniform(0, MAX_DELAY_S)


class FaultyPair:
    """A pair with operations that fail on purpose."""

    def __init__(self, pair: Pair, faults: Faults) -> None:
        self._pair = pair
        self._faults = faults

    def __repr__(self) -> str:
        return repr(self._pair)

    @property
    def slots(self) -> Sequence[Tensor]:
        return self._pair.slots

    @property
    def pages(self) -> Tensor | None:
        return self._pair.pages

    def send(self, slot: int, num_bytes: int, after: torch.cuda.Event | None = None) -> TransferWork:
        fault = self._faults.draw(SEND_FAULTS, self)
        if fault == "fail":
            raise TransferFailed(f"send on {self} failed: injected")
        if fault == "corrupt":
            if after is not None:
                after.synchronize()
            self._damage(slot, num_bytes)
        return self._after(fault, self._pair.send(slot, num_bytes, after))

    def receive(self, slot: int, num_bytes: int) -> TransferWork:
        fault = self._faults.draw(RECEIVE_FAULTS, self)
        if fault == "fail":
            raise TransferFailed(f"receive on {self} failed: injected")
        return self._after(fault, self._pair.receive(slot, num_bytes))

    def release(self, slot: int) -> None:
        self._pair.release(slot)

    def close(self) -> None:
        self._pair.close()

    def _after(self, fault: str | None, work: TransferWork) -> TransferWork:
        if fault == "close":
            self._pair.close()
        return _LateWork(work, self._faults.delay_s()) if fault == "delay" else work

    def _damage(self, slot: int, num_bytes: int) -> None:
        """Flips one bit of what was packed, behind the header, which no digest may cover."""
        payload = self._pair.slots[slot][HEADER_BYTES:num_bytes]
        place = self._faults.below(len(payload))
        payload[place] ^= 1 << self._faults.below(8)


class _LateWork:
    def __init__(self, work: TransferWork, delay_s: float) -> None:
        self._work = work
        self._delay_s = delay_s

    def wait(self, timeout_s: float) -> None:
        time.sleep(self._delay_s)
        self._work.wait(timeout_s)
