"""The layout of a worker's KV cache over its ranks, and which rank sends which heads to which.

Pure arithmetic, no tensors: heads are numbered globally, ranks by their place in the worker's tensor-parallel group.
It does not know where the tokens lie (`pages`) or how bytes travel (`transport`).

With at least as many KV heads as ranks, each rank holds an equal contiguous run of heads. With more ranks than heads,
heads are replicated: rank r holds the one head `r * num_kv_heads // tp_size`. Or each rank holds an equal run of every
block's tokens, all heads of them: a latent has one head (docs/adr/0016-latents-on-one-rank-each.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from cluster.errors import BatonError
from cluster.kv_groups import STATE_WINDOW, KvGroup, StateShape, TokenShare, all_layers, group_layers
from cluster.pb import handoff_pb2

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
DTYPES = tuple(_BYTES)
WIRE_FORMATS = ("native", "int8", "fp8")
_LIMITS = {"num_layers": 10_000, "num_kv_heads": 65_536, "head_dim": 1 << 20, "tp_size": 1024, "block_size": 1 << 20}
"""No layout has more; a damaged message may claim billions, over which its reader would go one by one."""
_CODE_DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn"}


class LayoutMismatch(BatonError):
    """Two workers' layouts that cannot hand KV to one another, or one that cannot exist. Final: do not retry."""

    grpc_code = "FAILED_PRECONDITION"
    reason = "LAYOUT_MISMATCH"


