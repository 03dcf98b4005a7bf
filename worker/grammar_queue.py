"""Owns the requests of a worker whose grammars are being compiled, which holds up no other request.

add -> (compiled aside) -> admitted with its constraint, or refused
  the router cancels it, or is gone -> forgotten
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from cluster.lifecycle import RequestKey
from cluster.pb import worker_pb2
from engine.sampling.constraint import Constrainer, Constraint
from worker.reporter import RouterSession


@dataclass
class WaitingAdmit:
    """A request as its router sent it; `constraint` is there once its grammar is compiled."""

    session: RouterSession
    admit: worker_pb2.Admit
    prompt_token_ids: tuple[int, ...] = ()
    """Where `admit` has none."""
    constraint: Constraint | None = None
    aborted: set[int] = field(default_factory=set)
    """Sequences that the router ended meanwhile."""


class WaitingAdmits:
    """Requests that wait for something before they are admitted. Runs on the engine thread."""

    def __init__(self) -> None:
        self._waiting: dict[RequestKey, WaitingAdmit] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def cancel(self, key: RequestKey, sequence_index: int | None) -> None:
        """The router ended a request, or one sequence of it."""
        if sequence_index is None:
            self._waiting.pop(key, None)
        elif key in self._waiting:
            self._waiting[key].aborted.add(sequence_index)

    def close_session(self, session: RouterSession) -> None:
        """A router is gone."""
        self._waiting = {key: each for key, each in self._waiting.items() if each.session != session}


class GrammarQueue(WaitingAdmits):
    """Requests that wait until their grammars are compiled, which delays no other."""

    def __init__(
        self,
        constrainer: Constrainer | None,
        post: Callable[..., None],
        admit: Callable[[WaitingAdmit], None],
        refuse: Callable[[WaitingAdmit, worker_pb2.Failed.Reason, str], None],
    ) -> None:
        """`post` has a call made on the engine thread; `admit` and `refuse` are called there."""
        super().__init__()
        self._constrainer = constrainer
        self._post = post
        self._admit = admit
        self._refuse = refuse

    def add(self, waiting: WaitingAdmit) -> None:
        """Admits the request when its grammar is compiled, or refuses it."""
        admit = waiting.admit
        if self._constrainer is None:
            why = "this worker's model folder has no tokenizer.json, which constrained output needs"
            self._refuse(waiting, worker_pb2.Failed.REASON_INVALID, why)
            return
        key = RequestKey.of(admit.key)
        self._waiting[key] = waiting
        self._constrainer.begin(admit.sampling.grammar, partial(self._post, self._compiled, key))

    def _compiled(self, key: RequestKey, compiled: Constraint | Exception) -> None:
        waiting = self._waiting.pop(key, None)
        if waiting is None:
            return
        if isinstance(compiled, Constraint):
            waiting.constraint = compiled
            self._admit(waiting)
            return
        is_invalid = isinstance(compiled, ValueError)
        reason = worker_pb2.Failed.REASON_INVALID if is_invalid else worker_pb2.Failed.REASON_INTERNAL
        self._refuse(waiting, reason, str(compiled))
