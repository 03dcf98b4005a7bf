"""One call of a client: on whose behalf it is made, how it is answered, and what it asks for once it is validated.

The rest of the router sees requests as `ValidatedRequest` and clients as `Principal`. Pure values: who makes a `Call`
(gRPC's handlers, the HTTP routes, the runner of batches) says whose it is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from cluster.api_keys import ApiKey, KeyQuota
from cluster.auth import Metadata
from cluster.errors import Overloaded
from cluster.pb import generation_pb2, worker_pb2

T = TypeVar("T")

INLINE_BYTES = 8 * 1024
"""A request up to this size is read and tokenized in the event loop; a thread would cost more."""

LONGEST_NAME = 256
"""Characters of request_id, cache_salt, session_id."""
MOST_MESSAGES, MOST_TOOLS = 2048, 1024
"""Most messages and most tools of one conversation."""
MOST_BIASED_TOKENS = 1024
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model is to think before it answers."""
MOST_PRIORITY = 10
"""Priorities go from -10 to 10; 0 unless the client says otherwise."""


async def run_aside(is_long: bool, work: Callable[[], T], executor: Executor | None = None) -> T:
    """Runs work that takes long on a thread, so that one client's prompt does not hold up another's tokens."""
    if not is_long:
        return work()
    return await asyncio.get_running_loop().run_in_executor(executor, work)


@dataclass(frozen=True)
class Principal:
    """The client that sent a request."""

    key_id: str
    """Id of its API key, by which quotas are counted; never the key itself."""
    tenant: str
    """Fairness is between tenants, and each tenant's prefix cache has its own salt."""
    scopes: frozenset[str] = frozenset()
    weight: float = 1.0
    """Share of the cluster that the tenant gets beside others of weight 1 while there is not enough for all."""
    quota: KeyQuota = field(default_factory=KeyQuota)


ANYONE = Principal(key_id="", tenant="", scopes=frozenset({"generate", "admin"}))
"""Every client, where no keys are configured."""


def principal_of(key: ApiKey | None) -> Principal:
    """The owner of an API key; None: keys are not needed."""
    if key is None:
        return ANYONE
    return Principal(key.id, key.tenant, frozenset(key.scopes), key.weight, key.quota)


class ClientStalled(Overloaded):
    """The client does not read what is written to it."""

    reason = "CLIENT_STALLED"


async def _write_nothing(message: Any) -> None:
    raise NotImplementedError("a unary method writes nothing")


@dataclass(frozen=True)
class TurnTokens:
    """The tokens that one turn of a conversation adds to it."""

    tokenizer: str
    """The digest of the tokenizer that they are of."""
    num_known: int
    """Tokens of the turns before that the prompt begins with."""
    token_ids: Sequence[int]
    """What follows them: the rest of the prompt, then the answer."""
    num_answer: int
    """Tokens of the answer."""


@dataclass(frozen=True)
class Call:
    """One call of a method: over gRPC, over HTTP, or for a line of a batch."""

    principal: Principal = ANYONE
    metadata: Metadata = ()
    """Headers as the client sent them."""
    time_remaining: Callable[[], float | None] = lambda: None
    """Seconds until the client's deadline; None without one, as over HTTP, where a client hangs up instead."""
    write: Callable[[Any], Awaitable[None]] = _write_nothing
    """Sends a message of a streaming method; returns when the next one may follow."""
    opened: Callable[[str], None] = lambda generation_id: None
    """Told the id of a streamed generation once that is taken on, which may be long before its first message."""
    turns: Sequence[TurnTokens] = ()
    """The turns that a chat continues, in their order, as `keep_turn` was told them."""
    keep_turn: Callable[[TurnTokens], None] | None = None
    """Told the tokens of a chat's turn when it is over, before its client gets the end; one for each sequence."""


class OutputParts(Protocol):
    """The text of a sequence that may hold thinking and calls of tools (`router.tool_calls.parts`)."""

    num_calls: int
    """Calls that are whole."""
    num_thinking_tokens: int

    @property
    def is_empty(self) -> bool:
        """Nothing was read since the last `take`."""
        ...

    def feed(self, text: str, num_tokens: int, *, is_held: bool = False) -> None:
        """Reads the text of so many tokens. `is_held`: the client has it already."""
        ...

    def end(self, *, is_held: bool = False) -> None:
        """The text has ended."""
        ...

    def take(self, delta: generation_pb2.SequenceDelta) -> None:
        """Puts what was read into `delta`."""
        ...


def parts_of(delta: generation_pb2.SequenceDelta) -> Sequence[generation_pb2.OutputPart]:
    """What a delta holds, in order."""
    return delta.parts or ([generation_pb2.OutputPart(text=delta.text)] if delta.text else ())


def read_arguments(text: str) -> dict[str, Any] | None:
    """The object that the arguments of a call are; None: they are none. Half a character, which JSON may have and no
    text, is one that is unknown."""
    try:
        found = json.loads(text or "{}")
        if "\\ud" in text.lower():
            units = json.dumps(found, ensure_ascii=False).encode("utf-16", "surrogatepass")
            found = json.loads(units.decode("utf-16", "replace"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True)
class ValidatedRequest:
    """A request with every default filled in; `sampling` is never changed."""

    prompt_token_ids: tuple[int, ...]
    sampling: worker_pb2.Sampling
    stop: tuple[str, ...]
    include_stop_in_output: bool
    wants_text: bool
    wants_token_ids: bool
    wants_logprobs: bool
    wants_timing: bool
    stream_interval_tokens: int | None
    """None: the router chooses."""
    cache_salt: bytes
    """Made of the tenant and the client's own salt: requests with different salts share no prefix cache."""
    bypass_prefix_cache: bool
    queue_timeout_s: float | None
    """None: the router's own."""
    priority: int
    """Higher ones run first."""
    prompt_logprobs: int | None
    """Alternatives beside the logprob of each prompt token; None: no logprobs of the prompt."""
    client_request_id: str
    session_id: str = ""
    """Empty: it belongs to no session."""
    retain_s: float = 0.0
    """Seconds for which the client wants its KV kept."""
    new_parts: Callable[[str], OutputParts] | None = None
    """Makes what reads the text of one sequence, with a name of its own for the ids of its calls; None: it is text."""
    marks: frozenset[str] = frozenset()
    """Texts that its outputs keep where they are special tokens."""
