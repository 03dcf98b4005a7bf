"""Sessions that come back: conversations as in the Mooncake conversation trace, at a sixteenth of their length; agents.

What is kept of the trace (12,031 requests of an hour): how long first prompts, later additions and outputs are, how
many turns a session has, that requests come in bursts, and that everybody shares a system prompt, here one of a few.
What is not: the hour. A session's next turn comes after a tenth of the run at the median, so that there are next turns.
Agents share one of three system prompts, and come back in turn, each after all others.
Pure: from a seed, or from the trace's own JSONL, to sessions; knows no cluster and no clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path

from cluster.prefix_hash import prefix_hashes
from simulate import workload
from simulate.workload import RequestShape

SCALE = 16
"""Tokens of the trace for each token here."""
MOST_PROMPT_TOKENS = 1800
_MOST_OUTPUT = 70
_TOKENS = range(4, 1000)
"""Ids that are no special token of the bundled model."""
_SYSTEM_PROMPTS = (32, 96, 192)
"""Tokens of each. The trace has one, of a block of 512."""
_TURNS = (0.69, 0.18, 0.06, 0.03, 0.02, 0.01, 0.01)
"""Share of sessions with one turn, two, ..."""
_FIRST = (330, 1.23)
"""Median and spread (of a lognormal) of a first prompt's tokens; below: of what a later turn adds, of outputs."""
_NEXT = (12, 1.3)
_OUTPUT = (21, 0.8)
_THINK = (0.1, 1.0)
"""Median, as a share of the run, and spread of the time from one turn to the next."""
_BURST = 1.55
"""Sessions that begin at one instant, on average: requests of ten seconds then vary as much as the trace's."""


@dataclass(frozen=True)
class Turn:
    """`at`: when it comes, as a share of the run. `token_ids`: what the client adds to the history."""

    at: float
    token_ids: tuple[int, ...]
    num_output_tokens: int


@dataclass(frozen=True)
class Session:
    """One after another; a turn's prompt begins with all turns and answers before it, unless each is whole."""

    session_id: str
    turns: tuple[Turn, ...]
    are_whole: bool = False


def generate(num_requests: int, seed: int) -> list[Session]:
    """By the time of their first turn."""
    draw = random.Random(seed)
    prompts = [tuple(draw.choices(_TOKENS, k=length)) for length in _SYSTEM_PROMPTS]
    sessions: list[Session] = []
    left = num_requests
    begin = 0.0
    mean_turns = sum(turns * share for turns, share in enumerate(_TURNS, start=1))
    while left > 0:
        if draw.random() < 1 / _BURST:
            begin += draw.expovariate(num_requests / mean_turns / _BURST)
        session = _session(str(len(sessions)), begin % 1.0, draw.choice(prompts), left, draw)
        sessions.append(session)
        left -= len(session.turns)
    return sorted(sessions, key=lambda s: s.turns[0].at)


def _session(session_id: str, begin: float, system: tuple[int, ...], most: int, draw: random.Random) -> Session:
    num_turns = draw.choices(range(1, len(_TURNS) + 1), weights=_TURNS)[0]
    turns: list[Turn] = []
    at, length = begin, 0
    for number in range(min(num_turns, most)):
        added = _lognormal(draw, _FIRST if number == 0 else _NEXT)
        num_output = min(_MOST_OUTPUT, max(2, round(_lognormal(draw, _OUTPUT))))
        size = min(max(4, round(added)), MOST_PROMPT_TOKENS - len(system) - _MOST_OUTPUT)
        length += size + num_output
        if turns and (at > 1.0 or len(system) + length > MOST_PROMPT_TOKENS):
            break
        own = tuple(draw.choices(_TOKENS, k=size))
        turns.append(Turn(at, own if turns else system + own, num_output))
        at += _lognormal(draw, _THINK)
    return Session(session_id, tuple(turns))


def _lognormal(draw: random.Random, of: tuple[float, float]) -> float:
    median, spread = of
    return draw.lognormvariate(math.log(median), spread)


