"""Attention as transformers' modelling code calls it: one registered function, and what it is handed.

A model that is built with `NAME` as its attention calls it once in each layer. Who answers depends on what runs in the
thread: a trial (`engine.models.transformers_trial`), which notes what it is given, or a step
(`engine.models.transformers_model`), which writes keys and values to pages. Importing this registers the function.

Legend: T tokens, Hq/H query/KV heads, D head_dim.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "baton"
"""The attention of a model that runs steps. transformers makes no masks for it."""
TRIAL_NAME = "baton_trial"
"""The attention of a model that is tried, whose masks come from `AttentionRun.make_mask`."""
_NO_EFFECT = frozenset(
    {
        *("dropout", "is_causal", "position_ids", "cache_position", "position_embeddings", "use_cache"),
        *("output_router_logits", "output_attentions", "output_hidden_states", "sliding_window"),
    }
)
"""Options that change nothing here: attention is causal, queries and keys are turned, and the mask says the window."""
_threads = threading.local()


@dataclass(frozen=True)
class LayerCall:
    """The arguments with which a layer calls for attention."""

    query: torch.Tensor  # [1, Hq, T, D]
    key: torch.Tensor  # [1, H, T, D]
    value: torch.Tensor  # [1, H, T, D]
    mask: torch.Tensor | None
    scale: float
    options: dict[str, Any]
    """Options that may change the result, by transformers' names."""


class AttentionRun(Protocol):
    """One forward pass, as attention sees it."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Returns [1, T, Hq, D]."""
        ...

    def make_mask(self, visible: Callable[..., torch.Tensor], window: int | None, device: torch.device) -> torch.Tensor:
        """Returns what stands for a mask that shows `visible(batch, head, query, key)`, said to be a window."""
        ...


@contextmanager
def attending(run: AttentionRun) -> Iterator[None]:
    """Sends this thread's calls for attention to `run`."""
    _threads.run = run
    try:
        yield
    finally:
        _threads.run = None


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    effective = {name: given for name, given in options.items() if name not in _NO_EFFECT and given is not None}
    return _threads.run.attend(LayerCall(query, key, value, attention_mask, scale, effective)), None


def _make_mask(
    *, mask_function: Callable[..., torch.Tensor], local_size: int | None = None, device: Any = "cpu", **options: Any
) -> torch.Tensor:
    mask: torch.Tensor = _threads.run.make_mask(mask_function, local_size, device)
    return mask


AttentionInterface.register(NAME, _attend)
AttentionInterface.register(TRIAL_NAME, _attend)
AttentionMaskInterface.register(TRIAL_NAME, _make_mask)