@dataclass(frozen=True)
class KvLayout:
    """One worker's KV cache: the whole model's sizes, and how they are cut into ranks and blocks.

    Raises LayoutMismatch when the sizes contradict one another.
    """

    num_layers: int
    num_kv_heads: int
    """KV heads of the whole model, not of one rank."""
    head_dim: int
    """Values of one head; rounded ones, and the bytes of their scale."""
    dtype: str
    """`float32`, `bfloat16`, `float16`; or `int8`, `uint8` (of fp8): rounded already, bytes moved as they are."""
    tp_size: int
    block_size: int
    """Tokens of one block."""
    model: str
    """Identity of the weights; KV of another model is never accepted."""
    num_planes: int = 2
    """2: keys and values; 1: latents, of which both are made."""
    layer_windows: tuple[int | None, ...] = ()
    """Tokens that a token sees in each layer, itself included; None: all before it. Empty: None for each layer."""
    state_layers: tuple[int, ...] = ()
    """Layers that keep a recurrent state; their window is `STATE_WINDOW`."""
    state: StateShape | None = None
    """The shape of the states of those layers."""
    num_token_shares: int = 1
    """1: a rank keeps all tokens of a block; or as many as ranks, of which each keeps one of as many runs of them."""

    def __post_init__(self) -> None:
        for name, most in _LIMITS.items():
            if getattr(self, name) < 1:
                raise LayoutMismatch(f"KV layout: {name} must be at least 1 (got {getattr(self, name)})")
            if getattr(self, name) > most:
                raise LayoutMismatch(f"KV layout: {name} must be at most {most:,} (got {getattr(self, name)})")
        if self.num_planes not in (1, 2):
            raise LayoutMismatch(f"KV layout: num_planes must be 1 (latents) or 2 (got {self.num_planes})")
        if self.dtype not in DTYPES:
            raise LayoutMismatch(f"KV layout: dtype {self.dtype!r} is not served; use one of {', '.join(DTYPES)}")
        if len(self.layer_windows) not in (0, self.num_layers):
            raise LayoutMismatch(f"KV layout: {len(self.layer_windows)} windows are given for {self.num_layers} layers")
        self._check_states()
        self._check_shares()
        larger, smaller = max(self.num_kv_heads, self.tp_size), min(self.num_kv_heads, self.tp_size)
        if larger % smaller:
            fitting = [n for n in range(1, self.num_kv_heads + 1) if self.num_kv_heads % n == 0]
            raise LayoutMismatch(
                f"KV layout: tp_size {self.tp_size} does not divide {self.num_kv_heads} KV heads; "
                f"use one of {fitting} or a multiple of {self.num_kv_heads}"
            )

    def _check_states(self) -> None:
        if self.state is None and not self.state_layers:
            return
        if self.state is None or any(
            layer >= len(self.layer_windows) or self.layer_windows[layer] != STATE_WINDOW for layer in self.state_layers
        ):
            raise LayoutMismatch(f"KV layout: layers {self.state_layers} keep a state that has no shape or no window")
        if self.state.num_heads % self.tp_size:
            raise LayoutMismatch(
                f"KV layout: tp_size {self.tp_size} does not divide {self.state.num_heads} heads of recurrent states"
            )
        room = self.block_size * self.num_local_rows * self.head_dim * _BYTES[self.dtype]
        wanted = self.state.size_bytes(self.state.num_local_heads(self.tp_size))
        if room < wanted:
            raise LayoutMismatch(f"KV layout: a block has {room} bytes for a layer, and a recurrent state {wanted}")

    def _check_shares(self) -> None:
        count = self.num_token_shares
        if count == 1:
            return
        if count != self.tp_size or self.block_size % count or self.num_kv_heads != 1 or self.state is not None:
            raise LayoutMismatch(
                f"KV layout: blocks of {self.block_size} tokens cannot be divided into {count} shares for "
                f"{self.tp_size} ranks; use as many as ranks, which divide the block, for one KV head and no states"
            )

    @cached_property
    def groups(self) -> tuple[KvGroup, ...]:
        """The groups of layers that lie in blocks of their own."""
        return (
            group_layers(self.layer_windows, self.state_layers) if self.layer_windows else all_layers(self.num_layers)
        )

    @property
    def num_local_heads(self) -> int:
        return max(1, self.num_kv_heads // self.tp_size)

    @property
    def num_local_rows(self) -> int:
        """Rows of `head_dim` values that a rank keeps of one token in one layer."""
        return self.num_planes * self.num_local_heads

    @property
    def num_local_tokens(self) -> int:
        """Tokens of a block that a rank keeps."""
        return self.block_size // self.num_token_shares

    def share_of(self, tp_rank: int) -> TokenShare:
        """The tokens of a block that a rank keeps."""
        count = self.num_token_shares
        return TokenShare(self.block_size, count, tp_rank if count > 1 else 0)

    def head_range(self, tp_rank: int) -> range:
        """Global ids of the heads that a rank holds."""
        if not 0 <= tp_rank < self.tp_size:
            raise ValueError(f"tp_rank {tp_rank} is outside [0, {self.tp_size})")
        start = tp_rank * self.num_kv_heads // self.tp_size
        return range(start, start + self.num_local_heads)

    def first_holder(self, head: int) -> int:
        """The lowest rank that holds a head: the one that sends it."""
        return head * self.tp_size // self.num_kv_heads

    def to_proto(self) -> handoff_pb2.KvLayout:
        return handoff_pb2.KvLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            tp_size=self.tp_size,
            block_size=self.block_size if self.num_token_shares == 1 else 0,
            model=self.model,
            num_planes=self.num_planes,
            layer_windows=[window or 0 for window in self.layer_windows],
            state_layers=self.state_layers,
            share_size=0 if self.num_token_shares == 1 else self.num_local_tokens,
            num_state_heads=0 if self.state is None else self.state.num_heads,
            state_part_sizes=() if self.state is None else self.state.part_sizes,
        )

    @classmethod
    def from_proto(cls, message: handoff_pb2.KvLayout) -> KvLayout:
        """Raises LayoutMismatch for sizes that cannot be: the message came from another process."""
        return cls(
            num_layers=message.num_layers,
            num_kv_heads=message.num_kv_heads,
            head_dim=message.head_dim,
            dtype=message.dtype,
            tp_size=message.tp_size,
            block_size=message.share_size * message.tp_size or message.block_size,
            model=message.model,
            num_planes=message.num_planes or 2,
            layer_windows=tuple(window or None for window in message.layer_windows),
            state_layers=tuple(message.state_layers),
            num_token_shares=message.tp_size if message.share_size else 1,
            state=(
                StateShape(message.num_state_heads, tuple(message.state_part_sizes))
                if message.num_state_heads
                else None
            ),
        )

    def __str__(self) -> str:
        kept = f"{self.num_kv_heads} KV heads" if self.num_planes == 2 else "latents"
        kept += "" if self.num_token_shares == 1 else f" split over {self.num_token_shares} ranks"
        return (
            f"{self.model} [{self.num_layers} layers, {kept} of {self.head_dim}, {self.dtype}, "
            f"tp_size {self.tp_size}, block_size {self.block_size}]"
        )


@dataclass(frozen=True)
class Route:
    """Heads [head_start, head_end) and heads of states [state_start, state_end), numbered globally, that one sending
    rank carries to one receiving rank; of one kind there may be none. Where either keeps a part of each block's tokens,
    those that both keep."""

    src_rank: int
    dst_rank: int
    head_start: int
    head_end: int
    state_start: int = 0
    state_end: int = 0


