"""How each format of tool calls is read: from recorded outputs, cut in any way."""

from __future__ import annotations

from random import Random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_outputs import FORMATS_BY_NAME, RECORDED, TEXT_ALONE, THINKING_BY_NAME, TOOLS, Recorded, joined, parse

from cluster.config.choices import ToolFormatName
from router.tool_calls.output import OutputForm
from router.tool_calls.reader import Arguments, CallEnd, Text
from router.tool_calls.registry import TOOL_FORMATS, thinking_of, tool_format_of

ids = [f"{each.format}-{number}" for number, each in enumerate(RECORDED)]
ALL_OUTPUTS = [(each.form, each.output) for each in RECORDED] + [
    (OutputForm(TOOLS, FORMATS_BY_NAME[name]), output) for name, output in TEXT_ALONE if len(output) < 1000
]


@pytest.mark.parametrize("streams_calls", [False, True])
@pytest.mark.parametrize("recorded", RECORDED, ids=ids)
def test_a_recorded_output_is_read(recorded: Recorded, streams_calls: bool) -> None:
    found = joined(parse(recorded.form, [recorded.output], streams_calls=streams_calls))
    assert (found.calls, found.text, found.reasoning) == (recorded.calls, recorded.text, recorded.reasoning)
    assert not recorded.ids or found.ids == recorded.ids


@pytest.mark.parametrize(("name", "output"), TEXT_ALONE)
def test_what_is_no_call_is_the_text_that_was_written(name: str, output: str) -> None:
    found = joined(parse(OutputForm(TOOLS, FORMATS_BY_NAME[name]), [output]))
    assert (found.text, found.calls) == (output, [])


def test_every_format_is_recorded_and_may_be_configured() -> None:
    assert {"auto", *FORMATS_BY_NAME} == set(get_args(ToolFormatName))
    assert {each.format for each in RECORDED} == {each.name for each in TOOL_FORMATS}


@pytest.mark.parametrize("streams_calls", [False, True])
def test_a_cut_at_any_place_changes_nothing(streams_calls: bool) -> None:
    for form, output in ALL_OUTPUTS:
        whole = joined(parse(form, [output], streams_calls=streams_calls))
        singly = joined(parse(form, list(output), streams_calls=streams_calls))
        assert singly == whole
        for at in range(streams_calls, len(output), 2):
            assert joined(parse(form, [output[:at], output[at:]], streams_calls=streams_calls)) == whole


@given(st.sampled_from(ALL_OUTPUTS), st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=200, deadline=None)
def test_what_was_told_is_a_function_of_the_prefix(
    output: tuple[OutputForm, str], random: Random, streams_calls: bool
) -> None:
    form, text = output
    cuts = sorted(random.sample(range(len(text) + 1), min(len(text), random.randint(1, 6))))
    parser, other = form.parser(streams_calls=streams_calls), form.parser(streams_calls=streams_calls)
    by_pieces, singly, last = [], [], 0
    for cut in cuts:
        by_pieces += parser.feed(text[last:cut])
        for sign in text[last:cut]:
            singly += other.feed(sign)
        assert joined_text(by_pieces) == joined_text(singly)
        assert parser.is_thinking == other.is_thinking
        last = cut


def joined_text(parts: list[object]) -> list[tuple[str, str]]:
    """Neighbours of one kind are joined."""
    found: list[tuple[str, str]] = []
    for part in parts:
        kind, text = type(part).__name__, part[0] if part else ""  # type: ignore[index]
        if found and found[-1][0] == kind and kind not in ("CallBegin", "CallEnd"):
            text = found.pop()[1] + text
        found.append((kind, text))
    return found


@given(st.sampled_from(ALL_OUTPUTS), st.data())
@settings(max_examples=200, deadline=None)
def test_what_is_cut_off_or_damaged_is_read_without_an_error(
    output: tuple[OutputForm, str], data: st.DataObject
) -> None:
    form, text = output
    at = data.draw(st.integers(0, len(text)))
    wrong = text[:at] + data.draw(st.sampled_from(["", "\0", '"', "}", "</", "<tool_call>"])) + text[at + 1 :]
    for streams_calls in (False, True):
        parts = parse(form, [wrong], streams_calls=streams_calls)
        if not streams_calls:
            assert joined(parts).calls is not None
            assert len(joined(parts).calls) == sum(isinstance(part, CallEnd) for part in parts)


