"""Outputs of models, written by hand from the documentation of each format, with what they hold."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from router.tool_calls.format import Tool
from router.tool_calls.output import OutputForm
from router.tool_calls.reader import Arguments, CallBegin, CallEnd, Part, Reasoning, Text
from router.tool_calls.registry import THINKING, TOOL_FORMATS

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "is_metric": {"type": "boolean"},
        "where": {"type": "object"},
        "note": {"type": ["string", "null"]},
    },
    "required": ["city"],
}
TOOLS = {"weather": Tool("weather", WEATHER), "now": Tool("now", {"type": "object", "properties": {}})}
THINKING_BY_NAME = {each.name: each for each in THINKING}
FORMATS_BY_NAME = {each.name: each for each in TOOL_FORMATS}


@dataclass(frozen=True)
class Recorded:
    """An output and its parts."""

    format: str
    output: str
    calls: list[tuple[str, Any]]
    text: str = ""
    reasoning: str = ""
    thinking: str = ""
    ids: tuple[str, ...] = ()

    @property
    def form(self) -> OutputForm:
        thinking = (
            THINKING_BY_NAME["harmony" if self.format == "harmony" else self.thinking]
            if (self.thinking or self.format == "harmony")
            else None
        )
        return OutputForm(TOOLS, FORMATS_BY_NAME[self.format], thinking=thinking)


@dataclass
class Joined:
    """Parts of one output, joined."""

    text: str
    reasoning: str
    calls: list[tuple[str, Any]]
    ids: tuple[str, ...]


def parse(form: OutputForm, pieces: list[str], *, streams_calls: bool = False) -> list[Part]:
    parser = form.parser(streams_calls=streams_calls)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return parts + parser.end()


def joined(parts: list[Part]) -> Joined:
    """Raises AssertionError where pieces of calls are out of order; a call that has no end is left out."""
    text, reasoning, calls, ids = "", "", [], []
    name, arguments = "", ""
    for part in parts:
        match part:
            case Text(piece):
                text += piece
            case Reasoning(piece):
                reasoning += piece
            case CallBegin():
                name, arguments = part.name, ""
                ids.append(part.id)
            case Arguments(piece):
                assert name
                arguments += piece
            case CallEnd():
                assert name
                calls.append((name, json.loads(arguments)))
                name = ""
    return Joined(text, reasoning, calls, tuple(ids))


_NESTED = {"city": 'a "b" {c} </d> \\ é', "where": {"lat": [1.5, -2e3], "in": {"x": "]}"}}, "note": None}
_NESTED_JSON = r'{"city": "a \"b\" {c} </d> \\ \u00e9", "where": {"lat": [1.5, -2e3], "in": {"x": "]}"}}, "note": null}'
_ROME, _ROME_JSON = {"city": "Rome", "days": 2}, '{"city": "Rome", "days": 2}'
_TWO = [("weather", _ROME), ("now", {})]
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _fenced(name: str, arguments: str) -> str:
    return f"{_CALL}function{_SEPARATOR}{name}\n```json\n{arguments}\n```{_CALL_END}"


def _kimi(name: str, number: int, arguments: str) -> str:
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def _harmony(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


_XML_NESTED = (
    '<function=weather>\n<parameter=city>\na "b" {c} </d> \\ é\n</parameter>\n'
    '<parameter=where>\n{"lat": [1.5, -2e3], "in": {"x": "]}"}}\n</parameter>\n'
    "<parameter=note>\nnull\n</parameter>\n</function>\n"
)
_XML_ROME = "<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n"
_GLM_NESTED = (
    '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>a "b" {c} </d> \\ é</arg_value>\n'
    '<arg_key>where</arg_key>\n<arg_value>{"lat": [1.5, -2e3], "in": {"x": "]}"}}</arg_value>\n'
    "<arg_key>note</arg_key>\n<arg_value>null</arg_value>\n</tool_call>"
)
_PYTHON_NESTED = (
    r"""[weather(city='a "b" {c} </d> \\ \xe9', where={"lat": [1.5, -2e3], 'in': {'x': "]}"}}, note=None)]"""
)


def _invoked(*calls: str, sign: str = "", section: str = "minimax:tool_call") -> str:
    """`calls` are written with ~ for the sign of each mark."""
    return f"<{sign}{section}>\n".replace("~", sign) + "".join(calls).replace("~", sign) + f"</{sign}{section}>"


_INVOKE_ROME = (
    '<~invoke name="weather">\n<~parameter name="city"%s>Rome</~parameter>\n<~parameter name="days"%s>2</~parameter>\n'
    "</~invoke>\n"
)
_INVOKE_NESTED = (
    '<~invoke name="weather">\n<~parameter name="city"%s>a "b" {c} </d> \\ é</~parameter>\n<~parameter name="where"%s>'
    '{"lat": [1.5, -2e3], "in": {"x": "]}"}}</~parameter>\n<~parameter name="note"%s>null</~parameter>\n</~invoke>\n'
)
_INVOKE_NOW = '<~invoke name="now">\n</~invoke>\n'
_TEXT, _VALUE = ' string="true"', ' string="false"'
_DSML = {"sign": "｜DSML｜", "section": "function_calls"}

RECORDED = [
    Recorded("hermes", "Let me see.\n" + _hermes("weather", _NESTED_JSON), [("weather", _NESTED)], "Let me see."),
    Recorded("hermes", f"{_hermes('weather', _ROME_JSON)}\n{_hermes('now', '{}')}\nDone.", _TWO, "Done."),
    Recorded(
        "hermes",
        f"<think>\nSunny? <tool_call>\n</think>\n\n{_hermes('now', '{}')}",
        [("now", {})],
        reasoning="Sunny? <tool_call>",
        thinking="think",
    ),
    Recorded("hermes", '<tool_call>{"arguments":{"city":"Rome","days":2},"name":"weather"}</tool_call>', _TWO[:1]),
    Recorded("hermes", '<tool_call>{"name": "now"}</tool_call>', _TWO[1:]),
    Recorded(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "a\n\tb"}}</tool_call>',
        [("weather", {"city": "a\n\tb"})],
    ),
    Recorded("qwen3_coder", f"I look.\n\n<tool_call>\n{_XML_NESTED}</tool_call>", [("weather", _NESTED)], "I look."),
    Recorded(
        "qwen3_coder",
        f"<tool_call>\n{_XML_ROME}</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        _TWO,
    ),
    Recorded(
        "qwen3_coder",
        "<tool_call><function=weather><parameter=city>\n\ntwo\nlines\n\n</parameter><parameter=is_metric>True</parameter>"
        "<parameter=note>12 o'clock</parameter></function></tool_call>",
        [("weather", {"city": "\ntwo\nlines\n", "is_metric": True, "note": "12 o'clock"})],
    ),
    Recorded(
        "seed_oss",
        f"<seed:think>Rome.</seed:think><seed:tool_call>\n{_XML_ROME}</seed:tool_call>",
        _TWO[:1],
        reasoning="Rome.",
        thinking="seed",
    ),
    Recorded("llama3_json", '{"name": "weather", "parameters": ' + _NESTED_JSON + "}", [("weather", _NESTED)]),
    Recorded(
        "llama3_json",
        '<|python_tag|>{"name": "weather", "parameters": ' + _ROME_JSON + '}; {"name": "now", "parameters": {}}',
        _TWO,
    ),
    Recorded("llama3_json", 'I call.<|python_tag|>{"name": "now", "parameters": {}} So.', [("now", {})], "I call.So."),
    Recorded("pythonic", _PYTHON_NESTED, [("weather", _NESTED)]),
    Recorded("pythonic", '[weather(city="Rome", days=2), now()]', _TWO),
    Recorded(
        "pythonic",
        "<|python_start|>[weather(city='it\\'s\\n\"so\"\\u00e9\\U0001F600', is_metric=True)]<|python_end|>",
        [("weather", {"city": 'it\'s\n"so"é😀', "is_metric": True})],
    ),
    Recorded(
        "mistral",
        'Yes. [TOOL_CALLS] [{"name": "weather", "arguments": ' + _NESTED_JSON + ', "id": "VvvODy9mT"}]',
        [("weather", _NESTED)],
        "Yes.",
    ),
    Recorded(
        "mistral",
        '[TOOL_CALLS][{"name": "weather", "arguments": ' + _ROME_JSON + '}, {"name": "now", "arguments": {}}]',
        _TWO,
    ),
    Recorded(
        "mistral",
        f"[TOOL_CALLS]weather[CALL_ID]abcDEF123[ARGS]{_ROME_JSON}[TOOL_CALLS]now[ARGS]{{}}",
        _TWO,
        ids=("abcDEF123", ""),
    ),
    Recorded(
        "mistral",
        f"[THINK]Rome [TOOL_CALLS] it is.[/THINK]On it.[TOOL_CALLS]weather[ARGS]{_NESTED_JSON}",
        [("weather", _NESTED)],
        "On it.",
        "Rome [TOOL_CALLS] it is.",
        "mistral",
    ),
    Recorded(
        "deepseek_v3", f"Sure.\n{_CALLS}{_fenced('weather', _NESTED_JSON)}{_CALLS_END}", [("weather", _NESTED)], "Sure."
    ),
    Recorded("deepseek_v3", f"{_CALLS}{_fenced('weather', _ROME_JSON)}\n{_fenced('now', '{}')}{_CALLS_END}", _TWO),
    Recorded(
        "deepseek_v31",
        f"Hm.</think>Ok{_CALLS}{_CALL}weather{_SEPARATOR}{_NESTED_JSON}{_CALL_END}{_CALLS_END}",
        [("weather", _NESTED)],
        "Hm.</think>Ok",
        thinking="think",
    ),
    Recorded(
        "deepseek_v31",
        f"{_CALLS}{_CALL}weather{_SEPARATOR}{_ROME_JSON}{_CALL_END}{_CALL}now{_SEPARATOR}{{}}{_CALL_END}{_CALLS_END}",
        _TWO,
    ),
    Recorded(
        "deepseek_v32",
        "Both.</think>So.\n\n" + _invoked(_INVOKE_ROME % (_TEXT, _VALUE), _INVOKE_NOW, **_DSML) + "<｜end",
        _TWO,
        "Both.</think>So.<｜end",
        thinking="think",
    ),
    Recorded("deepseek_v32", _invoked(_INVOKE_NESTED % (_TEXT, _VALUE, _VALUE), **_DSML), [("weather", _NESTED)]),
    Recorded(
        "deepseek_v32",
        _invoked(
            '<~invoke name="weather"><~parameter name="note" string="true">null</~parameter>'
            '<~parameter name="is_metric" string="true">true</~parameter></~invoke>',
            **_DSML,
        ),
        [("weather", {"note": "null", "is_metric": True})],
    ),
    Recorded(
        "deepseek_v4",
        "<think>Rome.</think>" + _invoked(_INVOKE_ROME % (_TEXT, _VALUE), sign="｜DSML｜", section="tool_calls"),
        _TWO[:1],
        reasoning="Rome.",
        thinking="think",
    ),
    Recorded("minimax_m2", "Look.\n" + _invoked(_INVOKE_NESTED % ("", "", "")), [("weather", _NESTED)], "Look."),
    Recorded(
        "minimax_m2",
        "<think>\nTwo.\n</think>\n" + _invoked(_INVOKE_ROME % ("", ""), _INVOKE_NOW),
        _TWO,
        reasoning="Two.",
        thinking="think",
    ),
    Recorded("granite", f'<|tool_call|>[{{"name": "weather", "arguments": {_NESTED_JSON}}}]', [("weather", _NESTED)]),
    Recorded(
        "granite",
        f'I call. <|tool_call|> [{{"name": "weather", "arguments": {_ROME_JSON}}}, {{"name": "now"}}]',
        _TWO,
        "I call.",
    ),
    Recorded("lfm2", f"<|tool_call_start|>{_PYTHON_NESTED}<|tool_call_end|>", [("weather", _NESTED)]),
    Recorded(
        "lfm2",
        "Sure. <|tool_call_start|>[weather(city='Rome', days=2), now()]<|tool_call_end|>I look at both.",
        _TWO,
        "Sure.I look at both.",
    ),
    Recorded("lfm2", '<|tool_call_start|>[{"name": "now", "arguments": {}}]<|tool_call_end|>', [("now", {})]),
    Recorded("glm", f"Well:\n{_GLM_NESTED}", [("weather", _NESTED)], "Well:"),
    Recorded(
        "glm",
        "<think>Both.</think>\n<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key>"
        "<arg_value>2</arg_value></tool_call><tool_call>now\n</tool_call>",
        _TWO,
        reasoning="Both.",
        thinking="think",
    ),
    Recorded(
        "kimi",
        f"A.<|tool_calls_section_begin|>{_kimi('weather', 0, _NESTED_JSON)}<|tool_calls_section_end|>",
        [("weather", _NESTED)],
        "A.",
        ids=("functions.weather:0",),
    ),
    Recorded(
        "kimi",
        f"<|tool_calls_section_begin|>{_kimi('weather', 3, _ROME_JSON)}\n{_kimi('now', 4, '{}')}"
        "<|tool_calls_section_end|>",
        _TWO,
        ids=("functions.weather:3", "functions.now:4"),
    ),
    Recorded(
        "harmony",
        f"<|channel|>analysis<|message|>Rome <b>.<|end|><|start|>assistant{_harmony('weather', _NESTED_JSON)}<|call|>",
        [("weather", _NESTED)],
        reasoning="Rome <b>.",
    ),
    Recorded(
        "harmony",
        "<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant"
        f"{_harmony('weather', _ROME_JSON)}<|call|><|start|>assistant{_harmony('now', '{}')}",
        _TWO,
        "I ask.",
    ),
    Recorded("harmony", f" to=functions.weather<|channel|>commentary json<|message|>{_ROME_JSON}<|call|>", _TWO[:1]),
    Recorded(
        "harmony",
        "<|channel|>analysis<|message|>A.<|end|><|start|>assistant<|channel|>analysis<|message|>B.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Sunny.<|return|>",
        [],
        "Sunny.",
        "A.\n\nB.",
    ),
    Recorded("json", '{"name": "weather", "arguments": ' + _NESTED_JSON + "}", [("weather", _NESTED)]),
    Recorded(
        "json", f' [{{"name": "weather", "parameters": {_ROME_JSON}}},\n {{"arguments": {{}}, "name": "now"}}]\n', _TWO
    ),
    Recorded("json", '{"name": "weather", "arguments": {"city": "\\ud83d\\ude00"}}', [("weather", {"city": "😀"})]),
]
"""Whole calls."""

_HERMES = _hermes("weather", _ROME_JSON)
TEXT_ALONE = [
    ("hermes", "No call."),
    ("hermes", "a <tool_call b < c </tool_call>"),
    ("hermes", 'See:\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'),
    ("hermes", _HERMES.replace("weather", "other")),
    ("hermes", _HERMES.replace('"days": 2', '"days": two')),
    ("hermes", _HERMES.replace("</tool_call>", "</tool>")),
    ("hermes", _HERMES.replace("2", "NaN")),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{}"}</tool_call>'),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nRome"),
    ("qwen3_coder", f"<tool_call>\n{_XML_ROME.replace('weather', 'other')}</tool_call>"),
    ("qwen3_coder", f"<tool_call>\n{_XML_ROME.replace('2', 'two')}</tool_call>"),
    ("qwen3_coder", f"<tool_call>\n{_XML_ROME.replace('=days', '=city')}</tool_call>"),
    ("llama3_json", '{"name": "other", "parameters": {}}'),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", ' {"name": "weather", "parameters": {"city": '),
    ("llama3_json", 'The call is {"name": "now", "parameters": {}}'),
    ("pythonic", "[1] says so."),
    ("pythonic", "[weather('Rome')]"),
    ("pythonic", "[weather(city=Rome)]"),
    ("pythonic", "[weather(city='Rome', city='Oslo')]"),
    ("pythonic", "[other(city='Rome')]"),
    ("pythonic", "[weather(city='Ro"),
    ("pythonic", "[weather(city='\\N{DASH}')]"),
    ("pythonic", "now()"),
    ("mistral", "[TOOL_CALLS]other[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]weather[ARGS]{"),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": 1,}}]'),
    ("deepseek_v3", f"{_CALLS}{_fenced('weather', 'none')}{_CALLS_END}"),
    ("deepseek_v31", f"{_CALLS}{_CALL}weather{_SEPARATOR}{{}}"),
    ("glm", _GLM_NESTED.replace("</arg_key>", "</key>")),
    ("glm", "<tool_call>weather\n<arg_key>city</arg_key>\n"),
    ("kimi", f"<|tool_calls_section_begin|>{_kimi('other', 0, '{}')}<|tool_calls_section_end|>"),
    ("deepseek_v32", _invoked(_INVOKE_ROME % (_TEXT, _VALUE), **_DSML).replace("weather", "other")),
    ("deepseek_v32", _invoked(_INVOKE_ROME % (_TEXT, ' string="no"'), **_DSML)),
    ("deepseek_v32", "a <｜DSML｜function_calls> b"),
    ("minimax_m2", _invoked(_INVOKE_ROME % ("", "")).replace(">2<", ">two<")),
    ("minimax_m2", _invoked(_INVOKE_ROME % ("", "")).partition("</parameter>\n</invoke>")[0]),
    ("granite", '<|tool_call|>[{"name": "other", "arguments": {}}]'),
    ("granite", "<|tool_call|>{}"),
    ("lfm2", "<|tool_call_start|>[other(city='Rome')]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[weather('Rome')]"),
    ("json", '{"name": "weather", "arguments": {"city": "Rome"'),
    ("json", '[{"answer": 1}, {"name": "now", "arguments": {}}]'),
    ("json", '{"name": ' * 3000),
]
"""What is broken off or garbled, or calls nothing that is there: the text is what was written."""
