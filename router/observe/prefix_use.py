"""What prompts have in common, and how much of them was cached: for `baton cache`.

A prompt counts if it got its first token. Its beginnings are named by the hashes at the ends of groups of blocks
(`cluster.prefix_hash`), which tell nobody what was asked. Bounded: MOST_PREFIXES beginnings and MOST_TENANTS tenants,
the least recently used go first; of each prompt MOST_GROUPS groups. Where the
routing asks for no hashes, as with a policy that ignores caches, there are no beginnings. Called on the event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.pb import admin_pb2
from cluster.prefix_hash import GROUP, PrefixHashes
from router.routing.prefix_index import Holders
from router.stream.request import LiveRequest

MOST_PREFIXES = 4096
MOST_TENANTS = 1000
MOST_GROUPS = 64


@dataclass(slots=True)
class _Beginning:
    """The first blocks of some prompts."""

    parent: bytes
    """The hash of the beginning that is a group shorter; empty: there is none."""
    tenant: str
    num_tokens: int
    num_requests: int = 0


class PrefixUse:
    """Sums since the router's start, and beginnings of prompts."""

    def __init__(self) -> None:
        self._beginnings: OrderedDict[bytes, _Beginning] = OrderedDict()
        self._tenants: OrderedDict[str, admin_pb2.TenantCache] = OrderedDict()

    def count(self, live: LiveRequest) -> None:
        """Counts a request that has ended; one that got no token, or bypassed the caches, does not count."""
        to_place = live.to_place
        if live.first_token_at is None or not to_place.uses_cache:
            return
        tenant = live.principal.tenant
        sums = self._tenants.setdefault(tenant, admin_pb2.TenantCache(tenant=tenant))
        sums.num_requests += 1
        sums.num_prompt_tokens += len(live.request.prompt_token_ids)
        sums.num_cached_tokens += live.num_cached_tokens
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MOST_TENANTS:
            self._tenants.popitem(last=False)
        for block_size in to_place.prompt.block_sizes:
            self._count_beginnings(to_place.prompt.of(block_size), block_size, tenant)

    def _count_beginnings(self, hashes: PrefixHashes, block_size: int, tenant: str) -> None:
        parent = b""
        for group in range(min(hashes.num_blocks // GROUP, MOST_GROUPS)):
            name = hashes.end_of_group(group)
            beginning = self._beginnings.get(name)
            if beginning is None:
                num_tokens = (group + 1) * GROUP * block_size
                beginning = self._beginnings[name] = _Beginning(parent, tenant, num_tokens)
            beginning.num_requests += 1
            self._beginnings.move_to_end(name)
            parent = name
        while len(self._beginnings) > MOST_PREFIXES:
            self._beginnings.popitem(last=False)

    def response(self, request: admin_pb2.GetCacheRequest, holders: Holders) -> admin_pb2.GetCacheResponse:
        """`holders`: who has which blocks."""
        tenants = list(self._tenants.values())
        tenants.sort(key=lambda sums: sums.num_prompt_tokens, reverse=True)
        most = sorted(self._shared(), key=lambda one: -one[1].num_tokens * one[1].num_requests)
        return admin_pb2.GetCacheResponse(
            tenants=tenants,
            prefixes=[
                admin_pb2.SharedPrefix(
                    hash=name,
                    tenant=beginning.tenant,
                    num_tokens=beginning.num_tokens,
                    num_requests=beginning.num_requests,
                    worker_ids=sorted(holders.worker_ids(holders.mask_of(name))),
                )
                for name, beginning in most[: request.num_prefixes]
            ],
        )

    def _shared(self) -> Iterator[tuple[bytes, _Beginning]]:
        """Beginnings of several prompts, each as long as all of those prompts have it in common."""
        inside = {(one.parent, one.num_requests) for one in self._beginnings.values()}
        for name, one in self._beginnings.items():
            if one.num_requests > 1 and (name, one.num_requests) not in inside:
                yield name, one