def agents(num_agents: int, num_turns: int, first: int, more: int, num_output: int, seed: int) -> list[Session]:
    """`first`: tokens of a first prompt, half of them the system's; `more`: what each later turn adds."""
    draw = random.Random(seed)
    systems = [tuple(draw.choices(_TOKENS, k=first // 2)) for _ in range(3)]

    def turn(agent: int, number: int) -> Turn:
        own = tuple(draw.choices(_TOKENS, k=more if number else first - first // 2))
        at = (number + agent / num_agents) / num_turns
        return Turn(at, own if number else systems[agent % 3] + own, num_output)

    return [
        Session(str(agent), tuple(turn(agent, number) for number in range(num_turns))) for agent in range(num_agents)
    ]


def in_order(sessions: Sequence[Session]) -> list[tuple[Session, Turn]]:
    """All turns, as they come."""
    return sorted(((session, turn) for session in sessions for turn in session.turns), key=lambda each: each[1].at)


class EndlessCache:
    """The prefix cache that keeps everything: what it has of a prompt is the most that any cache can have."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: set[bytes] = set()

    @property
    def num_tokens(self) -> int:
        """Of the blocks that differ."""
        return len(self._blocks) * self._block_size

    def add(self, token_ids: Sequence[int]) -> None:
        self._blocks.update(prefix_hashes([*token_ids, 0], self._block_size, b""))  # without the last

    def num_cached(self, prompt: Sequence[int]) -> int:
        """Tokens of whole blocks but for the last token, which is always computed."""
        found = takewhile(self._blocks.__contains__, prefix_hashes(prompt, self._block_size, b""))
        return sum(1 for _ in found) * self._block_size


def working_set(sessions: Sequence[Session], block_size: int) -> tuple[int, int]:
    """Tokens of all that the sessions could find again, and of their longest context."""
    cache, longest, answers = EndlessCache(block_size), 0, count(_TOKENS.stop)
    for session in sessions:
        context: list[int] = []
        for turn in session.turns:
            answer = [next(answers)] * turn.num_output_tokens  # nobody else has it
            context = [*([] if session.are_whole else context), *turn.token_ids, *answer]
            longest = max(longest, len(context))
            cache.add(context)
    return cache.num_tokens, longest


def read_trace(file: Path, num_requests: int, seed: int) -> list[Session]:
    """Sessions of a Mooncake trace, drawn until there are so many requests; the trace's whole time is the run's.

    A block of 512 tokens there is one of 32 here, the same for the same hash. Later prompts hold answers as the trace
    has them, so each prompt is whole."""
    entries = workload.read_trace(file)
    drawn: list[list[RequestShape]] = []
    left = num_requests
    sessions = _split(entries)
    random.Random(seed).shuffle(sessions)
    for session in sessions:
        if left > 0:
            drawn.append(session[:left])
            left -= len(session)
    last_at = max(1e-3, entries[-1].at)
    return [
        Session(str(number), tuple(_whole_turn(entry, last_at) for entry in session), are_whole=True)
        for number, session in enumerate(drawn)
    ]


def _split(entries: list[RequestShape]) -> list[list[RequestShape]]:
    """Requests that share more than the block that all begin with are of one session."""
    sessions: list[list[RequestShape]] = []
    session_of: dict[int, int] = {}
    for entry in entries:
        own = entry.blocks[1:]
        number = next((session_of[h] for h in reversed(own) if h in session_of), len(sessions))
        if number == len(sessions):
            sessions.append([])
        sessions[number].append(entry)
        session_of |= dict.fromkeys(own, number)
    return sessions


def _whole_turn(entry: RequestShape, last_at: float) -> Turn:
    num_tokens = min(MOST_PROMPT_TOKENS, max(4, entry.num_prompt_tokens // SCALE))
    num_block_tokens = entry.num_block_tokens // SCALE
    token_ids = [t for h in entry.blocks for t in random.Random(h).choices(_TOKENS, k=num_block_tokens)]
    num_output = min(_MOST_OUTPUT, max(2, entry.num_output_tokens // SCALE))
    return Turn(entry.at / last_at, tuple(token_ids[:num_tokens]), num_output)
