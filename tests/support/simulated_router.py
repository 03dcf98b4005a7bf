"""A router for simulated workers: places, retries, cancels; keeps what each request was told and that it is told once.

Short on purpose. What it promises its workers is what `router.routing.dispatcher` does: an attempt that fails is taken
back on the other worker before the next one begins; events of an earlier attempt are not heard; what the client has
been told goes along as known tokens; attempts are counted anew after one that told tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING

from simulated_pages import Mark

from cluster.lifecycle import RequestKey
from cluster.pb import generation_pb2, worker_pb2
from router.routing.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from simulation import Node, World

MAX_ATTEMPTS = 3


@dataclass
class Request:
    """A request and what became of it."""

    number: int
    prompt: list[int]
    max_output_tokens: int
    n: int
    salt: bytes
    bypass_prefix_cache: bool
    stop_token_ids: Sequence[int] = ()
    attempt: int = 0
    outcome: str = ""
    """`done`, `cancelled` or `failed`."""
    decode: str = ""
    prefill: str = ""
    """Empty: the decode worker computes the prompt."""
    num_in_vain: int = 0
    """Attempts that failed since the client was last told a token."""
    num_told: int = 0
    """Tokens the client had when an attempt last failed."""
    tried: set[str] = field(default_factory=set)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """What the client has, by sequence."""
    early: dict[tuple[int, int], int] = field(default_factory=dict)
    told: set[tuple[int, int, int]] = field(default_factory=set)
    """(attempt, sequence, position) of every token that a worker told."""
    ended: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)
    """Those of them that a stop string ended."""
    is_decoding: bool = False
    num_handed_over: int = 0
    """Output tokens that are prefilled with the prompt in this attempt: the prefill worker tells the next one."""
    kept_tokens: list[int] = field(default_factory=list)
    """What failed attempts said that they leave behind."""

    @property
    def key(self) -> RequestKey:
        return RequestKey(f"r{self.number}", self.attempt)

    @cached_property
    def mark(self) -> Mark:
        shared = self.salt + (b" of %d alone" % self.number if self.bypass_prefix_cache else b"")
        return Mark(self.number, int.from_bytes(blake2b(shared, digest_size=7).digest(), "big"))

    def fail_attempt(self) -> bool:
        """False when another one may not follow."""
        num_told = sum(map(len, self.tokens.values()))
        if num_told > self.num_told:
            self.num_told, self.num_in_vain = num_told, 0
            self.tried.clear()
        self.num_in_vain += 1
        return self.num_in_vain < MAX_ATTEMPTS

    @property
    def has_left_prefill(self) -> bool:
        return self.is_decoding and all(len(tokens) > self.num_handed_over for tokens in self.tokens.values())


class Router:
    """Of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.requests: dict[str, Request] = {}
        self._open: dict[int, Request] = {}
        self.caches: dict[str, PrefixIndex] = {}
        """What each worker's prefix cache holds, by its name, as far as this session with it has told."""

    @property
    def open(self) -> list[Request]:
        return list(self._open.values())

    @property
    def num_open(self) -> int:
        return len(self._open)

    def submit(
        self,
        prompt: list[int],
        prefill: str,
        decode: str,
        *,
        max_output_tokens: int,
        n: int = 1,
        salt: bytes = b"",
        bypass_prefix_cache: bool = False,
        stop_token_ids: Sequence[int] = (),
    ) -> Request:
        number = len(self.requests)
        request = Request(number, prompt, max_output_tokens, n, salt, bypass_prefix_cache, stop_token_ids)
        request.tokens = {index: [] for index in range(n)}
        self.requests[f"r{number}"] = request
        self._open[number] = request
        self._place(request, prefill, decode)
        return request

    def cancel(self, request: Request) -> None:
        if not request.outcome:
            self._take_back(request)
            self._close(request, "cancelled")

    def stop_sequence(self, request: Request, index: int) -> None:
        """A stop string, which no worker knows of, has ended one sequence."""
        if request.outcome or index in request.ended:
            return
        request.ended.add(index)
        request.stopped.add(index)
        if len(request.ended) == request.n:
            self._take_back(request)
            self._close(request, "done")
        else:
            self._take_back(request, index)

    def on_events(self, node: Node, events: list[worker_pb2.Event]) -> None:
        for event in events:
            kind = event.WhichOneof("event")
            if kind == "info":
                self.caches[node.name] = PrefixIndex(node.sizes["block_size"], node.sizes["num_blocks"])
            elif kind == "cache":
                assert self.caches[node.name].apply(event.cache), "an event of its cache is missing"
            if kind not in ("tokens", "phase", "failed"):
                continue
            message = getattr(event, kind)
            request = self.requests[message.key.request_id]
            is_current = message.key.attempt == request.attempt and node.name in (request.prefill, request.decode)
            if request.outcome or not is_current:
                continue
            if kind == "tokens":
                self._on_tokens(request, message)
            elif kind == "phase":
                if message.phase == generation_pb2.Heartbeat.PHASE_DECODE:
                    request.is_decoding = True
            elif node.name == request.decode or not request.has_left_prefill:
                assert message.reason != worker_pb2.Failed.REASON_INVALID, message
                request.kept_tokens.append(message.num_kept_tokens)
                self._world.counts[f"told {worker_pb2.Failed.Reason.Name(message.reason)}"] += 1
                self._set_back(request, by=node.name)

    def move(self, request: Request, decode: str) -> None:
        """What decodes on one worker goes on from the same tokens on another: the first hands it over to the second."""
        if request.outcome or not request.has_left_prefill or request.decode == decode:
            return
        self._world.counts["moved"] += 1
        self._take_back(request)
        request.early.clear()
        self._place(request, request.decode, decode)

    def on_lost(self, node: Node) -> None:
        """The node's session is gone; it may come back with another."""
        self.caches.pop(node.name, None)
        for request in self.open:
            if node.name not in (request.prefill, request.decode):
                continue
            if node.name == request.decode or not request.has_left_prefill:
                self._set_back(request, by=node.name, is_lost=True)

    def _on_tokens(self, request: Request, message: worker_pb2.Tokens) -> None:
        index = message.sequence_index
        places = range(message.first_token_index, message.first_token_index + len(message.token_ids))
        assert places, f"{request.key} sequence {index}: no token is told"
        for position in places:
            name = (request.attempt, index, position)
            assert name not in request.told, f"{request.key} sequence {index}: token {position} was told twice"
            request.told.add(name)
        if index in request.ended:
            return
        known = request.tokens[index]
        assert places[0] >= len(known), f"{request.key} sequence {index}: token {places[0]} is told again"
        for position, token_id in zip(places, message.token_ids, strict=True):
            request.early[index, position] = token_id
        if message.finish_reason:
            request.early[index, places.stop] = -1
        while (index, len(known)) in request.early:
            token = request.early.pop((index, len(known)))
            if token < 0:
                request.ended.add(index)
                break
            known.append(token)
        if len(request.ended) == request.n:
            self._close(request, "done")

    def _set_back(self, request: Request, *, by: str, is_lost: bool = False) -> None:
        self._take_back(request, by=by)
        if not request.fail_attempt():
            self._close(request, "failed")
            return
        self._world.counts["retried"] += 1
        request.early.clear()
        if request.prefill and not (is_lost and by == request.decode):
            request.tried.add(request.prefill)
        lost = {by} if is_lost else set()
        decodes = [name for name in self._world.names("decode") if name not in lost]
        prefills = [name for name in self._world.names("prefill") if name not in lost | request.tried]
        if not decodes:
            self._close(request, "failed")
            return
        decode = request.decode if request.decode in decodes else self._world.random.choice(decodes)
        is_local = not prefills or request.num_in_vain + 1 == MAX_ATTEMPTS
        if is_local:
            self._world.counts["prefilled locally"] += 1
        self._place(request, "" if is_local else self._world.random.choice(prefills), decode)

    def _place(self, request: Request, prefill: str, decode: str) -> None:
        request.attempt += 1
        request.is_decoding = False
        request.num_handed_over = len(request.tokens[0]) if request.n == 1 else 0
        request.prefill, request.decode = prefill, decode
        sampling = worker_pb2.Sampling(
            params=generation_pb2.SamplingParams(
                temperature=1, top_p=1, repetition_penalty=1, n=request.n, seed=request.number
            ),
            stopping=generation_pb2.StoppingCriteria(
                max_output_tokens=request.max_output_tokens, stop_token_ids=request.stop_token_ids
            ),
        )
        admit = worker_pb2.Admit(
            key=request.key.to_proto(),
            role=worker_pb2.ROLE_DECODE,
            prompt_token_ids=request.prompt,
            sampling=sampling,
            expect_handoff=bool(prefill),
            cache_salt=request.salt,
            bypass_prefix_cache=request.bypass_prefix_cache,
            known_tokens=[
                worker_pb2.KnownTokens(sequence_index=index, token_ids=tokens)
                for index, tokens in request.tokens.items()
                if tokens
            ],
        )
        self._world.command(decode, worker_pb2.Command(admit=admit))
        if prefill:
            other = worker_pb2.Admit()
            other.CopyFrom(admit)
            other.role, other.expect_handoff = worker_pb2.ROLE_PREFILL, False
            incarnation = self._world.nodes[decode].incarnation
            other.decode_peer.CopyFrom(worker_pb2.Peer(worker_id=decode, incarnation=incarnation, address=decode))
            self._world.command(prefill, worker_pb2.Command(admit=other))
        for index in request.ended:
            self._take_back(request, index)

    def _take_back(self, request: Request, index: int | None = None, by: str = "") -> None:
        cancel = worker_pb2.Cancel(key=request.key.to_proto(), sequence_index=index)
        names = [name for name in (request.decode, request.prefill) if name and name != by]
        self._world.random.shuffle(names)
        for name in names:
            self._world.command(name, worker_pb2.Command(cancel=cancel))

    def _close(self, request: Request, outcome: str) -> None:
        request.outcome = outcome
        del self._open[request.number]
