"""A curve computed from a model's shape and a device: each part of a step takes as long as its operations or its bytes,
whichever is longer, at a stated share of the device's peaks, and then there is what ranks say to one another.

    a step = dense matrices + experts + head + attention of prompts + attention of sequences
             + all-reduces or all-to-alls + a time for each layer + a fixed one

    matrices        2 operations for each weight and token; each weight's bytes once
    experts         a token goes to k of E: pairs of both are operations; 1 - (1 - k/E)^tokens of the experts are read
    attention       each pair of a token and a key; the keys of sequences are read (those of prompts are little beside
                    their operations)
    all-reduce      2 (n-1)/n of the activations over a link (ring; Patarasuk and Yuan 2009), twice a layer
                    (Megatron-LM, arXiv 1909.08053), and a latency for each doubling of the ranks
    all-to-all      each token to the devices of its k experts in 8 bits and back in 16 (DeepSeek-V3, arXiv 2412.19437)
    latent          decoding attends to the latent vectors with absorbed projections (DeepSeek-V2, arXiv 2405.04434)

Nothing overlaps. Loads of experts are taken to be even. Sizes of a step are the whole worker's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.config.choices import QuantizationName
from cluster.step_cost import StepSize
from simulate.devices import GRAPHS, DeviceSpec, Efficiency
from simulate.shapes import DeviceLayout, MatrixKind, ModelShape

_ACTIVATION_BYTES = 2
_DISPATCH_BYTES, _COMBINE_BYTES = 1, 2
_ALL_REDUCES = 2
"""In one layer: after attention and after the MLP."""


@dataclass(frozen=True)
class _Part:
    """Matrices of one device."""

    elements: int
    size_bytes: int


class ComputedCurve:
    """Steps of one worker of `layout.num_devices` devices."""

    def __init__(
        self,
        shape: ModelShape,
        device: DeviceSpec,
        layout: DeviceLayout,
        quantization: QuantizationName = "none",
        kv_dtype: str = "",
        efficiency: Efficiency = GRAPHS,
    ) -> None:
        """`kv_dtype` empty: what the model computes in. Raises ConfigError for a layout that does not divide it."""
        shape.check_layout(layout)
        self._shape, self._device, self._layout, self._efficiency = shape, device, layout, efficiency
        self._flops = efficiency.flops * device.peak_flops("fp8" if quantization == "fp8" else "bfloat16")
        self._attention_flops = efficiency.flops * device.peak_flops("bfloat16")
        self._bytes_per_s = efficiency.memory * device.memory_bytes_per_s
        self._dense = self._part(quantization, "attention", "mlp", "unrounded")
        self._routed = self._part(quantization, "experts")
        self._head = self._part(quantization, "head")
        self._kv_bytes = shape.kv_bytes_per_token(layout.tp_size, kv_dtype or shape.dtype)

    def _part(self, quantization: QuantizationName, *kinds: MatrixKind) -> _Part:
        groups = [group for group in self._shape.matrices(self._layout) if group.kind in kinds]
        return _Part(
            sum(group.num_elements for group in groups),
            sum(self._shape.group_bytes(group, quantization) for group in groups),
        )

    def seconds(self, step: StepSize) -> float:
        """0 for a step that computes nothing."""
        num_tokens = step.num_prompt_tokens + step.num_sequences
        if not num_tokens:
            return 0.0
        groups, layers = self._layout.num_groups, self._shape.num_hidden_layers
        rows = math.ceil((step.num_sequences + bool(step.num_prompt_tokens)) / groups)
        device_s = (
            self._products_s(self._dense, num_tokens / groups)
            + self._experts_s(num_tokens)
            + self._products_s(self._head, rows)
            + self._prompts_s(step.num_attended / groups)
            + self._sequences_s(step.num_kv_tokens / groups)
            + self._exchange_s(num_tokens)
            + layers * self._efficiency.layer_s
        )
        host_s = self._efficiency.step_s + self._efficiency.sequence_s * step.num_sequences / groups
        return max(device_s, layers * self._efficiency.launch_layer_s) + host_s

    def _products_s(self, part: _Part, num_tokens: float) -> float:
        return max(2 * part.elements * num_tokens / self._flops, part.size_bytes / self._bytes_per_s)

    def _experts_s(self, num_tokens: int) -> float:
        experts = self._shape.experts
        if experts is None:
            return 0.0
        share = experts.num_per_token / experts.num_routed
        flops = 2 * self._routed.elements * num_tokens * share  # of all tokens, those that come to experts held here
        used = 1 - (1 - share) ** num_tokens
        return max(flops / self._flops, used * self._routed.size_bytes / self._bytes_per_s)

    def _prompts_s(self, num_attended: float) -> float:
        """Each pair of a token and a key that it sees, of the heads of one device."""
        shape, heads = self._shape, self._shape.num_attention_heads // self._layout.tp_size
        latent = shape.latent
        width = 2 * shape.head_dim if latent is None else latent.qk_head_dim + latent.v_head_dim
        return 2 * heads * width * shape.num_hidden_layers * num_attended / self._attention_flops

    def _sequences_s(self, num_kv_tokens: float) -> float:
        shape, heads = self._shape, self._shape.num_attention_heads // self._layout.tp_size
        latent = shape.latent
        width = 2 * shape.head_dim if latent is None else latent.width + latent.kv_lora_rank
        flops = 2 * heads * width * shape.num_hidden_layers * num_kv_tokens
        return max(flops / self._attention_flops, num_kv_tokens * self._kv_bytes / self._bytes_per_s)

    def _exchange_s(self, num_tokens: int) -> float:
        """All-reduces of the ranks that share a token, and all-to-alls of those that share experts."""
        shape, layout = self._shape, self._layout
        sparse = shape.experts.num_layers if shape.experts and layout.num_groups > 1 else 0
        num_reduces = _ALL_REDUCES * shape.num_hidden_layers - sparse
        reduce_s = self._all_reduce_s(num_tokens / layout.num_groups * shape.hidden_size * _ACTIVATION_BYTES)
        return num_reduces * reduce_s + (sparse * self._all_to_all_s(num_tokens) if sparse else 0.0)

    def _all_reduce_s(self, size_bytes: float) -> float:
        ranks = self._layout.tp_size
        if ranks == 1:
            return 0.0
        is_inside = ranks <= self._device.devices_per_node
        link = self._device.link_bytes_per_s if is_inside else self._device.nic_bytes_per_s
        sent_s = 2 * (ranks - 1) / ranks * size_bytes / (self._efficiency.link * link)
        return sent_s + math.log2(ranks) * self._efficiency.link_latency_s

    def _all_to_all_s(self, num_tokens: int) -> float:
        """There and back, for the tokens of one device."""
        shape, device, layout = self._shape, self._device, self._layout
        assert shape.experts is not None
        own = num_tokens / layout.num_devices
        sent = own * shape.experts.num_per_token * shape.hidden_size * (_DISPATCH_BYTES + _COMBINE_BYTES)
        sent *= (layout.num_devices - 1) / layout.num_devices
        outside = max(0.0, 1 - device.devices_per_node / layout.num_devices)
        seconds = max(sent * (1 - outside) / device.link_bytes_per_s, sent * outside / device.nic_bytes_per_s)
        return seconds / self._efficiency.link + 2 * math.log2(layout.num_devices) * self._efficiency.link_latency_s
