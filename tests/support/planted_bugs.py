"""Bugs that are planted in Baton, one at a time, to see that simulated clusters with faults find them.

    python tests/support/planted_bugs.py --limit 200 [NAME ...]

Each is one method with a few words of its source replaced. Prints for each the first seed that finds it, and how; exits
with 1 when one is not found.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import logging
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType

from crowded_cluster import Load, crowded

from simulate.scenario import Scenario


@dataclass(frozen=True)
class Bug:
    """Words of one function, and those that take their place."""

    name: str
    where: str
    """`module:Class.method` or `module:function`."""
    changes: tuple[tuple[str, str], ...]


BUGS = (
    Bug(
        "a lost cancel: only the first worker of an attempt is told of it",
        "router.stream.request:Attempt.cancel",
        (("if worker is not by:", "if worker is not by and worker is self.workers[0]:"),),
    ),
    Bug(
        "a block freed early: what is released in a step is free at once",
        "engine.kv.block_manager:BlockManager.release",
        (("if self._released_in_steps:", "if False:"),),
    ),
    Bug(
        "a retry that repeats a token",
        "router.routing.running_requests:_admit",
        (("token_ids=s.known_ids)", "token_ids=s.known_ids[:-1])"),),
    ),
    Bug(
        "a stale attempt accepted",
        "router.routing.running_requests:RunningRequests.find",
        (("live.key.attempt != key.attempt or ", ""),),
    ),
    Bug(
        "a missed wake-up: the engine sleeps after a step",
        "worker.core:Core.turn",
        (("return has_ended", "return False"),),
    ),
    Bug(
        "KV that did not arrive counts as landed",
        "decode_worker.receiver:Receiver.landed",
        (("if not error:", "if True:"), ("if error and", "if False and")),
    ),
    Bug(
        "blocks can be found before they are computed",
        "engine.sequence:publish_blocks",
        (
            ("sequence.tokens(0, sequence.num_computed_tokens)", "sequence.tokens(0, sequence.num_tokens)"),
            ("sequence.request.cache_salt, sequence.num_computed_tokens", "sequence.request.cache_salt, len(tokens)"),
        ),
    ),
    Bug(
        "sequences of one prompt share a block that both write to",
        "decode_worker.scheduler:DecodeScheduler.fork",
        (("self._copy(source, target)", "pass"),),
    ),
    Bug(
        "places that were reserved are not given back",
        "worker.decode_role:DecodeRole._release_reservation",
        (("self._scheduler.num_reserved_seqs -= task.request.params.n", "pass"),),
    ),
    Bug(
        "the router charges a worker for a request that has left it",
        "router.routing.running_requests:RunningRequests._remove",
        (("live.attempt.charge.all_done()", "pass"),),
    ),
    Bug(
        "routers are not told of a block that was evicted",
        "engine.kv.block_manager:BlockManager._evict",
        (("self._changes.evict(evicted)", "pass"),),
    ),
    Bug(
        "a worker goes on with the requests of a router that is gone",
        "worker.core:Core.session_closed",
        (('self._cancel(key, "the router closed its session", None)', "pass"),),
    ),
    Bug(
        "a stale claim accepted: a router writes to the journal of a generation that another one has taken over",
        "cluster.state:judge",
        (("if write.claim.is_fenced_by(held.claim):", "if False:"),),
    ),
    Bug(
        "a key may have any number of live requests",
        "router.queue.quota:Quotas.begin",
        (("key.num_live += 1", "pass"),),
    ),
    Bug(
        "a tenant that sends much gets all: requests are served as they came",
        "router.queue.fair_order:_Class.first",
        (("(self.backlogged[n].start, self.backlogged[n].head.arrival)", "self.backlogged[n].head.arrival"),),
    ),
    Bug(
        "a worker that has died is not brought back",
        "controller.supervisor:RestartPolicy.ended",
        (("return Restart(min(", "return GiveUp(why, is_mistake=False) if True else Restart(min("),),
    ),
    Bug(
        "a new controller ends what it finds",
        "controller.adoption:choose",
        (("and all(process.card for process in ranks)", "and False"),),
    ),
    Bug(
        "a send slot is lost when its offer is dropped",
        "prefill_worker.sender:Sender._drop_offers",
        (("self._free_slot(chunk)", "pass"),),
    ),
)


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Baton has the bug meanwhile. Raises ValueError where its words are not there once any more."""
    module_name, _, path = bug.where.partition(":")
    module = importlib.import_module(module_name)
    *owners, name = path.split(".")
    owner: object = module
    for each in owners:
        owner = getattr(owner, each)
    function: FunctionType = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in bug.changes:
        if source.count(old) != 1:
            raise ValueError(f"{bug.where} has {source.count(old)} times {old!r}, not once: plant {bug.name!r} anew")
        source = source.replace(old, new)
    made: dict[str, FunctionType] = {}
    exec(compile(f"from __future__ import annotations\n{source}", bug.where, "exec"), vars(module), made)
    before, function.__code__ = function.__code__, made[name].__code__
    try:
        yield
    finally:
        function.__code__ = before


def first_found(bug: Bug, limit: int, first: int = 0) -> tuple[int, str] | None:
    """The first of `limit` seeds that finds it, of a scenario or a crowded cluster, and what that says; None: none."""
    with planted(bug):
        for seed in range(first, first + limit):
            try:
                Scenario.of(seed).run()
                crowded(seed, load=Load(cancels=0.3), has_events=True).run()
            except Exception as error:
                return seed, f"{type(error).__name__}: {error}"
    return None


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="beginnings of the bugs' names; all, if there is none")
    parser.add_argument("--limit", type=int, default=200, help="seeds that each may take")
    flags = parser.parse_args(arguments)
    logging.basicConfig(handlers=[logging.NullHandler()])
    chosen = [bug for bug in BUGS if not flags.names or bug.name.startswith(tuple(flags.names))]
    num_missed = 0
    for bug in chosen:
        begun, found = time.perf_counter(), first_found(bug, flags.limit)
        num_missed += found is None
        what = f"not found in {flags.limit} seeds" if found is None else f"seed {found[0]}: {found[1][:150]}"
        print(f"{bug.name}\n    {what} ({time.perf_counter() - begun:.1f} s)", flush=True)
    print(f"{len(chosen) - num_missed} of {len(chosen)} planted bugs were found")
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
