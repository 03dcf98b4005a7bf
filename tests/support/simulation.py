"""Worker cores in one thread: the real scheduling, hand-offs, connections and block manager over pages that tattle.

The model's KV is the token itself with marks of who wrote it (`simulated_pages`); the next token is one of two, equally
likely, that a hash of all the tokens read back names. So sequences of one prompt part ways, and a page that was lost,
shared wrongly, overwritten or landed in the wrong place is an alarm or a token that its context rules out. Messages,
layers and transfers take a random but seeded number of turns; faults strike at the rates that a world was given.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simulated_links import Link
from simulated_pages import Mark, Pages
from simulated_ranks import VOCAB, Pair, Ranks, next_tokens
from simulated_router import Request, Router

from cluster.failure_detector import FailureTimeouts
from cluster.lifecycle import RequestKey
from cluster.pb import handoff_pb2, worker_pb2
from cluster.settings import WorkerSettings
from worker.core import Core, Inbox
from worker.handoff_connection import HandoffConnection, HandoffContext
from worker.handoff_metrics import HandoffMetrics
from worker.steps import StepLog

__all__ = ["VOCAB", "Node", "Request", "World", "first_wrong_token"]

TURN_S = 0.001


def first_wrong_token(prompt: list[int], output: list[int]) -> int | None:
    """Index of the first output token that its true context rules out; None when there is none."""
    tokens = list(prompt)
    for index, token in enumerate(output):
        if token not in next_tokens(tokens):
            return index
        tokens.append(token)
    return None


class Metrics(HandoffMetrics):
    """Counts why links were retired."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def retired(self, epoch: str, reason: str) -> None:
        self._counts[f"link retired: {reason.removeprefix('REASON_').lower()}"] += 1
        super().retired(epoch, reason)


