"""Settings of one process travel as JSON and come back equal."""

from __future__ import annotations

import dataclasses
import json

import pytest

from cluster.settings import JsonSettings, RouterSettings, WorkerSettings

WORKER = WorkerSettings(
    worker_id="prefill-0", role="prefill", model_path="m", max_model_len=2048, threads=1, transfer_timeout_s=2.5
)
ROUTER = RouterSettings(model_path="m", workers=("prefill:p=127.0.0.1:1", "decode:d=127.0.0.1:2"), insecure=True)


@pytest.mark.parametrize("settings", [WORKER, ROUTER], ids=lambda settings: type(settings).__name__)
def test_settings_survive_the_round_trip_through_json(settings: JsonSettings) -> None:
    assert type(settings).from_json(settings.to_json()) == settings


@pytest.mark.parametrize("settings", [WORKER, ROUTER], ids=lambda settings: type(settings).__name__)
def test_the_json_is_flat_and_has_every_field(settings: JsonSettings) -> None:
    assert dataclasses.is_dataclass(settings)
    values = json.loads(settings.to_json())
    assert set(values) == {f.name for f in dataclasses.fields(settings)}
    assert not any(isinstance(value, dict) for value in values.values())


def test_an_unknown_key_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="worker_idd"):
        WorkerSettings.from_json('{"worker_idd": "x", "role": "prefill", "model_path": "m"}')


def test_a_required_key_that_is_missing_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="model_path"):
        RouterSettings.from_json("{}")


def test_settings_never_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        WORKER.role = "decode"  # type: ignore[misc]
    assert hash(ROUTER) == hash(dataclasses.replace(ROUTER))
