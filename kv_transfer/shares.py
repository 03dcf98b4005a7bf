"""The tokens that a route carries where a rank keeps a part of each block's tokens: those that both of its ranks keep.

Pure arithmetic. A rank's own tokens of a sequence are numbered one after another (`cluster.kv_groups.TokenShare`), as
they lie in its pages; ranges of a hand-off are of the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from cluster.kv_groups import TokenShare
from kv_transfer.actions import Range
from kv_transfer.layout import KvLayout, Route

Places = np.typing.NDArray[np.int64]


@dataclass(frozen=True)
class Carried:
    """The tokens of a range that a route carries, as one of its ranks numbers those that it keeps."""

    span: Range
    """The range from the first to the last of them."""
    places: Places | None = None
    """int64 [T], in order; None: all of the span."""

    @property
    def num_tokens(self) -> int:
        return self.span.num_tokens if self.places is None else len(self.places)

    @property
    def num_cells(self) -> int:
        return self.num_tokens * (self.span.layer_end - self.span.layer_start)

    def part(self, layers: slice, tokens: slice) -> Carried:
        """Some of its layers, and some of its tokens, counted from its first."""
        span = replace(self.span, layer_start=layers.start, layer_end=layers.stop)
        if self.places is not None:
            return _spanned(span, self.places[tokens])
        first = span.token_start
        return Carried(replace(span, token_start=first + tokens.start, token_end=first + tokens.stop))


@dataclass(frozen=True)
class RouteTokens:
    """The tokens of a route, at one of its ranks."""

    own: TokenShare
    other: TokenShare

    @classmethod
    def of(cls, route: Route, local: KvLayout, remote: KvLayout, *, is_sender: bool) -> Self | None:
        """Returns None where the ranks of both sides keep whole blocks."""
        if local.num_token_shares == remote.num_token_shares == 1:
            return None
        ranks = (route.src_rank, route.dst_rank) if is_sender else (route.dst_rank, route.src_rank)
        return cls(local.share_of(ranks[0]), remote.share_of(ranks[1]))

    def kept(self, what: Range) -> Range:
        """The range's tokens that this rank keeps, as it numbers them; there may be none."""
        first, last = self.own.num_before(what.token_start), self.own.num_before(what.token_end)
        return replace(what, token_start=first, token_end=last)

    def carried(self, what: Range) -> Carried:
        """Those of them that the other rank keeps, too."""
        if self.own == self.other or self.other.num_shares == 1:
            return Carried(self.kept(what))
        tokens = np.arange(what.token_start, what.token_end)
        tokens = tokens[_has(self.own, tokens) & _has(self.other, tokens)]
        own = self.own
        return _spanned(what, tokens // own.block_size * own.size + tokens % own.block_size % own.size)

    def most_cells(self, num_cells: int, num_layers: int) -> int:
        """Tokens times layers that the route carries at most of any range of so many, of up to `num_layers` layers; the
        same at both ranks."""
        bounds = (num_cells // share.num_shares + share.size * num_layers for share in (self.own, self.other))
        return min(num_cells, *bounds)


def _has(share: TokenShare, tokens: Places) -> np.typing.NDArray[np.bool_]:
    return np.equal(tokens % share.block_size // share.size, share.place)


def _spanned(what: Range, places: Places) -> Carried:
    """Of a range's layers, these tokens: where they lie one behind the other, they can be copied as a range."""
    first, last = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
    span = replace(what, token_start=first, token_end=last)
    return Carried(span, None if last - first == len(places) else places)
