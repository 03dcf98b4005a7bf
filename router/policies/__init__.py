"""Which workers run a request: one file a policy, chosen by `router.policy` in cluster.yaml.

A policy is pure: who is ready and what is handed out in, a placement out. It knows no connection and no clock.
"""

from __future__ import annotations

from router.ledger import Ledger
from router.output_lengths import OutputLengths
from router.policies.at_random import AtRandom
from router.policies.least_loaded import LeastLoaded
from router.policies.predicted import Predicted
from router.policies.round_robin import RoundRobin
from router.policies.seam import Candidate, Objectives, Policy, Request

__all__ = ["Candidate", "Objectives", "Policy", "Request", "make_policy"]


def make_policy(name: str, ledger: Ledger, lengths: OutputLengths, objectives: Objectives) -> Policy:
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
