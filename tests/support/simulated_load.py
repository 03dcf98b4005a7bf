"""Load for a simulated world: requests that come and go, and the judgement of what they were told.

Some prompts share a beginning, under one of two tenants' salts; some requests bypass the prefix cache, some want two
sequences; clients cancel, and stop strings end sequences, at any moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulation import VOCAB, Request, World, first_wrong_token

EVERY_FAULT = {
    "message lost": 0.002,
    "message doubled": 0.01,
    "pair did not open": 0.03,
    "link refused": 0.02,
    "link cut": 0.005,
    "link silent": 0.005,
    "gather failed": 0.01,
    "send failed": 0.01,
    "receive failed": 0.01,
    "damaged": 0.01,
    "tick": 0.05,
    "worker died": 0.002,
    "worker stopped": 0.003,
}
"""Chances: of a message, an operation or a pair to meet it; of a turn to bring it."""


@dataclass(frozen=True)
class Load:
    """How many requests, of which sizes, and how restless."""

    num_requests: int
    num_open: int = 12
    """At one time."""
    longest_prompt: int = 24
    longest_output: int = 6
    most_sequences: int = 2
    cancels: float = 0.0
    """Chance of a turn to bring a cancel; a sequence is stopped half as often."""
    num_stop_tokens: int = 0
    """Each request ends at any of so many tokens."""
    moves: float = 0.0
    """Chance of a turn to bring a wish to move a request to another decode worker."""

    def new_request(self, world: World, stems: list[list[int]]) -> Request | None:
        """None while the router knows no worker of either role."""
        chance = world.random
        prefills, decodes = world.names("prefill"), world.names("decode")
        if not prefills or not decodes:
            return None
        shared = chance.choice((0, 0, self.longest_prompt // 2, self.longest_prompt - 1))
        own = [chance.randrange(VOCAB) for _ in range(chance.randint(1, self.longest_prompt - shared))]
        return world.router.submit(
            chance.choice(stems)[:shared] + own,
            chance.choice(prefills),
            chance.choice(decodes),
            max_output_tokens=chance.randint(1, self.longest_output),
            n=chance.choice((1, 1, self.most_sequences)),
            salt=chance.choice((b"tenant a", b"tenant b")),
            bypass_prefix_cache=chance.random() < 0.15,
            stop_token_ids=chance.sample(range(VOCAB), self.num_stop_tokens),
        )

    def carry(self, world: World) -> None:
        """Everything is over when this returns, and nothing is held. Raises AssertionError for whatever went wrong."""
        stems = [[world.random.randrange(VOCAB) for _ in range(self.longest_prompt)] for _ in range(2)]
        requests: list[Request] = []
        limit = 1000 + 400 * self.num_requests
        for _ in range(limit):
            if len(requests) < self.num_requests and world.router.num_open < self.num_open:
                request = self.new_request(world, stems)
                requests += [request] if request is not None else []
            elif len(requests) == self.num_requests and not world.router.num_open:
                break
            self._disturb(world)
            world.turn()
            for node in world.nodes.values():
                node.core.blocks.check()
        world.settle()
        world.check_idle()
        for request in requests:
            self._judge(world, request)

    def _disturb(self, world: World) -> None:
        if self.moves and world.router.num_open and world.random.random() < self.moves:
            decodes = world.names("decode")
            if decodes:
                world.router.move(world.random.choice(world.router.open), world.random.choice(decodes))
        if not self.cancels or world.random.random() >= self.cancels:
            return
        if world.router.num_open:
            request = world.random.choice(world.router.open)
            if request.n > 1 and world.random.random() < 0.5:
                world.counts["sequence stopped"] += 1
                world.router.stop_sequence(request, world.random.randrange(request.n))
            else:
                world.counts["cancelled"] += 1
                world.router.cancel(request)

    @staticmethod
    def _judge(world: World, request: Request) -> None:
        world.counts[f"request {request.outcome}"] += 1
        for index, output in request.tokens.items():
            assert first_wrong_token(request.prompt, output) is None, (request, index)
            stops = [place for place, token in enumerate(output) if token in request.stop_token_ids]
            assert not stops or stops == [len(output) - 1], (request, index)
            if request.outcome == "done" and index not in request.stopped and not stops:
                assert len(output) == request.max_output_tokens, (request, index)
