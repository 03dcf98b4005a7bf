"""Decode steps as one call of Baton's own kernels, where they have all that the model needs.

Between the layers of such a step there is no Python: with a few sequences that, and waiting for it, would take as long
as reading the weights. It computes, and rounds in the same order, what `engine.models.decoder` does.

Legend: T sequences, each with one new token, V vocab_size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from engine.kv.pool import KvCache
from engine.layers.experts import RoutedExperts
from engine.layers.linear import Linear
from engine.layers.rope import RopeTable
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, DecoderLayer, GatedMlp, LayerMlp, SelfAttention
from engine.models.loading import Model
from engine.native import DECODE_PAGES, Native
from engine.native.structures import GELU_TANH, SILU, DecodeBatch, DecodeModel, Layer, NativeGate, NativeMatrix
from engine.quantization.interface import native_tiles
from engine.step_input import StepInput, is_decode

FEATURES = frozenset(
    {
        *("attention_bias", "attention_output_bias", "mlp_bias", "qk_norm", "layer_windows", "experts"),
        *("attention_scale", "has_offset_norms", "activation", "norms", "embedding_scale", "layer_ropes"),
        *("attention_softcap", "logit_softcap", "attention_sinks"),
    }
)
"""The `ModelConfig.features` that the kernels compute."""


def choose_decode_step(
    kernels: Native | None, model: Model, config: ModelConfig, kv: KvCache, ropes: Sequence[RopeTable]
) -> tuple[DecodeStep | None, str]:
    """The step, or None; and why."""
    if not isinstance(model, Decoder):
        return None, "transformers' own code computes the model"
    if kernels is None or not kernels.has_products:
        return None, "Baton's kernels for products are not used"
    if unknown := config.features - FEATURES:
        return None, f"Baton's kernels do not compute {', '.join(sorted(unknown))}"
    if config.experts is not None and config.experts.routing is not None:
        return None, "Baton's kernels do not choose experts as this model does"
    if config.norms.before_attention is None or config.norms.before_mlp is None:
        return None, "Baton's kernels do not compute layers without a norm before attention and MLP"
    if model.tp.size > 1:
        return None, "tensor-parallel ranks meet between products"
    if kv.pool.dtype not in DECODE_PAGES or ropes[0].cos.dtype != torch.bfloat16:
        return None, "the model or its KV is not in bfloat16"
    if not all(_can_multiply(linear) for linear in _linears(model)):
        return None, "some weights are not laid out for Baton's kernels"
    return DecodeStep(kernels, model, config, kv, ropes), "decode steps are one call"


class DecodeStep:
    """Runs over the weights and the pool that it was made for, which it keeps alive."""

    def __init__(
        self, kernels: Native, model: Decoder, config: ModelConfig, kv: KvCache, ropes: Sequence[RopeTable]
    ) -> None:
        self._kernels = kernels
        self._owner, self._owners = model, (kv, ropes)
        self._pages = kv.pool.dtype
        self.spent_s = np.zeros(2)
        """Seconds that products and attention have taken so far, in that order."""
        self._spent_address = self.spent_s.ctypes.data
        layers = (Layer * len(model.layers))(*[_layer(layer, config, kv, ropes) for layer in model.layers])
        attention = _attention(model.layers[0])
        self._model = DecodeModel(
            layers=layers,
            embedding=model.embedding.weight.data_ptr(),
            norm=model.norm.weight.data_ptr(),
            head=_matrix(model.head),
            num_layers=len(layers),
            hidden=config.hidden_size,
            q_heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            dim=config.head_dim,
            block_size=kv.pool.shape[3],
            num_tokens=config.vocab_size,
            num_positions=ropes[0].cos.shape[0],
            num_blocks=kv.pool.shape[2],
            num_groups=len(config.kv_groups),
            eps=config.rms_norm_eps,
            scale=config.softmax_scale,
            soft_cap=config.attention_softcap or 0.0,
            embedding_scale=model.embedding_scale or 0.0,
            gating=NativeGate(GELU_TANH if config.activation == "gelu_tanh" else SILU),
        )

    def takes(self, step: StepInput) -> bool:
        """Whether it is a decode step and nothing else."""
        return is_decode(step) and not len(step.block_copies)

    def run(self, step: StepInput) -> torch.Tensor:
        """Writes the new tokens' KV; the logits, float32 [T, V]. Raises IndexError for a token, position or block that
        is not there."""
        num_tokens = len(step.token_ids)
        logits = torch.empty((num_tokens, self._model.num_tokens), dtype=torch.float32)
        arrays = [
            np.ascontiguousarray(array, dtype=np.int32)
            for array in (step.token_ids, step.positions, step.slot_mapping, step.seqlens_k, step.block_tables)
        ]
        pointers = [array.ctypes.data for array in arrays]
        batch = DecodeBatch(*pointers, logits.data_ptr(), self._spent_address, num_tokens, step.block_tables.shape[1])
        if not self._kernels.decode(self._model, batch, self._pages):
            raise IndexError(self._what_is_missing(step))
        return self._owner.capped(logits)

    def _what_is_missing(self, step: StepInput) -> str:
        num_slots = self._model.num_blocks * self._model.block_size
        limits = {
            "token": (step.token_ids, self._model.num_tokens),
            "position": (step.positions, self._model.num_positions),
            "slot": (step.slot_mapping, num_slots),
            "block": (step.block_tables, self._model.num_blocks),
            "length less one": (step.seqlens_k - 1, step.block_tables.shape[1] * self._model.block_size),
        }
        wrong = [
            f"{what} {array.min()} to {array.max()}; there are {limit}"
            for what, (array, limit) in limits.items()
            if not 0 <= array.min() <= array.max() < limit
        ]
        return f"a step names {' and '.join(wrong)}"


def _linears(model: Decoder) -> Iterator[Linear]:
    for layer in model.layers:
        attention = _attention(layer)
        yield from (attention.qkv, attention.out)
        yield from layer.mlp.linears
    yield model.head


def _can_multiply(linear: Linear) -> bool:
    return native_tiles(linear.matrix) is not None


def _matrix(linear: Linear) -> NativeMatrix:
    tiles = native_tiles(linear.matrix)
    assert tiles is not None, "a matrix is not tiled"
    return NativeMatrix(weight=tiles.weight, bias=None if linear.bias is None else linear.bias.data_ptr())


def _layer(layer: DecoderLayer, config: ModelConfig, kv: KvCache, ropes: Sequence[RopeTable]) -> Layer:
    attention, rope = _attention(layer), ropes[config.rope_of(_attention(layer).layer)]
    assert layer.input_norm is not None and layer.mlp_norm is not None, "a norm is missing"
    keys, values = kv.pages(attention.layer)
    return Layer(
        qkv=_matrix(attention.qkv),
        out=_matrix(attention.out),
        **_mlp(layer.mlp),
        input_norm=layer.input_norm.weight.data_ptr(),
        mlp_norm=layer.mlp_norm.weight.data_ptr(),
        output_norm=None if layer.output_norm is None else layer.output_norm.weight.data_ptr(),
        mlp_output_norm=None if layer.mlp_output_norm is None else layer.mlp_output_norm.weight.data_ptr(),
        head_norm=None if attention.head_norm is None else attention.head_norm.data_ptr(),
        cos=rope.cos.data_ptr(),
        sin=rope.sin.data_ptr(),
        sinks=None if attention.sinks is None else attention.sinks.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        window=attention.window_size[0],
        group=attention.group,
    )


def _attention(layer: DecoderLayer) -> SelfAttention:
    assert isinstance(layer.attention, SelfAttention), "another attention is a feature that FEATURES does not name"
    return layer.attention


def _mlp(mlp: LayerMlp) -> dict[str, object]:
    """The fields of `Layer` that say what is computed between the MLP's norm and the residual."""
    if isinstance(mlp, GatedMlp):
        return {"gate_up": _matrix(mlp.gate_up), "down": _matrix(mlp.down)}
    assert isinstance(mlp, RoutedExperts) and mlp.experts.native is not None, (
        "experts are not laid out for Baton's kernels"
    )
    routed: dict[str, object] = {"experts": ctypes.pointer(mlp.experts.native), "router": _matrix(mlp.router)}
    if mlp.shared is None:
        return routed
    shared = {"gate_up": _matrix(mlp.shared.gate_up), "down": _matrix(mlp.shared.down)}
    assert mlp.shared_gate is not None, "the kernels gate the expert that every token takes"
    return routed | shared | {"shared_gate": _matrix(mlp.shared_gate)}
