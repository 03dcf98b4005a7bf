"""Says in config.json's fields what the metadata of a GGUF file say of a model.

llama.cpp leaves out what its code knows of an architecture; so does this. Knows no weights.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from cluster.errors import CheckpointError
from cluster.gguf.header import GgufHeader, Value

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor that stands for Llama 3's scaling of rope: what each frequency is divided by."""
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
EXPERTS, SHARED_EXPERT = "blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate_shexp.weight"
_ROUTER = ".ffn_gate_inp"
"""Within the names of matrices that are always in F32."""
_SOFTMAX = 1
"""llama.cpp's number of the function that makes shares of a router's outputs."""
_DTYPES = {"F32": "float32", "F16": "float16"}
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0
_LLAMA3_LENGTHS = tuple(1 << bits for bits in range(8, 21))
_CLOSE = 1e-4


@dataclass(frozen=True)
class _Architecture:
    """An architecture of llama.cpp, as transformers has it."""

    name: str
    """Empty: it always has experts."""
    default_theta: float = 10_000.0
    has_windows: bool = False
    window_pattern: int | None = None
    """Each so many layers there is one without a window, where the file says nothing."""
    scalar_layers: int | None = None
    """With so many layers, attention is scaled by the width of a head's share of hidden_size, not by that of a head."""
    has_factors: bool = False
    """Its rope may be scaled as in Llama 3."""
    with_experts: str = ""
    """Its name if it has experts; empty: then it is not read."""
    normalizes: bool = True
    """Whether a token's shares in experts add up to one."""


ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", has_factors=True, with_experts="MixtralForCausalLM"),
    "qwen2": _Architecture("Qwen2ForCausalLM"),
    "qwen2moe": _Architecture("", with_experts="Qwen2MoeForCausalLM", normalizes=False),
    "qwen3": _Architecture("Qwen3ForCausalLM"),
    "qwen3moe": _Architecture("", with_experts="Qwen3MoeForCausalLM"),
    "gemma2": _Architecture("Gemma2ForCausalLM", has_windows=True, window_pattern=2, scalar_layers=46),
    "gemma3": _Architecture(
        "Gemma3ForCausalLM", default_theta=1_000_000.0, has_windows=True, window_pattern=6, scalar_layers=62
    ),
}
"""The architectures that are read, by `general.architecture`."""


def model_config(header: GgufHeader) -> dict[str, Any]:
    """Returns the fields of a config.json. Raises CheckpointError that names the file and the key."""
    return _Metadata(header).config()