def check_compatible(sender: KvLayout, receiver: KvLayout) -> None:
    """Raises LayoutMismatch, naming both, unless they differ in tp_size, block_size, num_token_shares and a dtype that
    can be bridged.

    float16 receives float16 only: the other two reach beyond its range, in every wire format. What is rounded goes to
    the same only.
    """
    if sender.dtype != receiver.dtype and not {sender.dtype, receiver.dtype} <= set(FLOAT_DTYPES):
        raise LayoutMismatch(
            f"KV cannot be handed over: the KV cache is of {sender.dtype} at the sender and of {receiver.dtype} at the "
            f"receiver; start both workers with the same kv_cache_dtype (sender: {sender}; receiver: {receiver})"
        )
    for name in (
        "model",
        "num_layers",
        "num_planes",
        "num_kv_heads",
        "head_dim",
        "layer_windows",
        "state_layers",
        "state",
    ):
        ours, theirs = getattr(sender, name), getattr(receiver, name)
        if ours != theirs:
            raise LayoutMismatch(
                f"KV cannot be handed over: {name} is {ours} at the sender and {theirs} at the receiver; "
                f"start both workers with the same model (sender: {sender}; receiver: {receiver})"
            )
    if receiver.dtype == "float16" and sender.dtype != "float16":
        raise LayoutMismatch(
            f"KV cannot be handed over: dtype is {sender.dtype} at the sender, beyond the range of the receiver's "
            f"float16; start both workers with the same dtype (sender: {sender}; receiver: {receiver})"
        )


def check_wire_format(sender: str, receiver: str) -> None:
    """Raises LayoutMismatch unless both sides have the same wire format, and one that exists."""
    _check_known("the sender's wire_format", sender)
    _check_known("the receiver's wire_format", receiver)
    if sender != receiver:
        raise LayoutMismatch(
            f"KV cannot be handed over: wire_format is {sender} at the sender and {receiver} at the receiver; "
            "start both workers with the same wire_format"
        )


def page_obstacle(sender: KvLayout, receiver: KvLayout, wire_format: str) -> str:
    """Returns why the receiver cannot copy whole tokens out of the sender's own pages, or nothing."""
    if wire_format != "native":
        return f"wire_format is {wire_format}"
    for name in ("dtype", "block_size", "tp_size", "num_token_shares"):
        ours, theirs = getattr(sender, name), getattr(receiver, name)
        if ours != theirs:
            return f"{name} is {ours} at the sender and {theirs} at the receiver"
    return "" if sender == receiver else "the models differ"


def wire_dtype(sender: KvLayout, wire_format: str) -> str:
    """The torch dtype, by name, of the values of a payload. Raises LayoutMismatch for a wire format that cannot be."""
    _check_known("wire_format", wire_format)
    if sender.dtype not in FLOAT_DTYPES and wire_format != "native":
        raise LayoutMismatch(f"KV of {sender.dtype} is not rounded to {wire_format} once more; use wire_format native")
    return _CODE_DTYPES.get(wire_format, sender.dtype)


def routes(sender: KvLayout, receiver: KvLayout) -> tuple[Route, ...]:
    """Every receiving rank gets each of its heads exactly once, from the lowest rank that holds it; with states and as
    many ranks on either side, from the rank of its own number, and each head of states from the one that holds it. Of
    a sender whose ranks share tokens, from each rank that keeps some of the receiving rank's.

    Ordered by (src_rank, dst_rank). All ranks of both sides make their pairs in this one order, so that no circle of
    ranks can wait for one another. Raises LayoutMismatch.
    """
    check_compatible(sender, receiver)
    state, is_equal = sender.state, sender.state is not None and sender.tp_size == receiver.tp_size
    found: list[Route] = []
    for dst_rank in range(receiver.tp_size):
        wanted = receiver.head_range(dst_rank)
        senders = {dst_rank} if is_equal else {sender.first_holder(head) for head in wanted}
        if sender.num_token_shares > 1:
            own = receiver.share_of(dst_rank)
            senders = {rank for rank in range(sender.tp_size) if own.meets(sender.share_of(rank))}
        wanted_states = state.head_range(dst_rank, receiver.tp_size) if state is not None else range(0)
        for src_rank in range(sender.tp_size):
            heads = _common(wanted, sender.head_range(src_rank)) if src_rank in senders else range(0)
            held = state.head_range(src_rank, sender.tp_size) if state is not None else range(0)
            states = _common(wanted_states, held)
            if heads or states:
                found.append(Route(src_rank, dst_rank, heads.start, heads.stop, states.start, states.stop))
    return tuple(sorted(found, key=lambda route: (route.src_rank, route.dst_rank)))


def _common(some: range, others: range) -> range:
    both = range(max(some.start, others.start), min(some.stop, others.stop))
    return both or range(0)


def _check_known(whose: str, wire_format: str) -> None:
    if wire_format not in WIRE_FORMATS:
        raise LayoutMismatch(f"{whose} {wire_format!r} is not known; use one of {', '.join(WIRE_FORMATS)}")
