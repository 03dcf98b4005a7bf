"""Published profiles: what is read of a few rows in their formats, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from cluster.step_cost import StepSize
from simulate.published import read_distserve, read_max_num_tokens, read_splitwise, tensor_parallel_sizes

HEAD = "model,hardware,prompt_size,batch_size,token_size,peak_power,prompt_time,token_time,e2e_time,tensor_parallel\n"
ROWS = """m,h100,512,1,128,1,60,20,5,8
m,h100,512,1,128,1,70,22,5,8
m,h100,512,1,128,1,90,21,5,8
m,h100,512,2,128,1,130,24,5,8
m,h100,1024,1,128,1,150,26,5,8
m,h100,2048,1,128,1,340,35,5,8
m,h100,2048,1,128,1,1,1,5,4
"""


def written(folder: Path, text: str) -> Path:
    (folder / "profile").write_text(text)
    return folder / "profile"


def test_times_are_medians_by_the_tokens_of_the_batch_and_lines_between_and_beyond(tmp_path: Path) -> None:
    curve = read_splitwise(written(tmp_path, HEAD + ROWS), "m", "h100", 8)
    assert curve.prompt_s.xs == (512, 1024, 2048)
    assert curve.prompt_s.ys == pytest.approx((0.070, 0.140, 0.340))
    assert curve.seconds(StepSize.of_prompt(1536)) == pytest.approx(0.240)
    assert curve.seconds(StepSize.of_prompt(4096)) == pytest.approx(0.740)
    assert curve.seconds(StepSize(num_sequences=1)) == pytest.approx(0.021 - 511 / 512 * 0.004)
    mixed = StepSize.of_prompt(1000) + StepSize(num_sequences=24)
    assert curve.seconds(mixed) == pytest.approx(1.1 * 0.140)
    assert curve.seconds(StepSize()) == 0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (HEAD + ROWS + "m,h100,512,1,128,1,nan,24,5,8\n", r":9: prompt_time must be a number above 0 \(got 'nan'"),
        (HEAD + "m,h100,512,1\n", r":2: tensor_parallel must be a number above 0 \(got None"),
        (HEAD + ",h100,512,1,128,1,1,1,1,8\n", ":2: model must be"),
        (
            HEAD + ROWS + "m,h100,4096,1,1,1,50,36,5,8\n",
            "falls: prompt_time is 340.0 ms at 2048 tokens and 50.0 ms at 4096",
        ),
        (HEAD + "m,h100,1,1,1,1,1,1,1,4\n", "no curve for m on h100 with tensor_parallel 8; it has m on h100 with 4"),
        ("", "it has $"),
    ],
)
def test_a_table_that_is_wrong_is_named_with_its_row_or_its_point(tmp_path: Path, text: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        read_splitwise(written(tmp_path, text), "m", "h100", 8)


ENTRY = {
    "decoding_large_small_bs_threshold": 4,
    "prefill": [10.0, 0.1, 1e-5],
    "decoding_smallbs": [20.0, 1e-3, 0.5],
    "decoding_largebs": [15.0, 2e-3, 1.0],
}


def test_coefficients_time_prompts_by_their_squares_and_sequences_by_their_kv(tmp_path: Path) -> None:
    file = written(tmp_path, json.dumps({"m": {"2": ENTRY, "1": ENTRY}}))
    curve = read_distserve(file, "m", 2)
    assert tensor_parallel_sizes(file, "m") == [1, 2]
    whole = curve.seconds(StepSize.of_prompt(1000))
    assert whole == pytest.approx(0.010 + 0.100 + 0.010)
    chunks = curve.seconds(StepSize.of_prompt(600)) + curve.seconds(StepSize.of_prompt(400, 600))
    assert chunks == pytest.approx(whole + 0.010), "the fixed part twice"
    two = StepSize.of_prompt(500) + StepSize.of_prompt(500)
    assert curve.seconds(two) == pytest.approx(0.010 + 0.100 + 0.005)
    assert curve.seconds(StepSize(num_sequences=3, num_kv_tokens=1000)) == pytest.approx(0.020 + 0.001 + 0.0015)
    assert curve.seconds(StepSize(num_sequences=4, num_kv_tokens=1000)) == pytest.approx(0.015 + 0.002 + 0.004)
    assert curve.seconds(two + StepSize(num_sequences=2)) == pytest.approx(0.115 + 0.001)
    assert curve.seconds(StepSize()) == 0


@pytest.mark.parametrize(
    ("document", "wanted"),
    [
        ("{", "is not JSON"),
        ("[]", "the whole must be an object"),
        ({"n": {}}, "has no model m; it has n"),
        ({"m": {"1": ENTRY}}, "has no tensor_parallel of m 2; it has 1"),
        ({"m": {"2": [1]}}, "m.2 must be an object"),
        ({"m": {"2": ENTRY | {"prefill": [1, 2]}}}, "m.2.prefill must be a list of three numbers"),
        ({"m": {"2": ENTRY | {"decoding_largebs": [1, 2, "3"]}}}, "m.2.decoding_largebs must be"),
        ({"m": {"2": ENTRY | {"decoding_large_small_bs_threshold": 0}}}, "must be a whole number above 0"),
        (
            {"m": {"2": ENTRY | {"prefill": [10.0, 0.1, -1e-4]}}},
            "m.2.prefill falls between prompts of 4096 and of 8192",
        ),
    ],
)
def test_a_profile_that_is_wrong_is_named_with_its_place(tmp_path: Path, document: object, wanted: str) -> None:
    text = document if isinstance(document, str) else json.dumps(document)
    with pytest.raises(ConfigError, match=wanted):
        read_distserve(written(tmp_path, text), "m", 2)


def test_kv_capacities_are_read_by_parallelism(tmp_path: Path) -> None:
    file = written(tmp_path, "model,tp,pp,max_num_tokens\nm,1,2,66144\nother,1,1,5\n")
    assert read_max_num_tokens(file, "m") == {(1, 2): 66144}
    with pytest.raises(ConfigError, match=":2: tp, pp and max_num_tokens"):
        read_max_num_tokens(written(tmp_path, "model,tp,pp,max_num_tokens\nm,1,two,66144\n"), "m")
