"""The names among which a value of the configuration is chosen.

A routing policy is a name here and a file in `router/routing/policies`, a weight quantization a name here and a file in
`engine/quantization`. The transports are in `cluster.transports`, with what they connect.
"""

from __future__ import annotations

from typing import Literal

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
QuantizationName = Literal["none", "int8", "int4", "fp8"]
RouterPlaces = Literal["head", "spread"]
DeviceName = Literal["auto", "cpu", "cuda"]
KvCacheDtypeName = Literal["auto", "int8", "fp8"]
AttentionName = Literal["auto", "flash_attn", "triton", "varlen", "cpu"]
KernelsName = Literal["auto", "native", "torch"]
ToolFormatName = Literal[
    "auto", "harmony", "kimi", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "minimax_m2", "granite",
    "lfm2", "mistral", "glm", "seed_oss", "qwen3_coder", "hermes", "pythonic", "llama3_json", "json",
]  # fmt: skip
ModelImplName = Literal["auto", "native", "transformers"]
AsyncStepsName = Literal["auto", "on", "off"]
WireFormatName = Literal["native", "int8", "fp8"]
DigestName = Literal["auto", "on", "sampled", "off"]
RebalanceMode = Literal["fixed", "auto"]
PolicyName = Literal["predicted", "least_loaded", "round_robin", "random"]
KvStorePolicyName = Literal["reused", "evicted", "all"]
PrefixFetchName = Literal["auto", "always", "off"]

ALIASES = {
    "gpu": "cuda",
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "float8": "fp8",
    "w8": "int8",
    "w4": "int4",
    "int8_wo": "int8",
    "int4_wo": "int4",
    "cuda-ipc": "cuda_ipc",
    "cuda-pages": "cuda_pages",
    "true": "on",
    "false": "off",
}
"""Other spellings of a value, offered in the error, never accepted."""
