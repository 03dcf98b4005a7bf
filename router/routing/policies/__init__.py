"""The registry of routing policies: one file a policy, chosen by `router.policy` in cluster.yaml.

A policy is pure: ready workers and what the router has handed out go in, a placement comes out. It knows no connection
and no clock. To add one, write its file, and add its line here and its name to `cluster.config.schema.PolicyName`, from
which the choices in cluster.yaml and their documentation follow.
"""

from __future__ import annotations

from cluster.config.schema import PolicyName
from router.routing.policies.interface import Policy
from router.routing.policies.least_loaded import LeastLoaded
from router.routing.policies.predicted import Predicted
from router.routing.policies.random_choice import RandomChoice
from router.routing.policies.round_robin import RoundRobin

POLICIES: dict[PolicyName, type[Policy]] = {
    "predicted": Predicted,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
    "random": RandomChoice,
}
