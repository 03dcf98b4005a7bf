"""Captures work as a CUDA graph does, on any device: as operations over the tensors they were first run with.

A replay runs no Python of the work again. What the work took from the host when it was recorded, a number or an array,
stays as it was then; only tensors that it did not make itself can bring anything new.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


def record(work: Callable[[], None]) -> Callable[[], None]:
    """An `engine.cuda_graphs.Capture`."""
    work()
    with _Recording() as recording:
        work()

    def replay() -> None:
        made: dict[int, torch.Tensor] = {}  # by the identity of what the recording made

        def current(value: Any) -> Any:
            return made.get(id(value), value)

        for func, args, kwargs, out in recording.calls:
            new = func(*tree_map(current, args), **tree_map(current, kwargs))
            for was, now in zip(tree_leaves(out), tree_leaves(new), strict=True):
                if isinstance(was, torch.Tensor):
                    made[id(was)] = now

    return replay