class Session:
    """A router's session with one life of a worker; a new one takes its place when the router gave that one up."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __call__(self, events: list[worker_pb2.Event]) -> None:
        node = self._node
        node.overheard += events
        if node.session is self:
            node.world.from_worker[node.name].append((node, self, events))


class Node:
    """One life of one worker: its core, and what stands for its speaking loop."""

    def __init__(self, world: World, name: str, incarnation: str, sizes: Mapping[str, Any]) -> None:
        self.world = world
        self.name = name
        self.incarnation = incarnation
        self.sizes = sizes
        self.session = Session(self)
        self.overheard: list[worker_pb2.Event] = []
        """All that was sent to routers."""
        self.is_running = True
        """False: dead, or stopped for a while."""
        self.num_slots, self.chunk_tokens = sizes["num_slots"], sizes["chunk_tokens"]
        self._has_worked = True
        pages = Pages(sizes["num_blocks"], sizes["block_size"], sizes["num_layers"], world.counts)
        settings = WorkerSettings.from_values(
            worker_id=name,
            role=name.split("-")[0],
            model_path="",
            max_num_batched_tokens=sizes["max_num_batched_tokens"],
            max_num_seqs=sizes["max_num_seqs"],
            max_pairs=sizes["max_pairs"],
            transfer_timeout_s=sizes["transfer_timeout_s"],
        )
        self.ranks = Ranks(self, pages, sizes["long_tokens"])
        inbox, timing = Inbox(), FailureTimeouts(1.0, 2.0, 3.0)
        context = HandoffContext(
            inbox.post, self.on_loop, self.ranks.issue, timing, Metrics(world.counts), clock=lambda: world.now
        )
        self.core = Core(
            inbox,
            self.ranks,
            pages.blocks,
            context,
            self.dial,
            settings,
            max_model_len=4096,
            vocab_size=VOCAB,
            num_layers=sizes["num_layers"],
            step_log=StepLog(None),
            overlaps=sizes["overlaps"],
            clock=lambda: world.now,
        )
        self.core.session_opened(self.session, worker_pb2.WorkerInfo(worker_id=name))

    def turn(self) -> bool:
        """False when there was nothing to do, and nothing can be until something is posted."""
        if not self._has_worked and self.core.inbox.is_empty and self.core._steps.is_idle:
            return False
        self._has_worked = self.core.turn(wait=False)
        return True

    def check_idle(self) -> None:
        """Nothing is held: every block is free or cached, every slot is back, no operation is under way."""
        self.core.blocks.check()
        assert self.core.blocks.num_held == 0, f"{self.name} holds {self.core.blocks.num_held} blocks"
        self.core.prefill.check_idle()
        self.core.decode.check_idle()
        assert self.ranks.is_idle and not self.core.handoffs.count_by_state()["closing"]
        assert self.core.reporter.num_requests == 0

    # The speaking loop, as the core sees it

    def on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        function(*arguments)
        for link in self.world.links.values():
            link.carry()

    def dial(self, connection: HandoffConnection, address: str, incarnation: str) -> None:
        callee: Node | None = self.world.nodes[address]
        if callee is not None and callee.incarnation != incarnation:
            callee = None
        self.world.links[connection.epoch] = Link(self.world, connection, self, callee)
        hello = handoff_pb2.SenderHello(pair_epoch=connection.epoch)
        self.on_loop(connection.enqueue, handoff_pb2.SenderMessage(hello=hello))


class World:
    """Workers, what is on its way between them, a router, and faults at given rates (per opportunity)."""

    def __init__(
        self,
        seed: int | random.Random,
        faults: Mapping[str, float] | None = None,
        overlaps: bool = False,
        shares_pages: bool = False,
    ) -> None:
        """`overlaps`: steps of its workers are launched before the one before them is read. `shares_pages`: a worker
        that receives reads the pages of the one that sends."""
        self.overlaps = overlaps
        self.shares_pages = shares_pages
        self.random = seed if isinstance(seed, random.Random) else random.Random(seed)
        self.rates = dict(faults or {})
        self.counts: Counter[str] = Counter()
        """Faults that took effect, and other things worth knowing."""
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.links: dict[str, Link] = {}
        self.pairs: defaultdict[str, Pair] = defaultdict(Pair)
        self.router = Router(self)
        self.from_worker: defaultdict[str, deque[tuple[Node, Session, list[worker_pb2.Event]]]] = defaultdict(deque)
        self._to_worker: defaultdict[str, deque[tuple[Session, worker_pb2.Command]]] = defaultdict(deque)
        self._stopped: dict[str, bool] = {}
        """Stopped nodes, and whether the router has noticed."""
        self._num_lives = 0

    def add(self, name: str, num_blocks: int, block_size: int, **sizes: Any) -> Node:
        """`name` begins with the role: `prefill-0`."""
        defaults = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "num_layers": 3,
            "max_num_batched_tokens": 24,
            "max_num_seqs": 16,
            "max_pairs": 4,
            "num_slots": 2,
            "chunk_tokens": 8,
            "long_tokens": 6,
            "transfer_timeout_s": 1e6,
            "overlaps": self.overlaps,
        }
        return self._start(name, {**defaults, **sizes})

    def names(self, role: str) -> list[str]:
        """Nodes of a role that the router knows to be there."""
        return [name for name in self.nodes if name.startswith(role) and name not in self._stopped]

    def mark_of(self, key: RequestKey) -> Mark:
        return self.router.requests[key.request_id].mark

    def tokens_of(self, key: RequestKey) -> Sequence[int]:
        """A prompt, and of a request of one sequence its output as far as the client has it."""
        request = self.router.requests[key.request_id]
        return request.prompt + request.tokens[0] if request.n == 1 else request.prompt

    def strikes(self, fault: str) -> bool:
        """Whether a fault happens now; one that does is counted."""
        rate = self.rates.get(fault, 0.0)
        has_struck = rate > 0 and self.random.random() < rate
        self.counts[fault] += has_struck
        return has_struck

    def command(self, name: str, command: worker_pb2.Command) -> None:
        node = self.nodes.get(name)
        if node is not None:
            self._to_worker[name].append((node.session, command))

    # Time

    def turn(self) -> bool:
        """Some things happen, in random order; False when nothing is under way."""
        self.now += TURN_S
        self._strike_nodes()
        moves = self._moves()
        if moves:
            for move in self.random.sample(moves, min(len(moves), self.random.choice((1, 1, 2, 4)))):
                move()
        has_run = [node.turn() for node in self._running() if self.random.random() < 0.8]
        return bool(moves) or any(has_run) or any(node.turn() for node in self._running())

    def run(self, until: Callable[[], bool] = lambda: False, limit: int = 50_000) -> None:
        for _ in range(limit):
            if until() or not self.turn():
                return
        raise AssertionError("the simulated cluster did not come to rest")

    def settle(self, limit: int = 50_000) -> None:
        """No more faults: whatever is open ends."""
        self.rates.clear()
        for name in list(self._stopped):
            self._wake(name)
        self.run(limit=limit)

    def check_idle(self) -> None:
        """Every request is over, nothing is held anywhere, and the router knows what is cached where."""
        assert not self.router.num_open, [r for r in self.router.requests.values() if not r.outcome]
        for node in self.nodes.values():
            node.check_idle()
            assert self.router.caches[node.name].hashes == node.core.blocks.cached_hashes, node.name

    def _running(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_running]

    def _moves(self) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = []
        for name, node in self.nodes.items():
            if self.from_worker[name]:
                moves.append(lambda name=name: self._to_router(name))  # type: ignore[misc]
            if not node.is_running:
                moves.append(lambda name=name: self._notice_or_wake(name))  # type: ignore[misc]
                continue
            if self._to_worker[name]:
                moves.append(lambda name=name: self._to_node(name))  # type: ignore[misc]
            moves.extend(node.ranks.moves())
        for epoch, link in list(self.links.items()):
            if link.is_over:
                del self.links[epoch]
            else:
                moves.extend(link.moves())
        return moves

    def _to_router(self, name: str) -> None:
        if not self.from_worker[name]:
            return  # another move of this turn has forgotten the session
        node, session, events = self.from_worker[name].popleft()
        if session == node.session and self._stopped.get(name) is not True:
            self.router.on_events(node, events)

    def _to_node(self, name: str) -> None:
        if not self._to_worker[name]:
            return
        node = self.nodes[name]
        session, command = self._to_worker[name].popleft()
        if session == node.session:
            node.core.inbox.post(node.core.command, session, command)

    # What befalls nodes and links as a whole

    def _strike_nodes(self) -> None:
        """At most one link and one worker a turn."""
        if not self.rates:
            return
        links = [link for link in self.links.values() if not link.is_cut]
        link = self.random.choice(links) if links else None
        if link is not None and self.strikes("link cut"):
            link.cut(self.random)
        elif link is not None and not link.is_silent and self.strikes("link silent"):
            link.is_silent = True
        node = self.random.choice(list(self.nodes.values()))
        if not node.is_running:
            return
        if self.strikes("tick"):
            node.core.inbox.post(node.core.handoffs.tick)
        elif self.strikes("worker died"):
            self._kill(node)
        elif self.strikes("worker stopped"):
            node.is_running = False
            self._stopped[node.name] = False

    def _start(self, name: str, sizes: Mapping[str, Any]) -> Node:
        self._num_lives += 1
        node = self.nodes[name] = Node(self, name, str(self._num_lives), sizes)
        return node

    def _kill(self, node: Node) -> None:
        """The process is gone, and another begins at the same address."""
        node.is_running = False
        node.ranks.die()
        for link in self.links.values():
            end = link.end_of(node)
            if end is not None:
                end.is_gone = True
                link.is_cut = True
        self._forget_session(node.name)
        self._start(node.name, node.sizes)
        self.router.on_lost(node)

    def _notice_or_wake(self, name: str) -> None:
        """A stopped process goes on after a while; the router may have given it up by then."""
        if not self._stopped[name] and self.random.random() < 0.5:
            self._stopped[name] = True
            self._forget_session(name)
            self.router.on_lost(self.nodes[name])
        elif self.random.random() < 0.2:
            self._wake(name)

    def _wake(self, name: str) -> None:
        node = self.nodes[name]
        node.is_running = True
        if self._stopped.pop(name):
            self.counts["worker woke up given up"] += 1
            self._forget_session(name)
            old, node.session = node.session, Session(node)
            node.core.inbox.post(node.core.session_closed, old)
            node.core.inbox.post(node.core.session_opened, node.session, worker_pb2.WorkerInfo(worker_id=name))

    def _forget_session(self, name: str) -> None:
        self.from_worker[name].clear()
        self._to_worker[name].clear()
