"""What the engine can do has the names that the configuration offers, no more and no fewer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args

import pytest

from cluster.config import choices
from cluster.pb import generation_pb2, worker_pb2
from engine.attention.registry import ATTENTION_BACKENDS
from engine.kv.pool import KV_CACHE_DTYPES
from engine.layers.ops import KERNELS_NAMES
from engine.models.config import DTYPES
from engine.models.reference import render_models
from engine.quantization.interface import weight_formats
from engine.sampling.params import SamplingParams


@pytest.mark.parametrize(
    ("offered", "implemented"),
    [
        (choices.AttentionName, ("auto", *ATTENTION_BACKENDS)),
        (choices.QuantizationName, tuple(weight_formats())),
        (choices.KvCacheDtypeName, KV_CACHE_DTYPES),
        (choices.KernelsName, KERNELS_NAMES),
        (choices.DtypeName, ("auto", *DTYPES)),
    ],
)
def test_the_choices_of_the_configuration_are_those_of_the_engine(
    offered: object, implemented: tuple[str, ...]
) -> None:
    assert sorted(get_args(offered)) == sorted(implemented)


def test_a_sampling_parameter_has_one_name_on_the_wire_and_in_the_engine() -> None:
    parts = (generation_pb2.SamplingParams, generation_pb2.StoppingCriteria, worker_pb2.Sampling)
    on_wire = {field.name for part in parts for field in part.DESCRIPTOR.fields}
    constraints = {field.name for field in generation_pb2.SamplingParams.DESCRIPTOR.oneofs_by_name["constraint"].fields}
    kept_by_the_router = {"bad_words", "clip_to_context", "stop", "include_stop_in_output", "ignore_eos"}
    parameters = on_wire - constraints - kept_by_the_router - {"params", "stopping", "grammar"}

    assert parameters == {field.name for field in dataclasses.fields(SamplingParams)} - {"constraint"}


def test_the_page_of_models_is_what_their_files_say() -> None:
    page = Path(__file__).parents[3] / "docs" / "models.md"
    assert page.read_text() == render_models(), "python -m engine.models.reference > docs/models.md"
