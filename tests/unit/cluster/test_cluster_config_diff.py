"""What a running cluster takes up of another configuration, and values set in a file that keeps its comments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config.diff import differences, is_run_time, refuse_fixed, rolling_keys, run_time_keys, set_values
from cluster.config.load import load_config, parse_config
from cluster.errors import FailedPrecondition
from cluster.settings import WorkerSettings, run_time_json

FILE = Path(__file__).resolve().parents[3] / "cluster.yaml"


def test_what_is_not_marked_as_run_time_is_refused_by_name() -> None:
    running = load_config(FILE)
    roles = replace(running.roles, decode=replace(running.roles.decode, devices=3))
    wanted = replace(running, roles=roles, engine=replace(running.engine, block_size=32, device="cuda"))
    changed = differences(running, wanted)
    assert changed == {"roles.decode.devices": 3, "engine.block_size": 32, "engine.device": "cuda"}
    with pytest.raises(FailedPrecondition, match=r"^engine.device cannot change while the cluster runs: restart"):
        refuse_fixed(changed)
    refuse_fixed(["engine.block_size", "transfer.num_slots"])
    refuse_fixed(["roles.decode.devices", "rebalance.slo.ttft_ms", "engine.max_num_batched_tokens"])
    assert {key for key in run_time_keys() if not key.startswith("roles.")} == {
        "engine.max_num_batched_tokens",
        "rebalance",
    }
    assert {key.removeprefix("roles.decode.") for key in run_time_keys() if key.startswith("roles.decode.")} == {
        *("devices", "tensor_parallel", "expert_parallel", "split_latents", "min_workers"),
        *("block_size", "kv_cache_tokens"),
        "engine.max_num_batched_tokens",
    }
    refuse_fixed(["roles.decode.engine.attention", "roles.prefill.model.quantization"])
    with pytest.raises(FailedPrecondition, match=r"^roles.decode.engine.device cannot change while the cluster runs"):
        refuse_fixed(["roles.decode.engine.device", "roles.decode.engine.max_num_batched_tokens"])
    assert not {key for key in rolling_keys() if is_run_time(key)}
    assert {key.partition(".")[0] for key in rolling_keys()} == {
        *("model", "roles", "engine", "transfer", "router", "metrics")
    }
    assert {key for key in rolling_keys() if key.startswith("metrics.")} == {"metrics.router"}


def test_processes_take_over_the_run_time_values_of_the_sections_that_they_have() -> None:
    config = load_config(FILE)
    slo = replace(config.rebalance.slo, tpot_ms=7.5)
    wanted = replace(
        config,
        rebalance=replace(config.rebalance, slo=slo),
        engine=replace(config.engine, max_num_batched_tokens=512, max_num_seqs=9),
    )
    worker = WorkerSettings("w", "decode", config.model, engine=replace(config.engine, block_size=7))
    taken = worker.with_run_time(run_time_json(wanted))
    assert (taken.slo, taken.engine.max_num_batched_tokens) == (slo, 512)
    assert replace(taken, slo=worker.slo, engine=worker.engine) == worker
    assert replace(taken.engine, max_num_batched_tokens=worker.engine.max_num_batched_tokens) == worker.engine


@settings(max_examples=20)
@given(st.integers(0, 99), st.integers(1, 99), st.floats(1, 9).map(lambda s: round(s, 3)))
def test_values_set_in_the_shipped_file_are_read_back_and_nothing_else_changes(
    prefill: int, decode: int, tpot_ms: float
) -> None:
    text = FILE.read_text(encoding="utf-8")
    values = {
        "roles.prefill.devices": prefill,
        "roles.prefill.min_workers": 0,
        "roles.decode.devices": decode,
        "rebalance.slo.tpot_ms": tpot_ms,
    }
    edited = set_values(text, values)
    before, after = parse_config(text, str(FILE)), parse_config(edited, str(FILE))
    asked = {key: value for key, value in values.items() if differences(before, after).get(key) is not None}
    assert differences(before, after) == asked
    assert (after.roles.prefill.devices, after.roles.decode.devices) == (prefill, decode)
    assert [line.partition("#")[2] for line in edited.splitlines()] == [
        line.partition("#")[2] for line in text.splitlines()
    ], "a comment changed"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("metadata: {serving: {model: {path: m}}}", "does not spell out metadata.serving.roles.decode.devices"),
        ("metadata: {serving: {roles: 3}}", "does not spell out metadata.serving.roles.decode.devices"),
        ("metadata: [", "is not valid YAML; mend it first"),
        ("", "does not spell out"),
    ],
)
def test_a_file_that_does_not_spell_a_key_is_not_edited(text: str, problem: str) -> None:
    with pytest.raises(FailedPrecondition, match=problem):
        set_values(text, {"roles.decode.devices": 2})


def test_a_value_is_set_inside_flow_mappings_too() -> None:
    text = "metadata: {serving: {roles: {decode: {devices: 1, tensor_parallel: 1}}}}  # one\n"
    assert set_values(text, {"roles.decode.devices": 12}) == text.replace("devices: 1", "devices: 12")


def test_a_small_number_is_written_as_yaml_reads_numbers() -> None:
    text = set_values("metadata: {serving: {engine: {swap: 1}}}", {"engine.swap": 5e-5})
    assert yaml.safe_load(text) == {"metadata": {"serving": {"engine": {"swap": 5e-5}}}}
