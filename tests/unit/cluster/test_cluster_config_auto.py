"""Numbers that may be left to the device: how they are written, and what they are once it is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.config.load import parse_config
from cluster.config.schema import EngineSection
from cluster.errors import ConfigError


def parse(tmp_path: Path, engine: str) -> EngineSection:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").touch()
    text = f"metadata:\n  serving:\n    model: {{path: m}}\n    engine: {{{engine}}}\n"
    return parse_config(text, str(tmp_path / "cluster.yaml")).engine


@pytest.mark.parametrize(("written", "value"), [("auto", "auto"), ("'auto'", "auto"), ("48", 48)])
def test_a_number_may_be_left_to_the_device(tmp_path: Path, written: str, value: int | str) -> None:
    assert parse(tmp_path, f"block_size: {written}").block_size == value


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("any", r"must be a whole number or auto \(got any\)"),
        ("'8'", r'must be a whole number or auto, without quotes \(got "8", a string\)'),
        ("null", "must be a whole number or auto; leave the key out for its default"),
        ("0", r"must be at least 1 \(got 0\)"),
    ],
)
def test_anything_else_is_refused_with_both_choices(tmp_path: Path, written: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.block_size: {problem}"):
        parse(tmp_path, f"block_size: {written}")


@pytest.mark.parametrize(
    ("engine", "num_seqs"),
    [
        ({}, 64),
        ({"device": "cpu"}, 64),
        ({"device": "cuda"}, 256),
        ({"device": "cuda", "max_num_batched_tokens": 100}, 100),
        ({"device": "cuda", "max_num_seqs": 8}, 8),
    ],
    ids=str,
)
def test_a_gpu_decodes_more_sequences_at_a_time_unless_a_number_is_given(engine: dict[str, Any], num_seqs: int) -> None:
    assert EngineSection(**engine).num_seqs == num_seqs
