"""KV that a sequence of 32,000 tokens holds where layers see a window: served models' shapes, nothing computed."""

from __future__ import annotations

from typing import Any

import pytest
from test_worker_windows import Bench, NoRanks, prompt_of

from cluster.kv_groups import num_rows
from engine.json_fields import Fields
from engine.kv.block_manager import BlockManager
from engine.model_cost import kv_layer_bytes
from engine.models.registry import read_config
from engine.sequence import AHEAD_TOKENS, most_blocks

GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 262_144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}


@pytest.mark.parametrize(
    ("fields", "whole_mb", "prompt_mb", "decode_mb"),
    [(GPT_OSS_20B, 1573, 840, 790), (GEMMA_3_1B, 852, 194, 144)],
    ids=["gpt-oss-20b", "gemma-3-1b"],
)
def test_at_32k_tokens_a_window_holds_no_more_than_it_needs(
    fields: dict[str, Any], whole_mb: int, prompt_mb: int, decode_mb: int
) -> None:
    """MB of KV in bfloat16: of every layer in full, the most that is held during the prompt, and while decoding."""
    config = read_config(Fields(fields, "config.json"))
    groups, size, length, num_output = config.kv_groups, 16, 32_000, 10
    blocks = BlockManager(most_blocks(groups, length + num_output, size), size, groups=groups)
    bench = Bench(None, ranks=NoRanks(), blocks=blocks)
    bench.admit("long", prompt_of(length), most=num_output)
    prompt, decoding = [0] * len(groups), [0] * len(groups)
    while bench.core.turn(wait=False):
        for sequence in bench.core.decode.running:
            tables = [sequence.block_table[place :: len(groups)] for place in range(len(groups))]
            held = [sum(block >= 0 for block in table) for table in tables]
            assert sum(held) == blocks.num_held
            most = decoding if sequence.num_computed_tokens > length else prompt
            most[:] = map(max, most, held)

    for group, of_prompt, of_decoding in zip(groups, prompt, decoding, strict=True):
        if group.window is None:
            assert of_decoding == -(-(length + num_output) // size)
        else:
            assert of_decoding <= -(-group.window // size) + 1
            assert of_prompt <= -(-(group.window + AHEAD_TOKENS) // size) + 1
    layer_bytes = kv_layer_bytes(config, 1, "bfloat16")
    block_mb = size * num_rows(groups) * layer_bytes / 1e6
    assert round(length * config.num_hidden_layers * layer_bytes / 1e6) == whole_mb
    assert (round(sum(prompt) * block_mb), round(sum(decoding) * block_mb)) == (prompt_mb, decode_mb)
