"""On whose behalf a request runs, and what is promised to them. Pure values; who says so is for the front end."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.api_keys import ApiKey


@dataclass(frozen=True)
class Quota:
    """Limits of one API key; None: no limit."""

    requests_per_min: int | None = None
    prompt_tokens_per_min: int | None = None
    output_tokens_per_min: int | None = None
    max_concurrent: int | None = None
    """Requests that are queued or running at one time."""


@dataclass(frozen=True)
class Principal:
    """Who sent a request."""

    key_id: str
    """Of the API key; quotas are counted by it. Never the key itself."""
    tenant: str
    """Whose work it is: what fairness is between, and what salts the prefix cache."""
    scopes: frozenset[str] = frozenset()
    weight: float = 1.0
    """Share of the cluster that the tenant gets beside others of weight 1 while there is not enough for all."""
    quota: Quota = field(default_factory=Quota)


ANYONE = Principal(key_id="", tenant="", scopes=frozenset({"generate", "admin"}))
"""Where no keys are configured, everybody is this one."""


def caller_of(key: ApiKey | None) -> Principal:
    """Whom an API key speaks for; None: keys are not needed."""
    if key is None:
        return ANYONE
    return Principal(key.id, key.tenant, frozenset(key.scopes), key.weight, Quota(**vars(key.quota)))
