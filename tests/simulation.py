"""Worker cores in one thread: real schedulers, hand-off machines and block managers over a model that tattles.

The model's "KV" is the token id itself, written to the page that the step names; the next token is one of two, equally
likely, that a hash of all the tokens read back through the block table names. So sequences of one prompt part ways, and
a page that was lost, shared wrongly, overwritten or landed in the wrong place yields a token that its context rules
out. Messages and transfers take a random but seeded number of turns; streams keep their order.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cluster.keys import RequestKey
from cluster.pb import handoff_pb2, rank_pb2, worker_pb2
from engine.block_manager import BlockManager
from engine.sampling import Sampler
from engine.step import StepInput
from worker.core import Core
from worker.step_log import StepLog

VOCAB = 97
POISON = -1


def next_tokens(tokens: list[int]) -> tuple[int, int]:
    """The two tokens that may follow."""
    value = 17
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB, (value // VOCAB) % VOCAB


def first_wrong_token(prompt: list[int], output: list[int]) -> int | None:
    """Index of the first output token that its true context rules out; None when there is none."""
    tokens = list(prompt)
    for index, token in enumerate(output):
        if token not in next_tokens(tokens):
            return index
        tokens.append(token)
    return None


class SimulatedGroup:
    """Ranks of one worker: pages hold token ids."""

    def __init__(self, node: Node, num_blocks: int, block_size: int) -> None:
        self.node = node
        self.block_size = block_size
        self.pages = np.full(num_blocks * block_size, POISON)
        self.slots: dict[int, np.ndarray] = {}
        self.number = 0
        self.last_step = 0

    def step(self, step: StepInput) -> torch.Tensor:
        self.number += 1
        self.last_step = self.number
        for source, target in step.block_copies:
            rows = [np.arange(b * self.block_size, (b + 1) * self.block_size) for b in (source, target)]
            self.pages[rows[1]] = self.pages[rows[0]]
        self.pages[step.slot_mapping] = step.token_ids
        logits = torch.zeros(len(step.logits_indices), VOCAB)
        ends = (step.cu_seqlens_q[1:] - 1).tolist()
        for row, index in enumerate(step.logits_indices.tolist()):
            sequence = ends.index(index)
            tokens = self._read(step.block_tables[sequence].tolist(), 0, int(step.seqlens_k[sequence]))
            logits[row, list(next_tokens(tokens.tolist()))] = 50.0
        return logits

    def issue(self, command: rank_pb2.RankCommand) -> int:
        self.number += 1
        number, kind = self.number, command.WhichOneof("command")
        self.node.world.later(self.node, lambda: self._run(number, kind, getattr(command, kind)))
        return number

    def _run(self, number: int, kind: str, command: Any) -> bool:
        """False: not possible yet, and nothing behind it either."""
        if kind == "gather":
            self.slots[command.slot] = self._read(list(command.block_table), command.token_start, command.token_end)
        elif kind == "send":
            self.node.world.wire[command.pair_epoch].append(self.slots.pop(command.slot).copy())
        elif kind == "receive" and not self._land(command):
            return False
        self.node.core.carrier.command_done(number, "", 0)
        return True

    def _land(self, command: rank_pb2.PageRange) -> bool:
        wire = self.node.world.wire[command.pair_epoch]
        if not wire:
            return False
        positions = np.arange(command.token_start, command.token_end)
        table = np.array(command.block_table)
        self.pages[table[positions // self.block_size] * self.block_size + positions % self.block_size] = wire.popleft()
        return True

    def _read(self, table: list[int], start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        blocks = np.array(table)[positions // self.block_size]
        return self.pages[blocks * self.block_size + positions % self.block_size]


class Node:
    """One worker of the simulated world, and its voice."""

    def __init__(self, world: World, name: str, num_blocks: int, block_size: int, **limits: int) -> None:
        self.world = world
        self.name = name
        options = {"max_num_batched_tokens": 24, "max_num_seqs": 16, "num_slots": 2, "chunk_tokens": 8, **limits}
        self.num_slots = options["num_slots"]
        self.chunk_tokens = options["chunk_tokens"]
        self.core = Core(
            BlockManager(num_blocks, block_size),
            Sampler(VOCAB),
            max_model_len=10_000,
            step_log=StepLog(None),
            **options,
        )
        self.core.attach(SimulatedGroup(self, num_blocks, block_size), self)
        self.links: dict[str, str] = {}

    # Voice

    def events(self, session: str, events: list[worker_pb2.Event]) -> None:
        self.world.events[self.name].extend(events)

    def open_link(self, peer: str, address: str, incarnation: str) -> None:
        if peer in self.links:
            return
        epoch = self.links[peer] = f"{self.name}->{address}"
        receiver = self.world.nodes[address]
        up = handoff_pb2.SenderHello()
        down = handoff_pb2.ReceiverHello(pair_epoch=epoch, chunk_tokens=receiver.chunk_tokens)
        self.world.send(f"{epoch}/there", receiver, receiver.core.carrier.peer_up, epoch, "", up)
        self.world.send(f"{epoch}/back", self, self.core.carrier.link_up, peer, down)
        self.world.epochs[epoch] = (self, peer, receiver)

    def tell_receiver(self, peer: str, message: handoff_pb2.SenderMessage) -> None:
        if peer in self.links:
            epoch = self.links[peer]
            receiver = self.world.epochs[epoch][2]
            self.world.send(f"{epoch}/there", receiver, receiver.core.carrier.peer_heard, epoch, message)

    def tell_sender(self, epoch: str, message: handoff_pb2.ReceiverMessage) -> None:
        sender, _, _ = self.world.epochs[epoch]
        self.world.send(f"{epoch}/back", sender, sender.core.carrier.link_heard, message)

    def close_link(self, peer: str) -> None:
        raise AssertionError(f"{self.name} closed its link to {peer}")


class World:
    """Nodes, ordered streams with random delays, and what the routers' session heard."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.nodes: dict[str, Node] = {}
        self.events: dict[str, list[worker_pb2.Event]] = defaultdict(list)
        self.wire: dict[str, deque[np.ndarray]] = defaultdict(deque)
        self.epochs: dict[str, tuple[Node, str, Node]] = {}
        self._streams: dict[str, deque[tuple[Node, Callable[..., None], tuple[Any, ...]]]] = defaultdict(deque)
        self._transfers: dict[str, deque[Callable[[], bool]]] = defaultdict(deque)

    def add(self, name: str, num_blocks: int, block_size: int, **limits: int) -> Node:
        node = self.nodes[name] = Node(self, name, num_blocks, block_size, **limits)
        node.core.session_opened("session", worker_pb2.WorkerInfo(worker_id=name))
        return node

    def send(self, stream: str, node: Node, handler: Callable[..., None], *arguments: Any) -> None:
        self._streams[stream].append((node, handler, arguments))

    def later(self, node: Node, operation: Callable[[], bool]) -> None:
        """The transfer thread of a node: first in, first out."""
        self._transfers[node.name].append(operation)

    def turn(self) -> bool:
        """Something random happens; False when nothing is under way."""
        ready = [("stream", s) for s, q in self._streams.items() if q] + [
            ("op", n) for n, q in self._transfers.items() if q
        ]
        self.random.shuffle(ready)
        for kind, name in ready[: self.random.randint(1, 3)]:
            if kind == "stream":
                node, handler, arguments = self._streams[name].popleft()
                node.core.post(handler, *arguments)
            else:
                operations = self._transfers[name]
                if operations[0]():
                    operations.popleft()
        has_run = [node.core.turn(wait=False) for node in self.nodes.values()]
        return bool(ready) or any(has_run)

    def run(self, until: Callable[[], bool] = lambda: False, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.turn() or until():
                return
        raise AssertionError("the simulated cluster did not come to rest")

    def admit(
        self, request_id: str, prompt: list[int], prefill: Node, decode: Node, *, max_output_tokens: int, n: int = 1
    ) -> RequestKey:
        key = RequestKey(request_id, 1)
        sampling = worker_pb2.Sampling(
            temperature=1, top_p=1, repetition_penalty=1, n=n, max_output_tokens=max_output_tokens, seed=len(prompt)
        )
        peer = worker_pb2.Peer(worker_id=decode.name, incarnation="1", address=decode.name)
        for node, role in ((decode, worker_pb2.ROLE_DECODE), (prefill, worker_pb2.ROLE_PREFILL)):
            admit = worker_pb2.Admit(
                key=key.to_proto(),
                role=role,
                prompt_token_ids=prompt,
                sampling=sampling,
                decode_peer=peer,
                expect_handoff=True,
            )
            self.send(f"router/{node.name}", node, node.core.command, "session", worker_pb2.Command(admit=admit))
        return key

    def cancel(self, key: RequestKey, *nodes: Node) -> None:
        for node in nodes:
            command = worker_pb2.Command(cancel=worker_pb2.Cancel(key=key.to_proto()))
            self.send(f"router/{node.name}", node, node.core.command, "session", command)

    def outputs(self, key: RequestKey) -> dict[int, list[int]]:
        """Output tokens of each sequence, from whichever node told them; asserts that none is told twice."""
        told: dict[int, dict[int, int]] = defaultdict(dict)
        for events in self.events.values():
            for tokens in (e.tokens for e in events if e.HasField("tokens") and RequestKey.of(e.tokens.key) == key):
                for offset, token in enumerate(tokens.token_ids):
                    index = tokens.first_token_index + offset
                    assert index not in told[tokens.sequence_index], f"token {index} was told twice"
                    told[tokens.sequence_index][index] = token
        return {s: [t[i] for i in range(len(t))] for s, t in told.items()}

    def failures(self) -> list[worker_pb2.Failed]:
        return [e.failed for events in self.events.values() for e in events if e.HasField("failed")]

    def check_idle(self) -> None:
        """Nothing is held anywhere: every pool is free or cached, every slot is back."""
        for node in self.nodes.values():
            node.core.blocks.check()
            assert node.core.blocks.num_held == 0, f"{node.name} holds {node.core.blocks.num_held} blocks"
            node.core.prefill.check_idle(node.num_slots)
            node.core.decode.check_idle(node.num_slots)
