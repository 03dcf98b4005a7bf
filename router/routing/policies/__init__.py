"""Which workers run a request: one file a policy, chosen by `router.policy` in cluster.yaml.

A policy is pure: who is ready and what is handed out in, a placement out. It knows no connection and no clock.
"""

from __future__ import annotations

from router.queue.output_lengths import OutputLengths
from router.routing.load_tracker import LoadTracker
from router.routing.policies.at_random import AtRandom
from router.routing.policies.interface import Candidate, Objectives, Policy, RoutingRequest
from router.routing.policies.least_loaded import LeastLoaded
from router.routing.policies.predicted import Predicted
from router.routing.policies.round_robin import RoundRobin

__all__ = ["Candidate", "Objectives", "Policy", "RoutingRequest", "make_policy"]


def make_policy(name: str, ledger: LoadTracker, lengths: OutputLengths, objectives: Objectives) -> Policy:
    """`name` is one of `cluster.config.schema.PolicyName`."""
    match name:
        case "predicted":
            return Predicted(ledger, lengths, objectives)
        case "least_loaded":
            return LeastLoaded(ledger)
        case "round_robin":
            return RoundRobin()
        case "random":
            return AtRandom()
    raise ValueError(f"there is no policy {name!r}")
