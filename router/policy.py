"""Which prefill worker and which decode worker run a request: least work, own decisions counted at once.

Pure: loads in, a placement out. Owns the ledger of work handed out and not yet done; knows no connection and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What one request costs the workers that run it."""

    num_prompt_tokens: int
    num_sequences: int
    num_output_tokens: int
    """Most tokens that decode will hold for it: prompt and all outputs."""


@dataclass(frozen=True)
class Placement:
    """Two worker ids, and why they were chosen, in words for Timing.placement."""

    prefill_id: str | None
    """None: the decode worker computes the prompt itself."""
    decode_id: str
    reason: str


class Ledger:
    """Outstanding work of each worker by id; a worker that was never charged has none."""

    def __init__(self) -> None:
        self._prefill_tokens: dict[str, int] = {}
        self._decode_sequences: dict[str, int] = {}
        self._decode_tokens: dict[str, int] = {}

    def choose(self, prefill_ids: Iterable[str], decode_ids: Iterable[str]) -> Placement:
        """The least loaded of each; equals are taken by id. Without a prefill worker, decode computes the prompt."""
        decode_id = min(decode_ids, key=lambda w: (self._decode_sequences.get(w, 0), self._decode_tokens.get(w, 0), w))
        prefill_id = min(prefill_ids, key=lambda w: (self._prefill_tokens.get(w, 0), w), default=None)
        if prefill_id is None:
            return Placement(None, decode_id, f"local prefill on {decode_id}: there is no prefill worker")
        return Placement(prefill_id, decode_id, f"disaggregated: {prefill_id} -> {decode_id}, least work")

    def add(self, placement: Placement, *, prefill_tokens: int = 0, sequences: int = 0, decode_tokens: int = 0) -> None:
        """Use `Charge`; negative amounts give work back; a worker at zero is forgotten."""
        if placement.prefill_id is not None:
            _bump(self._prefill_tokens, placement.prefill_id, prefill_tokens)
        _bump(self._decode_sequences, placement.decode_id, sequences)
        _bump(self._decode_tokens, placement.decode_id, decode_tokens)

    def outstanding(self, worker_id: str) -> tuple[int, int, int]:
        """(prompt tokens to prefill, sequences to decode, tokens those may hold)."""
        return (
            self._prefill_tokens.get(worker_id, 0),
            self._decode_sequences.get(worker_id, 0),
            self._decode_tokens.get(worker_id, 0),
        )


class Charge:
    """One request's share of the ledger, given back part by part and never twice."""

    def __init__(self, ledger: Ledger, placement: Placement, work: Work) -> None:
        self._ledger = ledger
        self._placement = placement
        self._prefill_tokens = work.num_prompt_tokens
        self._sequences = work.num_sequences
        self._decode_tokens = work.num_output_tokens
        ledger.add(
            placement,
            prefill_tokens=self._prefill_tokens,
            sequences=self._sequences,
            decode_tokens=self._decode_tokens,
        )

    def prefill_done(self) -> None:
        self._ledger.add(self._placement, prefill_tokens=-self._prefill_tokens)
        self._prefill_tokens = 0

    def sequence_done(self) -> None:
        if self._sequences:
            self._sequences -= 1
            self._ledger.add(self._placement, sequences=-1)

    def all_done(self) -> None:
        self.prefill_done()
        self._ledger.add(self._placement, sequences=-self._sequences, decode_tokens=-self._decode_tokens)
        self._sequences = self._decode_tokens = 0


def _bump(table: dict[str, int], key: str, amount: int) -> None:
    value = table.get(key, 0) + amount
    if value:
        table[key] = value
    else:
        table.pop(key, None)
