"""Quotas of API keys: token buckets for requests, prompt tokens and output tokens, and a count of live requests.

A bucket holds a minute's worth, so a key that was idle may use that at once. Output tokens are charged as they come: a
key below zero gets no new request until its bucket has recovered, and its running requests go on.
Pure: the time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.api_keys import KeyQuota
from cluster.errors import BatonError, FieldViolation, OutOfRange, QuotaExceeded
from router.api.call import Principal

UNLIMITED = KeyQuota()
BUSY_S = 1.0
"""Retry delay for a key with too many live requests: nobody knows when one ends."""


@dataclass(frozen=True)
class Exceeded:
    """The limit that a request would exceed, and for how long."""

    limit: str
    """Name of the field of KeyQuota."""
    description: str
    wait_s: float | None
    """None: for ever, as the request alone is more than a minute's worth."""

    def error_for(self, principal: Principal) -> BatonError:
        """The client's error; it names the principal by the id of its key."""
        violation = FieldViolation(f"key:{principal.key_id}/{self.limit}", self.description)
        if self.wait_s is None:
            message = f"{self.description}; split it, or ask for a larger quota"
            return OutOfRange(message, violations=(violation,))
        message = f"{self.description}; try again in {self.wait_s:.1f} s"
        return QuotaExceeded(message, violations=(violation,), retry_after_s=self.wait_s)


class TokenBucket:
    """One limit; full at first."""

    def __init__(self, per_min: int, now: float) -> None:
        self._per_min = per_min
        self._level = float(per_min)
        self._at = now

    def resize(self, per_min: int, now: float) -> None:
        """Changes the limit; used tokens stay used."""
        self._advance(now)
        self._level += per_min - self._per_min
        self._per_min = per_min

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until the bucket holds `amount`, which is at most a minute's worth."""
        self._advance(now)
        return max(0.0, amount - self._level) * 60 / self._per_min

    def take(self, amount: float, now: float) -> None:
        """The level may fall below zero."""
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


class Quotas:
    """Use of quotas by API key, in the memory of one router; a limit of 0 or less allows nothing.

    Principals without limits are not counted.
    """

    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}

    def exceeded(self, principal: Principal, num_prompt_tokens: int, now: float) -> Exceeded | None:
        """The limit that a request with so many prompt tokens would exceed; charges nothing."""
        quota = principal.quota
        if quota == UNLIMITED:
            return None
        key = self._keys.setdefault(principal.key_id, _Key())
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

    def begin(self, principal: Principal, num_prompt_tokens: int, now: float) -> None:
        """Charges an accepted request."""
        quota = principal.quota
        if quota == UNLIMITED:
            return
        key = self._keys.setdefault(principal.key_id, _Key())
        key.num_live += 1
        if quota.requests_per_min is not None:
            key.bucket("requests_per_min", quota.requests_per_min, now).take(1, now)
        if quota.prompt_tokens_per_min is not None:
            key.bucket("prompt_tokens_per_min", quota.prompt_tokens_per_min, now).take(num_prompt_tokens, now)

    def adopt(self, principal: Principal) -> None:
        """Counts a request that another router charged as live here."""
        if principal.quota != UNLIMITED:
            self._keys.setdefault(principal.key_id, _Key()).num_live += 1

    def add_output(self, principal: Principal, num_tokens: int, now: float) -> None:
        per_min = principal.quota.output_tokens_per_min
        if per_min is not None and per_min > 0:
            key = self._keys.setdefault(principal.key_id, _Key())
            key.bucket("output_tokens_per_min", per_min, now).take(num_tokens, now)

    def end(self, principal: Principal) -> None:
        """One of the key's live requests is over."""
        key = self._keys.get(principal.key_id)
        if key is not None and principal.quota != UNLIMITED:
            key.num_live -= 1
