"""A controller that outlives the command that started it: by which name Ray knows it, and how it ends.

There is at most one in a Ray cluster. What it has started is its own: workers and routers end with it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import ray
from ray.exceptions import RayError

NAME = "controller"
NAMESPACE = "baton"
"""Ray's namespace; `ray list actors` shows both."""


def find_controller() -> Any | None:
    """Its handle; None: none was started with --detach, or it has ended."""
    try:
        return ray.get_actor(NAME, namespace=NAMESPACE)
    except ValueError:
        return None


def end_controller(controller: Any, timeout_s: float) -> None:
    """Asks the controller to end everything; one that cannot is ended with what it started."""
    with contextlib.suppress(RayError):
        ray.get(controller.shutdown.remote(), timeout=timeout_s)
    ray.kill(controller)
