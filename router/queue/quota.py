"""What an API key may use: token buckets for requests, prompt tokens and output tokens, and a count of live requests.

A bucket holds a minute's worth, so that a key which was idle may use that at once. Output tokens are charged as they
come: a key that is below zero gets no new request until its bucket has recovered, and what runs is let run.
Pure: the time is an argument. `Quotas` is what a store shared by several routers would have to offer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from router.api.call import Principal, Quota

UNLIMITED = Quota()
BUSY_S = 1.0
"""When a key with too many live requests should try again: nobody knows when one ends."""


@dataclass(frozen=True)
class Exceeded:
    """Which limit stands in the way, and for how long."""

    limit: str
    """Name of the field of Quota."""
    description: str
    wait_s: float | None
    """None: for ever, as the request alone is more than a minute's worth."""


class Quotas(Protocol):
    """By `caller.key_id`; a caller without limits is never noted."""

    def exceeded(self, caller: Principal, num_prompt_tokens: int, now: float) -> Exceeded | None:
        """What a request with so many prompt tokens would exceed; changes nothing."""
        ...

    def begin(self, caller: Principal, num_prompt_tokens: int, now: float) -> None:
        """It is taken: charges it."""
        ...

    def go_on(self, caller: Principal) -> None:
        """One that was charged elsewhere is live here from now on."""
        ...

    def output_came(self, caller: Principal, num_tokens: int, now: float) -> None:
        """Of any of the key's requests."""
        ...

    def end(self, caller: Principal) -> None:
        """One of the requests that were begun, or went on, is over."""
        ...


class TokenBucket:
    """Of one limit; full at first."""

    def __init__(self, per_min: int, now: float) -> None:
        self._per_min = per_min
        self._level = float(per_min)
        self._at = now

    def resize(self, per_min: int, now: float) -> None:
        """The limit has changed: what was used stays used."""
        self._advance(now)
        self._level += per_min - self._per_min
        self._per_min = per_min

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until it holds `amount`, of at most a minute's worth."""
        self._advance(now)
        return max(0.0, amount - self._level) * 60 / self._per_min

    def take(self, amount: float, now: float) -> None:
        """It may fall below zero."""
        self._advance(now)
        self._level -= amount

    def _advance(self, now: float) -> None:
        self._level = min(float(self._per_min), self._level + max(0.0, now - self._at) * self._per_min / 60)
        self._at = max(now, self._at)


@dataclass
class _Key:
    buckets: dict[str, tuple[int, TokenBucket]] = field(default_factory=dict)
    num_live: int = 0

    def bucket(self, limit: str, per_min: int, now: float) -> TokenBucket:
        size, bucket = self.buckets.get(limit) or (per_min, TokenBucket(per_min, now))
        if size != per_min:
            bucket.resize(per_min, now)
        self.buckets[limit] = per_min, bucket
        return bucket


class LocalQuotas:
    """In the memory of one router. A limit of 0 or less allows nothing."""

    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}

    def exceeded(self, caller: Principal, num_prompt_tokens: int, now: float) -> Exceeded | None:
        quota = caller.quota
        if quota == UNLIMITED:
            return None
        key = self._keys.setdefault(caller.key_id, _Key())
        most = quota.max_concurrent
        if most is not None and key.num_live >= most:
            what = f"{key.num_live} requests of this API key are live, and {most} may be"
            return Exceeded("max_concurrent", what, BUSY_S)
        wanted = (
            ("requests_per_min", quota.requests_per_min, 1, "requests"),
            ("prompt_tokens_per_min", quota.prompt_tokens_per_min, num_prompt_tokens, "prompt tokens"),
            ("output_tokens_per_min", quota.output_tokens_per_min, 1, "output tokens"),
        )
        for limit, per_min, amount, unit in wanted:
            if per_min is None:
                continue
            if amount > per_min:
                what = f"the request has {amount} {unit}, and this API key may use {per_min} in a minute"
                return Exceeded(limit, what, None)
            wait_s = key.bucket(limit, per_min, now).wait_s(amount, now)
            if wait_s > 0:
                return Exceeded(limit, f"this API key has used the {per_min} {unit} that it has in a minute", wait_s)
        return None

    def begin(self, caller: Principal, num_prompt_tokens: int, now: float) -> None:
        quota = caller.quota
        if quota == UNLIMITED:
            return
        key = self._keys.setdefault(caller.key_id, _Key())
        key.num_live += 1
        if quota.requests_per_min is not None:
            key.bucket("requests_per_min", quota.requests_per_min, now).take(1, now)
        if quota.prompt_tokens_per_min is not None:
            key.bucket("prompt_tokens_per_min", quota.prompt_tokens_per_min, now).take(num_prompt_tokens, now)

    def go_on(self, caller: Principal) -> None:
        if caller.quota != UNLIMITED:
            self._keys.setdefault(caller.key_id, _Key()).num_live += 1

    def output_came(self, caller: Principal, num_tokens: int, now: float) -> None:
        per_min = caller.quota.output_tokens_per_min
        if per_min is not None and per_min > 0:
            key = self._keys.setdefault(caller.key_id, _Key())
            key.bucket("output_tokens_per_min", per_min, now).take(num_tokens, now)

    def end(self, caller: Principal) -> None:
        key = self._keys.get(caller.key_id)
        if key is not None and caller.quota != UNLIMITED:
            key.num_live -= 1
