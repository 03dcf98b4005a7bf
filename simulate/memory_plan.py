"""How a device's memory is shared between weights, activations and KV under each layout of a model.

The arithmetic of `engine.memory` for devices that are not here, over a shape alone; what is reserved is a GPU's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.config.choices import QuantizationName
from cluster.errors import ConfigError
from simulate.devices import DeviceSpec
from simulate.shapes import DeviceLayout, ModelShape

_GPU_RESERVE_BYTES = 1 << 30
_GRAPH_LOGITS = 2
_SAMPLING_COPIES, _SCORING_COPIES = 10, 4
_SCORED_BYTES = 16 << 20
_LOGIT_BYTES = 4


@dataclass(frozen=True)
class MemoryQuestion:
    """One model on one kind of device."""

    shape: ModelShape
    device: DeviceSpec
    quantization: QuantizationName
    kv_dtype: str
    context: int
    """Tokens of a request, prompt and output."""
    memory_utilization: float = 0.9
    reserve_bytes: int | None = None
    """On each device beside weights and KV; None: activations and what an engine takes."""
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    block_size: int = 16
    split_latents: bool = False
    """Whether each device of those that attention is sliced over keeps an equal part of every block's tokens."""

    def num_shares(self, layout: DeviceLayout) -> int:
        """Parts of a block's tokens, of which a device keeps one."""
        return layout.tp_size if self.split_latents else 1

    def reserved_bytes(self, layout: DeviceLayout) -> int:
        if self.reserve_bytes is not None:
            return self.reserve_bytes
        return self.activation_bytes(layout) + self.engine_bytes(layout)

    def engine_bytes(self, layout: DeviceLayout) -> int:
        """Rotary positions; on a GPU also graphs, communicators, slots of hand-offs and slack."""
        shape = self.shape
        rope_dim = shape.latent.qk_rope_head_dim if shape.latent else shape.head_dim
        rope = 2 * shape.max_position_embeddings * rope_dim * shape.element_bytes
        if not self.device.is_gpu:
            return rope
        logits = _GRAPH_LOGITS * self.max_num_seqs * shape.vocab_size * _LOGIT_BYTES
        padding = self.block_size // self.num_shares(layout) * shape.kv_bytes_per_token(layout.tp_size, self.kv_dtype)
        return rope + logits + _GPU_RESERVE_BYTES + padding

    def activation_bytes(self, layout: DeviceLayout) -> int:
        """The widest moment of a layer of the largest step, plus sampling or scoring, as `engine.memory` estimates."""
        shape, tp_size = self.shape, layout.tp_size
        tokens = min(self.max_num_batched_tokens, self.max_num_seqs * shape.max_position_embeddings)
        rows = min(self.max_num_seqs, tokens)
        heads, kv, turned = _widths(shape, tp_size)
        attention = tokens * (2 * heads + 2 * kv + 2 * turned) + 2 * shape.max_position_embeddings * kv
        attention += _expanded_elements(shape, tp_size)
        if self.num_shares(layout) > 1:
            attention += 4 * rows * shape.num_attention_heads * turned + 2 * shape.max_position_embeddings * turned
        mlp = tokens * (_mlp_elements(shape, layout) + shape.hidden_size)
        layer = (3 * tokens * shape.hidden_size + max(attention, mlp)) * shape.element_bytes
        scored = min(tokens, max(1, _SCORED_BYTES // (_LOGIT_BYTES * shape.vocab_size)))
        logits = max(rows * _SAMPLING_COPIES, rows + scored * _SCORING_COPIES)
        return layer + logits * shape.vocab_size * _LOGIT_BYTES


@dataclass(frozen=True)
class LayoutMemory:
    """One worker's memory under one layout. Bytes are of one device unless named otherwise."""

    layout: DeviceLayout
    budget_bytes: int
    weight_bytes: int
    reserved_bytes: int
    kv_bytes_per_token: int
    context: int

    @property
    def left_bytes(self) -> int:
        """For KV; negative: so much is missing."""
        return self.budget_bytes - self.weight_bytes - self.reserved_bytes

    @property
    def all_weight_bytes(self) -> int:
        return self.weight_bytes * self.layout.num_devices

    @property
    def worker_kv_bytes_per_token(self) -> int:
        """On all devices that hold a part of the token."""
        return self.kv_bytes_per_token * self.layout.tp_size

    @property
    def num_tokens(self) -> int:
        """KV tokens of the whole worker."""
        return max(0, self.left_bytes) // self.kv_bytes_per_token * self.layout.num_groups

    @property
    def num_requests(self) -> int:
        """Requests of `context` tokens that the worker holds at a time; each lies in one group of devices."""
        return self.num_tokens // self.layout.num_groups // self.context * self.layout.num_groups

    def as_dict(self) -> dict[str, Any]:
        return {
            "tensor_parallel": self.layout.tp_size,
            "expert_parallel": self.layout.ep_size,
            "devices": self.layout.num_devices,
            "budget_bytes": self.budget_bytes,
            "weight_bytes": self.weight_bytes,
            "all_weight_bytes": self.all_weight_bytes,
            "reserved_bytes": self.reserved_bytes,
            "left_bytes": self.left_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "worker_kv_bytes_per_token": self.worker_kv_bytes_per_token,
            "tokens": self.num_tokens,
            "requests": self.num_requests,
        }


def memory_of(question: MemoryQuestion, layout: DeviceLayout) -> LayoutMemory:
    """Raises ConfigError for a layout that the model cannot be sliced into."""
    question.shape.check_layout(layout)
    if question.split_latents and question.shape.latent is None:
        raise ConfigError(f"--split-latents: {question.shape.name} keeps no latents; leave it out")
    kv_bytes = question.shape.kv_bytes_per_token(layout.tp_size, question.kv_dtype)
    return LayoutMemory(
        layout=layout,
        budget_bytes=int(question.device.memory_bytes * question.memory_utilization),
        weight_bytes=question.shape.weight_bytes(layout, question.quantization),
        reserved_bytes=question.reserved_bytes(layout),
        kv_bytes_per_token=-(-kv_bytes // question.num_shares(layout)),
        context=question.context,
    )


def usual_layouts(shape: ModelShape, devices_per_node: int) -> list[DeviceLayout]:
    """Slices over the devices of one node; experts also whole, over one node and over several."""
    sizes = [n for n in (1, 2, 4, 8, 16) if n <= devices_per_node]
    layouts = [DeviceLayout(tp_size) for tp_size in sizes]
    if shape.experts is not None:
        last = sizes[-1]
        spread = [(1, 1), (1, 2), (4, 2), (1, 4), (4, 4)]  # DeepSeek-V3 computes prompts with TP 4 and EP 32
        layouts += [DeviceLayout(last, last), *(DeviceLayout(tp_size, times * last) for tp_size, times in spread)]
    return [layout for layout in layouts if _is_allowed(shape, layout)]


def _is_allowed(shape: ModelShape, layout: DeviceLayout) -> bool:
    try:
        shape.check_layout(layout)
    except ConfigError:
        return False
    return True


def check_fits(question: MemoryQuestion, wanted: LayoutMemory) -> None:
    """Raises ConfigError, with what would fit, where a worker cannot hold one request of `context`."""
    if wanted.num_requests:
        return
    shape, missing = question.shape, -wanted.left_bytes
    what = (
        f"{shape.name} ({wanted.weight_bytes / 1e9:.1f} GB of weights and {wanted.reserved_bytes / 1e9:.1f} GB beside "
        f"them on each device) is {missing / 1e9:.1f} GB larger than {question.memory_utilization:g} of "
        f"{question.device.name}'s memory"
        if missing > 0
        else f"one request of {question.context:,} tokens does not fit: {shape.name} leaves {question.device.name} "
        f"room for {wanted.num_tokens // wanted.layout.num_groups:,}"
    )
    raise ConfigError(f"{wanted.layout}: {what}; {_remedy(question)}")


def _remedy(question: MemoryQuestion) -> str:
    all_layouts = usual_layouts(question.shape, question.device.devices_per_node)
    fitting = [layout for layout in all_layouts if memory_of(question, layout).num_requests]
    if fitting:
        first = fitting[0]
        return f"use --tp {first.tp_size}" + (f" --ep {first.ep_size}" if first.ep_size > 1 else "")
    most = max(all_layouts, key=lambda layout: memory_of(question, layout).left_bytes)
    return (
        f"no usual layout does ({most} comes nearest): use --quantization int4, a smaller --context or a larger device"
    )


def _widths(shape: ModelShape, tp_size: int) -> tuple[int, int, int]:
    """Elements of a token's query heads, of its keys, and of one head, on one device."""
    heads = shape.num_attention_heads // tp_size
    if shape.latent is not None:
        return heads * shape.latent.width, shape.latent.width, shape.latent.width
    return heads * shape.head_dim, shape.kv_heads(tp_size) * shape.head_dim, shape.head_dim


def _expanded_elements(shape: ModelShape, tp_size: int) -> int:
    """Elements of keys and values that are made of latents at a time, by way of both together and of both padded."""
    if shape.latent is None:
        return 0
    longest = shape.max_position_embeddings
    heads = shape.latent.heads_at_once(longest, shape.num_attention_heads // tp_size)
    return 4 * longest * shape.latent.expanded_dim * heads


def _mlp_elements(shape: ModelShape, layout: DeviceLayout) -> int:
    """Elements of a token that its widest MLP makes on one device: gate, up and their product, and of experts what goes
    into each that it chooses, and comes out. With experts over several devices, of those that come to it when all are
    used alike."""
    dense = 3 * shape.intermediate_size // layout.tp_size if shape.num_dense_layers else 0
    if shape.experts is None:
        return dense
    experts = shape.experts
    sliced = layout.tp_size if layout.ep_size == 1 else 1
    routed = 3 * experts.num_per_token * experts.intermediate_size // sliced
    shared = 3 * experts.shared_intermediate_size // layout.tp_size
    return max(dense, routed + shared + 2 * experts.num_per_token * shape.hidden_size)
