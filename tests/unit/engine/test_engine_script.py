"""A model whose answers are in a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.errors import CheckpointError, ConfigError
from engine.models.folder import read_model
from engine.sampling.constraint import Constrainer, Constraint
from engine.sampling.params import SampledToken, SampleRow, SamplingParams
from engine.script import Script, ScriptChooser
from engine.token_hash import TokenHash

MODEL = Path(__file__).parents[3] / "models" / "tiny-shakespeare"
EOS = 0
RULES = """
- when: weather in (Paris|Rome)
  say: <tool_call>{"city"}</tool_call>
- when: 21 °C
  say: It is warm.
"""


def script_of(folder: Path, text: str) -> str:
    (folder / "script.yaml").write_text(text, encoding="utf-8")
    return str(folder / "script.yaml")


@pytest.fixture
def chooser(tmp_path: Path) -> ScriptChooser:
    return ScriptChooser.from_files(script_of(tmp_path, RULES), MODEL, read_model(MODEL))


def encode(chooser: ScriptChooser, text: str) -> list[int]:
    return list(chooser._tokenizer.encode(text, add_special_tokens=False).ids)


def choose(
    chooser: ScriptChooser, prompt: list[int], output: list[int], constraint: Constraint | None = None
) -> SampledToken:
    row = SampleRow(SamplingParams(constraint=constraint, stop_token_ids=frozenset({EOS})), 0, tuple(prompt), output)
    state = TokenHash([*prompt, *output]).state
    states = torch.tensor([state - 2**64 if state >= 2**63 else state])
    return chooser.launch(states, [row]).read()[0]


def test_an_answer_is_followed_to_its_end_and_no_further(chooser: ScriptChooser) -> None:
    prompt, answer = encode(chooser, "How is the weather in Rome?"), encode(chooser, '<tool_call>{"city"}</tool_call>')
    output: list[int] = []
    for _ in range(len(answer) + 2):
        output.append(choose(chooser, prompt, output).token_id)
    assert output == [*answer, EOS, EOS]


def test_what_the_kv_does_not_hold_ends_the_answer(chooser: ScriptChooser) -> None:
    prompt = encode(chooser, "21 °C")
    row = SampleRow(SamplingParams(), 0, tuple(prompt), ())
    assert chooser.launch(torch.tensor([7]), [row]).read()[0].token_id == EOS


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("tell me", "other"),
        ("weather, then mood", "glad"),
        ("mood, then weather", "rain"),
        ("weather, mood, weather", "rain"),
        ("moodweather", "both"),
    ],
)
def test_the_rule_that_is_found_last_answers_and_of_several_the_first(tmp_path: Path, prompt: str, answer: str) -> None:
    rules = "[{say: other}, {when: mood, say: glad}, {when: moodweather, say: both}, {when: weather, say: rain}]"
    assert Script.from_file(script_of(tmp_path, rules)).answer(prompt) == answer


def test_a_prompt_without_a_rule_is_a_problem_of_its_row_that_shows_it(chooser: ScriptChooser) -> None:
    problem = choose(chooser, encode(chooser, "Who is there?"), []).problem
    assert "no rule of engine.timed_steps.script" in problem and "Who is there?" in problem


def test_a_grammar_that_the_answer_does_not_fit_is_a_problem_that_shows_where(chooser: ScriptChooser) -> None:
    constrainer = Constrainer.from_folder(MODEL, read_model(MODEL).vocab_size)
    assert constrainer is not None
    fits, breaks = (
        constrainer.new(json.dumps({"grammars": [{"lark_grammar": f"start: /{r}/"}]})) for r in (".*", "It")
    )
    prompt, said = encode(chooser, "21 °C"), encode(chooser, "It")
    try:
        assert chooser._text([choose(chooser, prompt, said, fits).token_id]) == " is"
        problem = choose(chooser, prompt, said, breaks).problem
        assert problem == "the script goes on with ' is', which may not follow here: ...'It'"
    finally:
        constrainer.close()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("when: x", "must be a list of rules"),
        ("[]", "must be a list of rules"),
        ("[{when: x}]", "rule 1: has no text under `say`"),
        ("[{say: a}, {say: b, wen: x}]", "rule 2: has no key 'wen'"),
        ("[{say: a, when: '('}]", "rule 1: `when` is not a regular expression: '('"),
        ("[{say: a, when: 21}]", "rule 1: `when` is not a regular expression: 21"),
        ("[", "is not YAML"),
    ],
)
def test_a_file_that_is_no_script_is_refused_by_its_rule(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Script.from_file(script_of(tmp_path, text))
    assert problem in str(refused.value)


def test_a_script_needs_the_tokenizer_and_an_end_of_sequence(tmp_path: Path) -> None:
    config, script = read_model(MODEL), script_of(tmp_path, RULES)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: a script needs a tokenizer"):
        ScriptChooser.from_files(script, tmp_path, config)
    with pytest.raises(ConfigError, match="names no eos_token_id"):
        ScriptChooser.from_files(script, MODEL, replace(config, eos_token_ids=()))
