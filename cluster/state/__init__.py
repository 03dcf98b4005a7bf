"""The store of what must outlive a router: short logs with one writer each, in memory or in Redis.

Owns the interface, its two implementations and the guard that makes a store's absence cheap. Knows nothing of requests:
what is in a log is its writer's own.
"""

from cluster.state.guard import Guard
from cluster.state.store import Claim, Log, MemoryStore, Outcome, Store, StoreAway, Write

__all__ = ["Claim", "Guard", "Log", "MemoryStore", "Outcome", "Store", "StoreAway", "Write", "open_store"]


def open_store(url: str | None) -> Store:
    """`redis://` or `rediss://`; None: in memory. Connects at the first call."""
    if url is None:
        return MemoryStore()
    from cluster.state.redis_store import RedisStore

    return RedisStore(url)