class _Metadata:
    def __init__(self, header: GgufHeader) -> None:
        self._header, self._values = header, header.metadata
        self._check_whole()
        key = self._values.get("general.architecture")
        if not isinstance(key, str) or key not in ARCHITECTURES:
            raise self._wrong(
                f"general.architecture {key!r} is not supported in GGUF; Baton reads {', '.join(ARCHITECTURES)} there"
            )
        self._key, self._architecture = key, ARCHITECTURES[key]

    def config(self) -> dict[str, Any]:
        heads, layers, hidden = (self._size(k) for k in ("attention.head_count", "block_count", "embedding_length"))
        head_dim = self._head_dim(hidden // heads)
        experts = self._experts()
        embedding = self._header.tensors.get(EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            raise self._wrong(f"tensor {EMBEDDING} is missing or no matrix")
        return {
            "architectures": [self._architecture.with_experts if experts else self._architecture.name],
            "hidden_size": hidden,
            "intermediate_size": self._size("feed_forward_length", experts.get("moe_intermediate_size")),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self._size("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "vocab_size": embedding.shape[0],
            "max_position_embeddings": self._size("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._number("rope.freq_base", self._architecture.default_theta),
            "rope_scaling": self._rope_scaling(head_dim),
            "attention_bias": "blk.0.attn_output.bias" in self._header.tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in self._header.tensors,
            "tie_word_embeddings": HEAD not in self._header.tensors,
            "torch_dtype": self._dtype(),
            "bos_token_id": self._values.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._ends(),
            "quantization_config": {"quant_method": "gguf", "types": self._matrix_types()},
            **experts,
            **(self._windows(layers, heads, hidden, head_dim) if self._architecture.has_windows else {}),
        }

    def _check_whole(self) -> None:
        count = self._values.get("split.count", 1)
        if type(count) is int and count > 1:
            raise self._wrong(f"is one of {count} parts; join them with `llama-gguf-split --merge` first")

    def _head_dim(self, default: int) -> int:
        size = self._size("attention.key_length", self._size("rope.dimension_count", default))
        for name in ("attention.value_length", "rope.dimension_count"):
            if self._size(name, size) != size:
                raise self._wrong(
                    f"{self._key}.{name} {self._own(name)} is not the heads' size {size}, as Baton needs it"
                )
        return size

    def _experts(self) -> dict[str, Any]:
        """Returns the fields that only models with experts have; they are told by all names that families have."""
        if self._own("expert_count") is None and self._architecture.name:
            return {}
        if not self._architecture.with_experts:
            raise self._wrong(f"{self._key}.expert_count: a {self._key} with experts is not read from GGUF")
        for name, usual in (("expert_gating_func", _SOFTMAX), ("expert_weights_scale", 1.0)):
            if self._own(name) not in (None, 0, usual):
                raise self._wrong(f"{self._key}.{name} {self._own(name)!r} is not supported; Baton reads {usual}")
        count, chosen = self._size("expert_count"), self._size("expert_used_count")
        width = self._width(EXPERTS, (count, None, self._size("embedding_length")))
        normalizes = self._own("expert_weights_norm")
        fields = {
            "num_local_experts": count,
            "num_experts": count,
            "num_experts_per_tok": chosen,
            "moe_intermediate_size": width,
            "norm_topk_prob": self._architecture.normalizes if normalizes is None else normalizes,
        }
        if SHARED_EXPERT in self._header.tensors:
            fields["shared_expert_intermediate_size"] = self._width(
                SHARED_EXPERT, (None, self._size("embedding_length"))
            )
        return fields

    def _width(self, name: str, shape: tuple[int | None, ...]) -> int:
        """Returns the size of a tensor where its shape has None."""
        tensor = self._header.tensors.get(name)
        found = () if tensor is None else tensor.shape
        if len(found) != len(shape) or any(
            wanted not in (None, size) for size, wanted in zip(found, shape, strict=True)
        ):
            told = "is missing" if tensor is None else f"has shape {list(found)}"
            sizes = ", ".join("width" if size is None else str(size) for size in shape)
            raise self._wrong(
                f"tensor {name} {told} (expected shape [{sizes}]); convert the model with a newer llama.cpp"
            )
        return found[shape.index(None)]

    def _windows(self, layers: int, heads: int, hidden: int, head_dim: int) -> dict[str, Any]:
        """Returns the fields that only Gemma has."""
        pattern = self._own("attention.sliding_window_pattern")
        is_small = layers != self._architecture.scalar_layers
        fields: dict[str, Any] = {
            "sliding_window": self._size("attention.sliding_window", 4096),
            "query_pre_attn_scalar": head_dim if is_small else hidden // heads,
        }
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if self._own(name) is not None:
                fields[name] = self._number(name)
        if isinstance(pattern, tuple):
            return fields | {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern]}
        return fields | {"sliding_window_pattern": pattern or self._architecture.window_pattern}

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        if ROPE_FACTORS in self._header.tensors:
            return self._llama3(head_dim)
        kind = self._own("rope.scaling.type")
        if kind in (None, "none"):
            return None
        if kind not in ("linear", "yarn"):
            raise self._wrong(
                f"{self._key}.rope.scaling.type {kind!r} is not supported; Baton reads none, linear, yarn"
            )
        scaling: dict[str, Any] = {"rope_type": kind, "factor": self._number("rope.scaling.factor")}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self._size("rope.scaling.original_context_length")
        return scaling

    def _llama3(self, head_dim: int) -> dict[str, Any]:
        """The factors name neither their formula nor its length: it is the one that gives them."""
        found = self._floats(ROPE_FACTORS, head_dim // 2)
        theta = self._number("rope.freq_base", self._architecture.default_theta)
        factor = max(found)
        for length in _LLAMA3_LENGTHS if self._architecture.has_factors and factor > 0 else ():
            made = [_llama3_factor(theta ** (2 * i / head_dim), factor, length) for i in range(head_dim // 2)]
            if all(math.isclose(one, other, rel_tol=_CLOSE) for one, other in zip(found, made, strict=True)):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": _LLAMA3_LOW,
                    "high_freq_factor": _LLAMA3_HIGH,
                    "original_max_position_embeddings": length,
                }
        raise self._wrong(f"tensor {ROPE_FACTORS} is not Llama 3's scaling of rope, the only one that Baton reads")

    def _floats(self, name: str, count: int) -> tuple[float, ...]:
        tensor = self._header.tensors[name]
        if tensor.shape != (count,) or tensor.kind.name != "F32":
            raise self._wrong(f"tensor {name} must be F32 [{count}] (is {tensor.kind.name} {list(tensor.shape)})")
        with self._header.path.open("rb") as file:
            file.seek(tensor.start)
            return struct.unpack(f"<{count}f", file.read(tensor.size_bytes))

    def _matrix_types(self) -> dict[str, str]:
        """The type of each matrix of the layers and of the head, by its name in the file; one for all experts."""
        matrices = {name: each.kind.name for name, each in self._header.tensors.items() if len(each.shape) in (2, 3)}
        return {name: kind for name, kind in matrices.items() if name != EMBEDDING}

    def _dtype(self) -> str:
        """bfloat16 unless all matrices are in one other type of floating point."""
        kinds = {kind for name, kind in self._matrix_types().items() if _ROUTER not in name}
        return _DTYPES.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"

    def _ends(self) -> list[int] | None:
        names = ("eos_token_id", "eot_token_id", "eom_token_id")
        found = [self._values.get(f"tokenizer.ggml.{name}") for name in names]
        return list(dict.fromkeys(token for token in found if type(token) is int)) or None

    def _own(self, name: str) -> Value | None:
        """Returns a value of the architecture's own; None where the file has none."""
        return self._values.get(f"{self._key}.{name}")

    def _size(self, name: str, default: int | None = None) -> int:
        value = self._own(name)
        if isinstance(value, tuple) and len(set(value)) == 1:  # of each layer
            value = value[0]
        value = default if value is None else value
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise self._wrong(f"{self._key}.{name} must be a positive integer, the same for all layers (is {value!r})")
        return value

    def _number(self, name: str, default: float | None = None) -> float:
        value = self._own(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._wrong(f"{self._key}.{name} must be a positive number (is {value!r})")
        # Numbers are float32 in the file: 1e-6 is to stay that.
        return float(f"{value:.7g}")

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._header.path}: {what}")


def _llama3_factor(wavelength_share: float, factor: float, length: int) -> float:
    """Returns the divisor of a frequency whose wavelength is 2 pi times `wavelength_share` (Llama 3.1's model card)."""
    turns = length / (2 * math.pi * wavelength_share)
    if turns > _LLAMA3_HIGH:
        return 1.0
    if turns < _LLAMA3_LOW:
        return factor
    smooth = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    return 1 / ((1 - smooth) / factor + smooth)
