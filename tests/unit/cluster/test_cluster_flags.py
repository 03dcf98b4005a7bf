"""Flags of the plain programs."""

from __future__ import annotations

import pytest

from cluster.settings import RouterSettings, WorkerSettings, parse_flags


def test_every_field_is_a_flag() -> None:
    flags = ["--worker-id", "decode-0", "--role", "decode", "--model-path", "m", "--tp-size", "2", "--no-insecure"]
    settings = parse_flags(WorkerSettings, "python -m worker", flags)
    assert (settings.worker_id, settings.tp_size, settings.insecure) == ("decode-0", 2, False)


def test_flags_override_settings_given_as_json() -> None:
    json_text = RouterSettings.from_values(model_path="m", port=1).to_json()
    settings = parse_flags(RouterSettings, "python -m router", ["--settings", json_text, "--port", "2"])
    assert (settings.model.path, settings.router.port) == ("m", 2)


@pytest.mark.parametrize(("given", "value"), [("auto", "auto"), ("32", 32)])
def test_a_number_may_be_left_to_the_device(given: str, value: int | str) -> None:
    flags = ["--worker-id", "decode-0", "--role", "decode", "--model-path", "m", "--block-size", given]
    assert parse_flags(WorkerSettings, "python -m worker", flags).engine.block_size == value


def test_lists_are_given_one_flag_each() -> None:
    flags = ["--model-path", "m", "--workers", "a", "--workers", "b"]
    assert parse_flags(RouterSettings, "python -m router", flags).workers == ("a", "b")


@pytest.mark.parametrize(
    "flags",
    [
        ["--nonsense", "1"],
        ["--port", "x", "--model-path", "m"],
        [],
        ["--settings", '{"colour": 1}'],
        ["--settings", "{"],
        ["--model-path", "m", "--block-size", "any"],
    ],
)
def test_wrong_flags_end_with_usage(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_flags(RouterSettings, "python -m router", flags)
    assert ended.value.code == 2
    assert "usage: python -m router" in capsys.readouterr().err
