"""The routing policies: one file a policy, by its name in `router.policy` of cluster.yaml.

A policy is pure: ready workers and what the router has handed out go in, a placement comes out. It knows no connection
and no clock. To add one, write its file, and add its name to `cluster.config.choices.PolicyName`, from which the
choices in cluster.yaml and their documentation follow.
"""

from __future__ import annotations

import importlib

from cluster.config.choices import PolicyName
from router.routing.policies.interface import Policy


def policy_class(name: PolicyName) -> type[Policy]:
    """Returns the one `Policy` that the file of this name defines."""
    module = importlib.import_module(f"router.routing.policies.{name}")
    found: list[type[Policy]] = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Policy) and value.__module__ == module.__name__
    ]
    assert len(found) == 1, f"{module.__name__} defines {len(found)} policies; one file has one"
    return found[0]
