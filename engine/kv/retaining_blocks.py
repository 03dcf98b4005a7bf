"""A block manager that keeps the KV of sessions for a time: its pool, and each tier below, gives theirs up last.

Time is told by `tick`. Knows nothing of requests. Used from one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from cluster.kv_groups import KvGroup
from engine.kv.block_manager import BlockManager
from engine.kv.kv_tier import KvTier, KvTierName, TierKey
from engine.kv.retention import EvictionOrder, Retention, Session, SessionName

EXPIRE_EVERY_S = 1.0
NAMELESS = "prefix-"
"""What the ids of sessions begin with that are named by the digest of their last block."""


class RetainingBlocks(BlockManager):
    """A block manager of whose pool, and tiers, sessions have at most `session_share`; with 0 they have none.

    Until the first session comes, everything is as in a block manager.
    """

    session_share = 0.0

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_cache: bool = True,
        groups: Sequence[KvGroup] = (KvGroup((0,)),),
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_cache, groups)
        self.retentions: dict[KvTierName, Retention[TierKey]] = {}
        """Of each tier that has any; empty until the first session comes."""
        self.tiers: Mapping[KvTierName, KvTier] = {}
        """Below the pool, from the top; those without slots included."""
        self._now = self._expire_at = 0.0

    def retain(self, session: Session, blocks: Sequence[int]) -> None:
        if not self.session_share:
            return
        if not self.retentions:
            self._begin_retention()
        keys = [self._key_of(block) for block in blocks if block in self._digests]
        if not keys:
            return
        name = session.name if session.name.session_id else self._name_by(session.name.tenant, keys)
        for retention in self.retentions.values():
            retention.retain(name, keys, self._now + session.ttl_s)

    def _name_by(self, tenant: str, keys: Sequence[TierKey]) -> SessionName:
        """The session of what lies in these blocks. Those of their beginnings end."""
        *before, last = (SessionName(tenant, f"{NAMELESS}{digest.hex()}") for _, digest in keys)
        for name in before:
            if name != last:
                self.end(name)
        return last

    def _begin_retention(self) -> None:
        retention: Retention[TierKey] = Retention(int(self.num_total * self.session_share))
        cached = EvictionOrder(lambda block: self._key_of(block) in retention, self._cached)

        def sort_in(keys: Iterable[TierKey]) -> None:
            cached.sort_in(self._published[place].get(digest, -1) for place, digest in keys)

        retention.on_change, self._cached = sort_in, cached
        self.retentions["device"] = retention
        for name, tier in self.tiers.items():
            if tier.num_total:
                self.retentions[name] = tier.retain_for_sessions(self.session_share)

    def tick(self, now: float, *, at_once: bool = False) -> None:
        """Tells the time; sessions end with it, at the latest a second after theirs is over."""
        self._now = now
        if now >= self._expire_at or at_once:
            self._expire_at = now + EXPIRE_EVERY_S
            for retention in self.retentions.values():
                retention.expire(now)

    def sessions(self) -> Iterator[tuple[SessionName, Sequence[TierKey], float]]:
        """Yields each session with the most blocks of it that a tier retains, and when its time is over; those of a
        tenant in the order of their last turns."""
        largest = max(self.retentions.values(), key=lambda retention: retention.limit, default=None)
        return iter(()) if largest is None else largest.sessions()

    def end(self, name: SessionName) -> None:
        for retention in self.retentions.values():
            retention.end(name)

    def flush_cache(self) -> int:
        for retention in self.retentions.values():
            retention.clear()
        return super().flush_cache()

    def num_kept(self, tier: KvTierName, keys: Iterable[TierKey]) -> int:
        """How many of these a tier has now."""
        if tier == "device":
            return sum(digest in self._published[place] for place, digest in keys)
        return sum(key in self.tiers[tier] for key in keys)

    def _key_of(self, block: int) -> TierKey:
        return self._group_of[block], self._digests[block]

    def _find_wrong(self) -> list[str]:
        wrong = super()._find_wrong()
        return wrong + [each for retention in self.retentions.values() for each in retention.check()]
