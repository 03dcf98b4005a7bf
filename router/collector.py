"""Keeps Python's collector of cycles from pausing the router.

A full collection looks at every object that may be part of a cycle. Nearly all of a router's are there for good: its
modules, its configuration, its connections to workers. They are taken out of the collector's sight when the router
starts, and again when more workers have come; what requests leave behind is collected as ever. What the router knows of
prefix caches is made of bytes and numbers, at which the collector does not look (`router.routing.prefix_index`).
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

GROWTH = 1.25
"""Workers have to grow by this before their connections are taken out as well: each time, cycles of requests that run
then are never collected, so it is to happen a few times only."""
LOOK_S = 5.0


async def spare_long_lived(num_workers: Callable[[], int]) -> None:
    """Never returns. Call it before clients come: it begins with a full collection."""
    gc.collect()
    seen = 0
    while True:
        gc.freeze()
        seen = max(seen, num_workers())
        while num_workers() <= GROWTH * seen:
            await asyncio.sleep(LOOK_S)
