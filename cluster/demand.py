"""What clients ask of a cluster lately, in sums that several routers' can be added up: arrivals, prompts, outputs.

Pure. Who counts is for the router; what follows from it, for `controller.rebalance_policy`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from cluster.pb import admin_pb2


@dataclass(frozen=True)
class Demand:
    """Sums over the last seconds."""

    num_arrived: float = 0
    """Requests, those that were refused among them."""
    num_placed: float = 0
    """Requests that were given to workers, whose prompts the following are of."""
    num_prompt_tokens: float = 0
    """To compute: what prefix caches hold is not among them."""
    num_attended: float = 0
    """Keys that those see, summed up."""
    num_cached_tokens: float = 0
    num_sequences: float = 0
    """That those requests asked for."""
    num_output_tokens: float = 0
    """That those should get, by how long others got lately."""
    num_kv_tokens: float = 0
    """That each of those should hold in the middle of its output, its prompt among them."""
    num_ended: float = 0
    """Requests that ended otherwise than by their client's will, those that were refused among them."""
    num_kept: float = 0
    """Of these, those that kept both objectives."""

    def __add__(self, other: Demand) -> Demand:
        pairs = zip(
            vars(self).values(), vars(other).values(), strict=True
        )  # `astuple` copies deeply, at 20 us a request
        return Demand(*(mine + theirs for mine, theirs in pairs))

    def scaled(self, factor: float) -> Demand:
        """As if it had been seen for so many times as long."""
        return Demand(*(factor * value for value in vars(self).values()))

    @classmethod
    def from_proto(cls, message: admin_pb2.Demand) -> Self:
        return cls(**{field.name: getattr(message, field.name) for field in fields(cls)})

    def to_proto(self) -> admin_pb2.Demand:
        return admin_pb2.Demand(**{field.name: getattr(self, field.name) for field in fields(self)})
