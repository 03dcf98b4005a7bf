"""Brings a hand-off from one worker to another into a state, and holds it there by stopping a process that it needs.

    OPENING     the decode worker's pool is full: Open is told, nothing is reserved
    PREFILLING  reserved; a prefill rank stands still, so that the step never ends
    OFFERED     computed; the decode leader stands still, so that nothing is granted
    GRANTED     a decode rank stands still: granted and under way, never landed; the prompt has more chunks than slots
    COMMITTING  the same, with a prompt that fits the slots: everything is offered and Commit told
    DECODING    handed over; tokens come

Each state is seen before `reach` returns, in what the workers tell of themselves; one that is missed, because a busy
machine took longer than a silent worker is waited for, is tried again. The workers have two ranks each. Knows no fault.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import grpc
from chaos_fleet import ChaosWorker, Fleet, await_true, process_state
from chaos_reference import Reference
from cluster_fixture import Stream
from workers import Output, hand_off, sampling

from cluster.lifecycle import RequestKey
from cluster.pb import generation_pb2, worker_pb2

PREFILL, DECODE = "prefill-0", "decode-0"
"""Where the router places a request when all are idle."""
CHUNK_TOKENS, NUM_SLOTS, STEP_TOKENS = 32, 4, 128
POOL_TOKENS = 1600
"""Two long prompts fit, a third does not."""
BLOCKER_TOKENS = 1100
LONG_TOKENS = 600
"""More chunks than slots, and more than the blocker leaves of the decode worker's pool."""
SHORT_TOKENS = 120
"""One step, whose layers leave in four chunks."""
OUTPUT_TOKENS = 24
LONG_OUTPUT_TOKENS = 80

WORKERS = {
    "chunk_tokens": CHUNK_TOKENS,
    "num_slots": NUM_SLOTS,
    "max_num_batched_tokens": STEP_TOKENS,
    "kv_cache_tokens": 4096,
    "max_model_len": POOL_TOKENS,
}


class State(Enum):
    OPENING = "opening"
    PREFILLING = "prefilling"
    OFFERED = "offered"
    GRANTED = "granted"
    COMMITTING = "committing"
    DECODING = "decoding"


@dataclass
class HandOff:
    """One request in a state. `release` lets it go on."""

    stream: Stream
    prompt: list[int]
    num_output_tokens: int
    state: State
    holders: list[tuple[ChaosWorker, int]] = field(default_factory=list)
    """Ranks that were stopped to hold it."""
    blocker: tuple[ChaosWorker, RequestKey] | None = None

    def check(self, reference: Reference) -> None:
        """It ends, and well, with the whole output."""
        self.stream.result()
        assert self.stream.token_ids() == reference(self.prompt, self.num_output_tokens)

    def release(self, *, but: tuple[ChaosWorker, int] | None = None) -> None:
        """Sets going what was stopped (`but` stays) and is alive."""
        for worker, rank in self.holders:
            popen = worker.ranks[rank].popen
            if (worker, rank) != but and popen.poll() is None and process_state(popen.pid) == "T":
                worker.cont(rank)
        if self.blocker is not None:
            unblock(*self.blocker)


_MOST_ATTEMPTS = 5


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    """Of each seed another, from the first token on; those of one seed begin alike."""
    return random.Random(seed).choices(range(4, 1000), k=num_tokens)


class Missed(Exception):
    """The request was placed elsewhere before its state was seen: a process that was stopped was given up meanwhile."""


def reach(fleet: Fleet, state: State, seed: int) -> HandOff:
    """A new request, from PREFILL to DECODE, in that state."""
    for attempt in range(_MOST_ATTEMPTS):
        hand_off = _begin(fleet, state, seed + 100_000 * attempt)
        try:
            _SEEN[state](hand_off, fleet[PREFILL], fleet[DECODE])
        except Missed:
            hand_off.release()
            hand_off.stream.join()
            fleet.settle()
            fleet.await_ready()
        else:
            return hand_off
    raise AssertionError(f"the state {state.value} was missed {_MOST_ATTEMPTS} times")


def _begin(fleet: Fleet, state: State, seed: int) -> HandOff:
    """The request is on its way, and the rank stands still that will hold it."""
    prompt = prompt_of(seed, SHORT_TOKENS if state is State.COMMITTING else LONG_TOKENS)
    num_output_tokens = LONG_OUTPUT_TOKENS if state is State.DECODING else OUTPUT_TOKENS
    prefill, decode = fleet[PREFILL], fleet[DECODE]
    _open_pair(prefill, decode, seed)
    blocker = block(decode, seed) if state is State.OPENING else None
    holders = [] if state in (State.OPENING, State.DECODING) else [(prefill, 1)]
    for worker, rank in holders:
        worker.stop(rank)
    stream = fleet.submit(prompt, num_output_tokens, name=f"{state.value}-{seed}", include_timing=True)
    return HandOff(stream, prompt, num_output_tokens, state, holders, blocker)


