"""Decides whether the beginning of a prompt is brought to the worker that is to compute it, and by which worker.

    fetch it     the rest is computed when it has come: the wait for the worker's other prompts passes meanwhile
    compute it   where that is as quick, nobody has more of it, or fetches between the two failed lately

To send the prompt to a holder instead is the choice of a policy, which weighs each worker with what it would fetch.
While nothing is known of what fetches take (`router.routing.fetch_times`), one is tried, and given up when it has taken
what computing would. Pure: knows no connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cluster.step_cost import StepCost
from router.routing.candidate_pool import deepest, find
from router.routing.fetch_times import FetchTimes
from router.routing.load_tracker import Fetch, Placement
from router.routing.policies.interface import Candidates, RoutingContext, RoutingRequest
from router.routing.prefix_index import Candidate, PromptHashes

LEAST_GAIN = 0.2
"""Share of the seconds that a fetch spares a worker by which it must be the quicker way."""
LATE = 3.0
"""A fetch that takes so many times what is predicted is given up."""
LEAST_LIMIT_S = 0.02
"""No fetch is given up sooner, but one of which nothing is known."""
LONGEST_S = 10.0
"""Every fetch is given up after that."""


class Holding(NamedTuple):
    """A worker that holds the beginning of a prompt."""

    holder: Candidate
    num_tokens: int


class Work(NamedTuple):
    """A prompt on one worker, as far as that is known."""

    num_tokens: int
    cost: StepCost | None
    """Of the worker's steps; None: not known yet, and nothing is fetched unless `always`."""
    wait_s: float = 0.0
    """Seconds until the worker's other prompts are computed."""
    time_share: float = 1.0
    """Share of the worker's time that prompts get."""

    def seconds(self, num_cached: int) -> float:
        """Seconds from its begin to its first token."""
        assert self.cost is not None
        return self.cost.of_prompt(self.num_tokens - num_cached, num_cached) / self.time_share


def best_fetch(
    prompt: PromptHashes,
    work: Work,
    target: Candidate,
    holders: Iterable[Holding],
    times: FetchTimes,
    now: float,
    *,
    always: bool = False,
) -> Fetch | None:
    """Returns the fetch with which the first token comes soonest; None: it comes as soon without. `always`: whenever a
    holder has a block more than the target, whatever that takes."""
    index, best, best_s = target.prefix_index, None, 0.0
    if index is None or not target.prefix_format or (work.cost is None and not always):
        return None
    num_present = min(target.num_cached_tokens(prompt), work.num_tokens - 1)
    for holder, num_held in holders:
        if holder is target or _format_of(holder) != _format_of(target):
            continue
        num_tokens = min(num_held, work.num_tokens - 1)
        num_useful = num_tokens // index.block_size * index.block_size
        if num_useful - num_present < index.block_size or not times.may_try(holder.worker_id, target.worker_id, now):
            continue
        known_s = times.predicted(holder.worker_id, target.worker_id, num_tokens - num_present, now)
        seconds = known_s or 0.0
        spared_s = 0.0 if work.cost is None else work.seconds(num_present) - work.seconds(num_useful)
        gain_s = spared_s - max(0.0, seconds - work.wait_s)
        if not always and (gain_s <= LEAST_GAIN * spared_s or gain_s <= best_s):
            continue
        limit_s = LONGEST_S
        if not always:
            limit_s = min(LONGEST_S, spared_s if known_s is None else max(LEAST_LIMIT_S, LATE * seconds))
        if best is None or gain_s > best_s or (always and num_useful > best.num_useful):
            best, best_s = Fetch(holder.worker_id, num_tokens, num_useful, seconds, limit_s), gain_s
    return best


def _format_of(candidate: Candidate) -> tuple[str, str]:
    return candidate.prefix_format, candidate.weights_revision


def holders_of(context: RoutingContext, request: RoutingRequest, *others: Candidates) -> list[Holding]:
    """Returns workers from which the beginning of a prompt might be fetched."""
    if context.limits.prefix_fetch == "off" or not request.uses_cache:
        return []
    prompt = request.prompt
    found = (w for workers in others for w in deepest(workers, prompt) if w.prefix_format)
    return [Holding(holder, num) for holder in found if (num := holder.num_cached_tokens(prompt))]


def fetch_for(
    context: RoutingContext, request: RoutingRequest, work: Work, target: Candidate, holders: Sequence[Holding]
) -> Fetch | None:
    """Returns what the worker that is to compute a prompt should have from one of the holders first."""
    if not holders:
        return None
    always, now = context.limits.prefix_fetch == "always", context.clock()
    return best_fetch(request.prompt, work, target, holders, context.fetch_times, now, always=always)


def with_fetch(
    context: RoutingContext, placement: Placement, request: RoutingRequest, prefill: Candidates, decode: Candidates
) -> Placement:
    """Adds to what a policy chose, whatever each worker holds, what the computing worker should have first."""
    holders, worker_id = holders_of(context, request, prefill, decode), placement.computing_id
    target = find(prefill, worker_id) or find(decode, worker_id)
    if target is None or not holders:
        return placement
    cost, load = target.step_cost, context.loads[target.worker_id]
    wait_s = cost.of(load.prompts) if cost is not None and load.num_prompts else 0.0
    work = Work(request.work.num_prompt_tokens, cost, wait_s)
    return placement._replace(fetch=fetch_for(context, request, work, target, holders))