@pytest.mark.parametrize("recorded", RECORDED, ids=ids)
def test_arguments_come_in_pieces_where_they_are_streamed(recorded: Recorded) -> None:
    if recorded.calls and "where" in recorded.calls[0][1]:
        parts = parse(recorded.form, list(recorded.output), streams_calls=True)
        assert sum(isinstance(part, Arguments) for part in parts) > 20
    whole = joined(parse(recorded.form, [recorded.output]))
    assert joined(parse(recorded.form, list(recorded.output), streams_calls=True)) == whole


def test_text_is_told_as_it_comes() -> None:
    for tool_format in TOOL_FORMATS:
        if tool_format.name != "harmony":
            parser = OutputForm(TOOLS, tool_format).parser(streams_calls=True)
            assert parser.feed("Hello") == [Text("Hello")]


TEMPLATES = {
    "hermes": '<tools>{{ tools }}</tools> in <tool_call>{"name": n, "arguments": a}</tool_call> and \'</think>\'',
    "qwen3_coder": "{{ '<tool_call>\\n<function=' + tool_call.name + '>\\n<parameter=' + name + '>' }}{{ tools }}",
    "seed_oss": "{{ '<seed:tool_call>\\n<function=' + name }}<seed:think>{{ tools }}",
    "llama3_json": '{{ tools }} Respond with {"name": n, "parameters": dictionary of argument name and its value}.',
    "pythonic": "{{ tools }} in the format [func_name1(params_name1=params_value1), func_name2(params)]",
    "deepseek_v32": "{% set sign = '｜DSML｜' %}{{ '<' + sign + 'function_calls>' }}{{ message.tool_calls }}<think>",
    "deepseek_v4": "{% set sign = '｜DSML｜' %}{{ '<' + sign + 'tool_calls>' }}{{ message.tool_calls }}<think>",
    "minimax_m2": "{% set begin = '<minimax:tool_call>' %}{{ begin + '\\n<invoke name=' + name }}{{ tools }}<think>",
    "granite": "{{ tools }} respond only with <|tool_call|> followed by a JSON list of the tools used.",
    "lfm2": "{{ 'List of tools: <|tool_list_start|>[' + tools + ']<|tool_list_end|>' }}",
    "mistral": "[AVAILABLE_TOOLS] {{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS] [THINK]",
    "deepseek_v3": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + '\\n```json\\n' }}",
    "deepseek_v31": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' }}</think>",
    "glm": "<think>{{ '<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key><arg_value>{{ tools }}",
    "kimi": "{{ tools }}<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    "harmony": "{{ tools }}<|start|>assistant<|channel|>commentary to=functions.{{ name }} <|constrain|><|message|>",
    "json": "{% if tools %}Call with {{ tools | tojson }}{% endif %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_tells_its_format(name: str) -> None:
    found = tool_format_of(TEMPLATES[name])
    assert found is not None and found.name == name


def test_each_format_has_a_template_here() -> None:
    assert TEMPLATES.keys() == FORMATS_BY_NAME.keys()
    assert tool_format_of("{{ messages }}") is None


def test_a_template_tells_how_its_model_thinks() -> None:
    found = {name: thinking_of(template) for name, template in TEMPLATES.items()}
    names = {name: each.name for name, each in found.items() if each is not None}
    assert names == {
        "hermes": "think", "seed_oss": "seed", "mistral": "mistral", "deepseek_v31": "think", "deepseek_v32": "think",
        "deepseek_v4": "think", "minimax_m2": "think", "glm": "think", "harmony": "harmony",
    }  # fmt: skip


@pytest.mark.parametrize("name", THINKING_BY_NAME)
def test_thinking_is_told_apart_and_known_while_it_lasts(name: str) -> None:
    thinking = THINKING_BY_NAME[name]
    parser = OutputForm({}, None, thinking=thinking).parser(streams_calls=False)
    told, was_thinking = [], []
    rest = "<|start|>assistant<|channel|>final<|message|>B" if name == "harmony" else "\n\nB"
    for sign in f"{thinking.begin}A {thinking.end}{rest}":
        told += parser.feed(sign)
        was_thinking.append(parser.is_thinking)
    found = joined(told + parser.end())
    assert (found.reasoning, found.text) == ("A", "B")
    begin = len(thinking.begin)
    assert not any(was_thinking[: begin - 1]) and all(was_thinking[begin - 1 : begin + 2]) and not was_thinking[-1]


def test_an_id_that_was_there_is_left_out() -> None:
    recorded = next(each for each in RECORDED if each.format == "kimi")
    found = joined(parse(recorded.form, [recorded.output * 2]))
    assert found.ids == ("functions.weather:0", "")
