"""`engine.timed_steps`: a cost in place of computing, and what cannot stand beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config.load import load_config, parse_config
from cluster.config.schema import ServingConfig
from cluster.errors import ConfigError
from cluster.settings import WorkerSettings
from cluster.step_cost import StepCost
from worker.resolved import resolve

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "models" / "tiny-shakespeare"
TIMED = "timed_steps: {fixed_s: 0.01, kv_token_s: 1e-8}"


def parse(rest: str) -> ServingConfig:
    return parse_config(f"metadata:\n  serving:\n    model: {{path: {MODEL}}}\n{rest}", "cluster.yaml")


def test_one_number_turns_timed_steps_on() -> None:
    timed = parse(f"    engine: {{device: cpu, {TIMED}}}\n").engine.timed_steps
    assert timed.is_on and timed.cost == StepCost(0.01, 0.0, 0.0, 0.0, 1e-8)


def test_by_default_steps_are_computed() -> None:
    assert not parse("").engine.timed_steps.is_on


def test_a_bandwidth_alone_times_nothing() -> None:
    assert not parse("    engine: {timed_steps: {transfer_gb_per_s: 5}}\n").engine.timed_steps.is_on


@pytest.mark.parametrize(
    ("rest", "problem"),
    [
        (f"    engine: {{{TIMED}}}\n", "engine.device: auto would lie idle"),
        (f"    engine: {{device: cpu, {TIMED}}}\n    transfer: {{wire_format: int8}}\n", "transfer.wire_format: int8"),
        (
            f"    engine: {{device: cpu, {TIMED}}}\n    roles: {{decode: {{devices: 2, tensor_parallel: 2}}}}\n",
            "roles.decode.tensor_parallel: with engine.timed_steps each worker is one process",
        ),
        ("    engine: {timed_steps: {fixed_s: -1}}\n", "engine.timed_steps.fixed_s: must be at least 0"),
        ("    engine: {timed_steps: {fixd_s: 1}}\n", 'did you mean "fixed_s"'),
    ],
)
def test_what_cannot_be_timed_is_refused_by_its_key(rest: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(rest)
    assert problem in str(refused.value)


def test_a_worker_that_is_started_by_hand_refuses_the_same() -> None:
    settings = WorkerSettings.from_values(
        worker_id="w", role="decode", model_path=str(MODEL), device="cpu", fixed_s=0.01, wire_format="fp8"
    )
    with pytest.raises(ConfigError, match="wire_format: fp8"):
        resolve(settings)


def test_the_example_is_a_cluster_of_eight_timed_workers() -> None:
    config = load_config(ROOT / "deploy" / "timed" / "cluster.yaml")
    assert config.roles.prefill.num_workers == config.roles.decode.num_workers == 4
    assert config.engine.timed_steps.cost.of_prompt(1024, 0) == pytest.approx(0.1, rel=0.05)


def test_a_script_alone_turns_timed_steps_on_and_is_found_beside_the_file(tmp_path: Path) -> None:
    text = "    engine: {device: cpu, timed_steps: {script: says.yaml}}\n"
    (tmp_path / "cluster.yaml").write_text(f"metadata:\n  serving:\n    model: {{path: {MODEL}}}\n{text}")
    with pytest.raises(ConfigError, match=r"engine\.timed_steps\.script: no such file: .*says\.yaml"):
        load_config(tmp_path / "cluster.yaml")
    (tmp_path / "says.yaml").write_text("- say: Ay.\n")
    timed = load_config(tmp_path / "cluster.yaml").engine.timed_steps
    assert timed.is_on and timed.script == str(tmp_path / "says.yaml")


def test_workers_with_other_scripts_serve_other_models(tmp_path: Path) -> None:
    revisions = set()
    for number in range(2):
        (tmp_path / f"{number}.yaml").write_text(f"- say: '{number}'\n")
        settings = WorkerSettings.from_values(
            worker_id="w", role="decode", model_path=str(MODEL), device="cpu", script=str(tmp_path / f"{number}.yaml")
        )
        revisions.add(resolve(settings).weights_revision)
    assert len(revisions) == 2
