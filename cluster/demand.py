"""The recent demand of clients, in sums that add up over routers: arrivals, prompts, outputs.

Pure. Routers count; `controller.rebalance_policy` decides by it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from cluster.pb import admin_pb2


@dataclass
class Demand:
    """Sums over the last seconds."""

    num_arrived: float = 0
    """Requests, those that were refused among them."""
    num_placed: float = 0
    """Requests that were given to workers; the following fields describe their prompts and outputs."""
    num_prompt_tokens: float = 0
    """Prompt tokens to compute, without those in prefix caches."""
    num_attended: float = 0
    """Keys that those tokens attend to, summed up."""
    num_cached_tokens: float = 0
    num_sequences: float = 0
    """Sequences that those requests asked for."""
    num_output_tokens: float = 0
    """Output tokens expected for them, by the lengths of recent outputs."""
    num_kv_tokens: float = 0
    """KV tokens that each sequence should hold in the middle of its output, its prompt included."""
    num_ended: float = 0
    """Requests that ended, refused ones included, without those that their client cancelled."""
    num_kept: float = 0
    """Requests among these that kept both objectives."""

    def __add__(self, other: Demand) -> Demand:
        pairs = zip(
            vars(self).values(), vars(other).values(), strict=True
        )  # `astuple` copies deeply, at 20 us a request
        return Demand(*(mine + theirs for mine, theirs in pairs))

    def scaled(self, factor: float) -> Demand:
        """The sums of a window that is `factor` times as long."""
        return Demand(*(factor * value for value in vars(self).values()))

    @classmethod
    def from_proto(cls, message: admin_pb2.Demand) -> Self:
        return cls(**{field.name: getattr(message, field.name) for field in fields(cls)})

    def to_proto(self) -> admin_pb2.Demand:
        return admin_pb2.Demand(**vars(self))