def _open_pair(prefill: ChaosWorker, decode: ChaosWorker, seed: int) -> None:
    """A first hand-off opens the pair, which takes every rank of both.

    The fleet's timers are short: on a machine that is busy, a link may be given up meanwhile. A router would place the
    request again, and so does this.
    """
    for attempt in range(1, _MOST_ATTEMPTS + 1):
        name, prompt = f"first-{seed}-{attempt}", prompt_of(seed + 2_000_000, 20)
        key = hand_off(name, prompt, prefill, decode, sampling(max_output_tokens=2))
        at_both = prefill.outputs[key], decode.outputs[key]
        await_true(functools.partial(_is_over, *at_both), functools.partial(str, at_both), 60.0)
        if at_both[1].finished:
            break
        decode.send(cancel=worker_pb2.Cancel(key=key.to_proto()))
    assert at_both[1].finished, at_both
    decode.wait_idle()


def _is_over(prefill: Output, decode: Output) -> bool:
    return bool(decode.finished or decode.failed or prefill.failed)


def block(decode: ChaosWorker, seed: int) -> tuple[ChaosWorker, RequestKey]:
    """Fills the decode worker's pool with a request of its own, until that is cancelled."""
    key = RequestKey(f"blocker-{seed}", 1)
    how = sampling(max_output_tokens=POOL_TOKENS - BLOCKER_TOKENS)
    prompt = prompt_of(seed + 1_000_000, BLOCKER_TOKENS)
    decode.send(
        admit=worker_pb2.Admit(key=key.to_proto(), role=worker_pb2.ROLE_DECODE, prompt_token_ids=prompt, sampling=how)
    )
    decode.wait_for(lambda: generation_pb2.Heartbeat.PHASE_DECODE in decode.outputs[key].phases)
    return decode, key


def unblock(decode: ChaosWorker, key: RequestKey) -> None:
    decode.send(cancel=worker_pb2.Cancel(key=key.to_proto()))


def _see_opening(hand_off: HandOff, prefill: ChaosWorker, decode: ChaosWorker) -> None:
    decode.wait_for(lambda: decode.stats.num_waiting_requests == 1)
    assert prefill.ask().num_waiting_requests == 1


def _await(hand_off: HandOff, is_there: Callable[[], bool]) -> None:
    """Until the state is there. Raises Missed once it cannot come any more: it ends with the second token."""

    def look() -> bool:
        if hand_off.stream.num_tokens > 1 or hand_off.stream.is_over:
            raise Missed
        try:
            return is_there()
        except grpc.RpcError:  # a worker takes no session while one of its ranks is silent
            return False

    await_true(look, lambda: f"{hand_off.state}: {hand_off.stream.events}")


def _see_prefilling(hand_off: HandOff, prefill: ChaosWorker, decode: ChaosWorker) -> None:
    _await(hand_off, lambda: decode.ask().blocks_held * 16 >= len(hand_off.prompt))
    _await(hand_off, lambda: prefill.ask().num_running_seqs == 1)


def _hold(hand_off: HandOff, decode: ChaosWorker, rank: int, prefill: ChaosWorker) -> None:
    """From PREFILLING on: a rank of the decode worker stands still, and the prefill worker goes on."""
    _see_prefilling(hand_off, prefill, decode)
    decode.stop(rank)
    hand_off.release()
    hand_off.holders = [(decode, rank)]


def _see_offered(hand_off: HandOff, prefill: ChaosWorker, decode: ChaosWorker) -> None:
    _hold(hand_off, decode, 0, prefill)
    _await(hand_off, lambda: prefill.slots("send", "offered") == NUM_SLOTS)


def _see_granted(hand_off: HandOff, prefill: ChaosWorker, decode: ChaosWorker) -> None:
    _hold(hand_off, decode, 1, prefill)
    _await(hand_off, lambda: decode.slots("receive", "posted") == NUM_SLOTS)


def _see_committing(hand_off: HandOff, prefill: ChaosWorker, decode: ChaosWorker) -> None:
    _see_granted(hand_off, prefill, decode)
    _await(hand_off, lambda: prefill.ask().num_running_seqs == 0)
    hand_off.stream.wait_for_tokens(1)


def _see_decoding(hand_off: HandOff, prefill: ChaosWorker, decode: ChaosWorker) -> None:
    hand_off.stream.wait_for_tokens(5)
    assert decode.ask().num_running_seqs == 1


_SEEN: dict[State, Callable[[HandOff, Any, Any], None]] = {
    State.OPENING: _see_opening,
    State.PREFILLING: _see_prefilling,
    State.OFFERED: _see_offered,
    State.GRANTED: _see_granted,
    State.COMMITTING: _see_committing,
    State.DECODING: _see_decoding,
}
