"""Experts divided among the ranks of real workers, of another number on each side of the hand-off, against
transformers."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from workers import Worker, hand_off, merged, running, sampling

from engine.models.folder import read_model

NUM_TOKENS = 24
PROMPT = [(i * 37) % 250 + 3 for i in range(77)]


def expected(folder: Path) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([PROMPT])
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NUM_TOKENS)
    tokens: list[int] = found[0, len(PROMPT) :].tolist()
    return tokens


@pytest.mark.parametrize(
    ("kind", "count"),
    [("mixtral", "num_local_experts"), pytest.param("qwen2-moe", "num_experts", marks=pytest.mark.battery)],
)
def test_a_request_goes_from_two_groups_of_experts_to_four(kind: str, count: str, tmp_path: Path) -> None:
    """Seven experts, which neither number divides; decode slices nothing, prefill slices its experts in two. Both
    place them anew by load while they compute; prefill's ranks meet by Gloo, decode's in memory that they share."""
    folder = make_checkpoint(kind, tmp_path, **{count: 7})
    common = {"model_path": str(folder), "kv_cache_tokens": 2048, "chunk_tokens": 24, "max_num_batched_tokens": 48}
    common["expert_rebalance_tokens"] = 16
    torchs = {"tp_size": 4, "expert_parallel": 2, "metrics_port": 0, "kernels": "torch"}
    prefill = Worker(worker_id="prefill-0", role="prefill", **torchs, **common)
    decode = Worker(worker_id="decode-0", role="decode", tp_size=4, expert_parallel=4, metrics_port=0, **common)
    with running(prefill, decode) as (sender, receiver):
        key = hand_off("experts", PROMPT, sender, receiver, sampling(max_output_tokens=NUM_TOKENS))
        receiver.wait_for(lambda: receiver.outputs[key].finished)
        assert merged(key, sender, receiver).sequence() == expected(folder)
        with urllib.request.urlopen(f"http://{sender.info.metrics_address}/metrics", timeout=10) as page:
            told = page.read().decode()
        with urllib.request.urlopen(f"http://{receiver.info.metrics_address}/metrics", timeout=10) as page:
            moved = re.search(r"^baton_expert_moves_total (\S+)", page.read().decode(), re.MULTILINE)
        by_gloo = "collectives of 4 ranks: by Gloo over 127.0.0.1, since engine.kernels is torch"
        assert by_gloo in sender.ranks[0].stderr()
        assert "collectives of 4 ranks: in memory that they share" in receiver.ranks[0].stderr()
    assert moved is not None and float(moved[1]) > 0
    tokens = [line for line in told.splitlines() if line.startswith("baton_expert_tokens_total{")]
    experts = read_model(folder).experts
    assert experts is not None and len(tokens) == 7
    counted = sum(float(line.split()[-1]) for line in tokens)
    assert counted == len(PROMPT) * experts.num_per_token * experts.num_layers, "what was rehearsed counts, too"
    assert 'baton_expert_imbalance{among="groups"}' in told
