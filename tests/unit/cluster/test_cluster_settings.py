"""Settings of one process travel as JSON and come back equal."""

from __future__ import annotations

import dataclasses
import json

import pytest

from cluster.settings import JsonSettings, RouterSettings, WorkerSettings

WORKER = WorkerSettings.from_values(
    worker_id="prefill-0", role="prefill", model_path="m", max_model_len=2048, threads=1, transfer_timeout_s=2.5
)
ROUTER = RouterSettings.from_values(
    model_path="m", workers=("prefill:p=127.0.0.1:1", "decode:d=127.0.0.1:2"), insecure=True
)


@pytest.mark.parametrize("settings", [WORKER, ROUTER], ids=lambda settings: type(settings).__name__)
def test_settings_survive_the_round_trip_through_json(settings: JsonSettings) -> None:
    assert type(settings).from_json(settings.to_json()) == settings


@pytest.mark.parametrize("settings", [WORKER, ROUTER], ids=lambda settings: type(settings).__name__)
def test_the_json_has_every_field_and_every_value_of_its_sections(settings: JsonSettings) -> None:
    assert dataclasses.is_dataclass(settings)
    values = json.loads(settings.to_json())
    assert set(values) == {f.name for f in dataclasses.fields(settings)}
    sections = {name: value for name, value in values.items() if isinstance(value, dict)}
    assert {"model", "engine", "transfer"} <= set(sections)
    for name, section in sections.items():
        assert set(section) == {f.name for f in dataclasses.fields(getattr(settings, name))}


def test_a_short_name_stands_for_the_value_of_one_section() -> None:
    assert (WORKER.model.path, WORKER.model.max_model_len) == ("m", 2048)
    assert (WORKER.engine.threads, WORKER.transfer.timeout_s) == (1, 2.5)
    changed = WORKER.with_values(transfer_timeout_s=4.0, tp_rank=1, internal_tls_cert="c")
    assert (changed.transfer.timeout_s, changed.tp_rank, changed.internal_tls.cert) == (4.0, 1, "c")
    assert dataclasses.replace(changed, transfer=WORKER.transfer, tp_rank=0, internal_tls=WORKER.internal_tls) == WORKER


def test_a_name_that_two_sections_have_needs_that_of_the_section() -> None:
    assert RouterSettings.from_values(model_path="m", tls_cert="c").tls.cert == "c"
    with pytest.raises(TypeError, match="'cert'"):
        RouterSettings.from_values(model_path="m", cert="c")


def test_an_unknown_key_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="worker_idd"):
        WorkerSettings.from_values(worker_idd="x", role="prefill", model={"path": "m"})
    with pytest.raises(TypeError, match="pathh"):
        WorkerSettings.from_values(worker_id="x", role="prefill", model={"pathh": "m"})


def test_keys_of_a_later_build_are_left_out_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    given = json.loads(WORKER.to_json()) | {"of_later": 1}
    given["engine"]["later_key"] = {"x": 2}
    assert WorkerSettings.from_json(json.dumps(given)) == WorkerSettings.from_json(json.dumps(given)) == WORKER
    changed = json.dumps({"slo": {"ttft_ms": 250.0, "later_slo": 1}, "a_section": {"x": 1}})
    assert WORKER.with_run_time(changed).slo.ttft_ms == 250.0
    named = [record.args for record in caplog.records]
    assert sorted(map(str, named)) == ["('engine.later_key',)", "('of_later',)", "('slo.later_slo',)"]


def test_a_required_key_that_is_missing_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="model"):
        RouterSettings.from_json("{}")


def test_settings_never_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        WORKER.role = "decode"  # type: ignore[misc]
    assert hash(ROUTER) == hash(dataclasses.replace(ROUTER))
