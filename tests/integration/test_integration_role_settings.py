"""Roles of different settings in one cluster, with real processes: what is exact, and what another split does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from reference_engine import Completion, Engine
from serve_process import ROOT, Serve
from workers import Worker, hand_off, merged, running, sampling

from cluster.config.load import load_config
from controller.plan import plan_worker
from engine.kv.block_manager import BlockManager
from engine.model_runner import ModelRunner
from engine.sampling.params import SamplingParams
from engine.step_input import StepInput
from engine.tp import SingleGroup
from tools.client import BatonClient, make_spec

MODEL = ROOT / "models" / "tiny-shakespeare"
PROMPT = [(i * 37) % 1000 + 5 for i in range(77)]
NUM_TOKENS = 24
ROLES = {
    "prefill": {"devices": 1, "engine": {"max_num_batched_tokens": 48, "max_num_seqs": 8, "attention": "cpu"}},
    "decode": {
        "devices": 1,
        "model": {"quantization": "int8"},
        "engine": {"block_size": 8, "max_num_seqs": 4, "kv_cache_tokens": 2048},
    },
}


class PrefillThenDecode:
    """Prompts by one model, single tokens by another one, which goes on with the first one's KV."""

    def __init__(self, prefill: ModelRunner, decode: ModelRunner) -> None:
        self._prefill, self._decode = prefill, decode
        self._has_kv = False

    def forward(self, step: StepInput) -> torch.Tensor:
        if len(step.token_ids) > 1:
            return self._prefill.forward(step)
        if not self._has_kv:
            self._decode.kv.copy_(self._prefill.kv)
            self._has_kv = True
        return self._decode.forward(step)


def runner(quantization: str) -> ModelRunner:
    sizes = {"num_blocks": 64, "block_size": 16, "dtype": "bfloat16"}
    return ModelRunner(MODEL, tp=SingleGroup(), device="cpu", quantization=quantization, **sizes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected() -> Completion:
    prefill, decode = runner("none"), runner("int8")
    engine = Engine(PrefillThenDecode(prefill, decode), BlockManager(64, 16), prefill.config.vocab_size)
    params = SamplingParams(temperature=0.0, max_output_tokens=NUM_TOKENS, top_logprobs=0)
    return engine.generate([PROMPT], [params])[0][0]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roles")
    serving = {
        "model": {"path": str(MODEL), "dtype": "bfloat16"},
        "roles": ROLES,
        "engine": {"device": "cpu", "kv_cache_tokens": 4096, "threads": 1},
        "router": {"port": 0, "http_port": None, "policy": "least_loaded"},
        "admin": {"port": 0},
        "state": "memory",
    }
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({"cluster_name": "roles", "metadata": {"serving": serving}}, sort_keys=False))
    return path


def test_int8_decode_goes_on_from_what_bfloat16_prefill_computed_token_for_token(
    file: Path, expected: Completion
) -> None:
    config = load_config(file)
    settings = [plan_worker(config, role).ranks[0] for role in ("prefill", "decode")]  # type: ignore[arg-type]
    with running(*(Worker(**rank.as_dict()) for rank in settings)) as (prefill, decode):
        assert [w.info.block_size for w in (prefill, decode)] == [16, 8]
        assert prefill.info.weights_revision == decode.info.weights_revision
        key = hand_off("mixed", PROMPT, prefill, decode, sampling(max_output_tokens=NUM_TOKENS, top_logprobs=0))
        decode.wait_for(lambda: decode.outputs[key].finished)
        output = merged(key, prefill, decode)
    assert tuple(output.sequence()) == expected.token_ids
    logprobs = dict(enumerate(token.logprob for token in expected.sampled))
    assert output.logprobs[0] == pytest.approx(logprobs, abs=1e-3)
    alone = runner("int8")
    engine = Engine(alone, BlockManager(64, 16), alone.config.vocab_size)
    params = SamplingParams(temperature=0.0, max_output_tokens=NUM_TOKENS, top_logprobs=0)
    others = engine.generate([PROMPT], [params])[0][0].sampled
    assert output.logprobs[0] != pytest.approx(dict(enumerate(t.logprob for t in others)), abs=1e-4), "a mixed path"


@pytest.fixture(scope="module")
def serve(file: Path) -> Iterator[Serve]:
    served = Serve("--config", str(file))
    yield served
    served.close()


def baton(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli.main", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_cluster_serves_with_roles_of_different_settings(serve: Serve) -> None:
    with BatonClient(serve.address) as client:
        answer = client.generate(make_spec("ROMEO: " * 20, max_output_tokens=16, temperature=0.0))
        assert answer.usage.completion_tokens == 16
        until = time.monotonic() + 20
        while not (workers := {w.worker_id: w for w in client.status().workers})["decode-0"].stats.kv_bytes_received:
            assert time.monotonic() < until, "the decode worker computed the prompt itself"
    assert (workers["decode-0"].info.block_size, workers["prefill-0"].info.block_size) == (8, 16)
    assert (workers["decode-0"].info.max_num_seqs, workers["prefill-0"].info.max_num_seqs) == (4, 8)


@pytest.mark.battery
def test_another_split_starts_a_worker_with_its_roles_settings_and_stops_the_other(serve: Serve) -> None:
    at = "--admin-address", serve.admin_address
    done = baton("rebalance", "1:2", *at)
    assert done.returncode == 0, done.stderr
    done = baton("rebalance", "2:1", *at)
    assert done.returncode == 0, done.stderr
    assert "start prefill-1 on 1 device: done" in done.stdout + done.stderr
    with BatonClient(serve.address) as client:
        workers = {w.worker_id: w for w in client.status().workers}
        assert workers["prefill-1"].info.block_size == 16
        answer = client.generate(make_spec("ROMEO: " * 20, max_output_tokens=16, temperature=0.0))
        assert answer.usage.completion_tokens == 16


@pytest.mark.battery
def test_explain_shows_the_memory_of_each_role(file: Path) -> None:
    done = baton("config", "explain", str(file), "--json")
    assert done.returncode == 0, done.stderr
    roles = json.loads(done.stdout)["roles"]
    assert (roles["prefill"]["quantization"], roles["decode"]["quantization"]) == ("none", "int8")
    assert roles["decode"]["weight_bytes"] < 0.8 * roles["prefill"]["weight_bytes"]
    assert (roles["prefill"]["max_num_batched_tokens"], roles["decode"]["max_num_batched_tokens"]) == (48, 2048)
    assert (roles["prefill"]["num_tokens"], roles["decode"]["num_tokens"]) == (4096, 2048)
