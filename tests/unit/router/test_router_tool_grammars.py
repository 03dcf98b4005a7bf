"""The grammar of each format: what a model writes that is held to it parses, and its arguments fit their schemas."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from random import Random

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from recorded_outputs import FORMATS_BY_NAME, THINKING_BY_NAME, Joined, joined, parse
from tokenizers import AddedToken, Tokenizer

from router.tool_calls.format import Tool
from router.tool_calls.output import OutputForm
from router.tool_calls.registry import THINKING, TOOL_FORMATS

MODEL = Path(__file__).parents[3] / "models/tiny-shakespeare/tokenizer.json"
MARKS = sorted(
    {mark for each in (*TOOL_FORMATS, *THINKING) for mark in each.marks if "<|channel|>analysis" not in mark}
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F\n", 'a"b']},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "is_metric": {"type": "boolean"},
        "day": {"type": "string", "pattern": "^(mon|tues)day$"},
        "note": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
        "where": {"$ref": "#/$defs/point"},
        "tags": {"type": "array", "items": {"enum": ["a", "]"]}, "maxItems": 3},
    },
    "required": ["city", "where", "days"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
TOOLS = {
    "weather": Tool("weather", SCHEMA, is_strict=True),
    "now": Tool("now", {"type": "object", "properties": {}, "additionalProperties": False}, is_strict=True),
    "week-day": Tool("week-day", {"properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}}}),
}
VALIDATORS = {name: jsonschema.Draft202012Validator(tool.schema()) for name, tool in TOOLS.items()}


class Vocabulary:
    """The bundled model's tokens, and some special ones."""

    def __init__(self, specials: Iterable[str]) -> None:
        tokenizer = Tokenizer.from_file(str(MODEL))
        tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in specials])
        self.tokenizer = tokenizer
        self.size = tokenizer.get_vocab_size()
        self.library = LLTokenizer(str(tokenizer.to_str()), n_vocab=self.size)
        self.special_ids = {mark: tokenizer.token_to_id(mark) for mark in specials}
        self._names = {token_id: mark.encode() for mark, token_id in self.special_ids.items()}
        first = [bytes(self.library.decode_bytes([each]))[:1] for each in range(self.size)]
        self._is_closing = np.array([each in (b'"', b"}", b"]", b")") for each in first])
        self._is_special = np.array([each in self._names for each in range(self.size)])

    def text(self, token_ids: Iterable[int]) -> str:
        pieces = (self._names.get(each) or bytes(self.library.decode_bytes([each])) for each in token_ids)
        return b"".join(pieces).decode(errors="replace")

    def walk(
        self, form: OutputForm, random: Random, content: str | None = None, *, long: int = 20, most: int = 300
    ) -> str:
        """A random output of the grammar, that looks for its end after `long` tokens; empty if it had none by `most`.
        Raises AssertionError where nothing may follow."""
        grammar = form.grammar(self.special_ids, content)
        assert grammar is not None
        matcher = LLMatcher(self.library, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        marks = (*form.marks, "\n</parameter>", "</parameter>", "</｜DSML｜parameter>")
        endings = [self.tokenizer.encode(mark).ids for mark in marks if "/" in mark or "end|" in mark]
        output, queue = list[int](), list[int]()
        end = self.library.eos_token
        while len(output) < most:
            packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            bits = np.unpackbits(packed, count=self.size, bitorder="little").view(np.bool_)
            allowed = bits.copy()
            assert allowed.any(), (self.text(output), matcher.get_error())
            may_end, allowed[end] = allowed[end], False
            if may_end and (random.random() < (0.7 if len(output) > long else 0.3) or not allowed.any()):
                return self.text(output)
            if random.random() < 0.3 and (allowed & self._is_special).any():
                allowed &= self._is_special
            elif len(output) > long and random.random() < 0.9:
                fits = [ids for ids in endings if matcher.validate_tokens(ids) == len(ids)]
                queue = queue or (list(random.choice(fits)) if fits else [])
                if (allowed & self._is_closing).any():
                    allowed &= self._is_closing
            chosen = queue.pop(0) if queue else -1
            if chosen < 0 or not bits[chosen]:
                chosen, queue = int(random.choice(np.flatnonzero(allowed))), []
            assert matcher.consume_token(chosen), matcher.get_error()
            output.append(chosen)
        return ""


@pytest.fixture(scope="module", params=["written out", "special"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(MARKS if request.param == "special" else ())


def check(form: OutputForm, output: str) -> Joined:
    """Parses an output in both ways, and validates its calls."""
    parts = joined(parse(form, [output]))
    assert joined(parse(form, list(output), streams_calls=True)) == parts, output
    for name, arguments in parts.calls:
        VALIDATORS[name].validate(arguments)
    return parts


@pytest.mark.parametrize("name", FORMATS_BY_NAME)
def test_required_outputs_are_calls(name: str, vocabulary: Vocabulary) -> None:
    thinking = THINKING_BY_NAME["harmony"] if name == "harmony" else None
    random, num_calls = Random(name), []
    form = OutputForm(TOOLS, FORMATS_BY_NAME[name], must_call=True, thinking=thinking)
    single = OutputForm(TOOLS, FORMATS_BY_NAME[name], must_call=True, is_single=True, thinking=thinking)
    for number in range(9):
        if output := vocabulary.walk(single if number % 3 == 0 else form, random):
            parts = check(form, output)
            assert parts.calls and not parts.text, output
            assert number % 3 or len(parts.calls) == 1, output
            num_calls.append(len(parts.calls))
    assert len(num_calls) > 1


@pytest.mark.parametrize("name", FORMATS_BY_NAME)
def test_free_outputs_are_text_and_calls(name: str, vocabulary: Vocabulary) -> None:
    random, num_calls, num_texts = Random(name), 0, 0
    thinking = THINKING_BY_NAME["harmony" if name == "harmony" else "think"]
    tool_format = FORMATS_BY_NAME[name]
    for number in range(8):
        form = OutputForm(
            TOOLS,
            tool_format,
            thinking=None if number % 2 and name != "harmony" else thinking,
            is_thinking=number % 4 == 0,
            most_thinking_tokens=(None, 0, 1, 5)[number % 4],
        )
        output = vocabulary.walk(form, random, long=8)
        if output:
            parts = check(form, output)
            num_calls += len(parts.calls)
            num_texts += bool(parts.text)
    assert num_texts or num_calls


@pytest.mark.parametrize("name", THINKING_BY_NAME)
def test_thinking_ends_within_its_budget(name: str, vocabulary: Vocabulary) -> None:
    """Also where the budget ends behind the first letters of the end mark. What may follow is asked for after each
    token, as workers do: with a `stop` in the grammar the library panicked within the mark."""
    thinking, random, num_begun = THINKING_BY_NAME[name], Random(name), 0
    content = json.dumps(
        {"grammars": [{"json_schema": {"type": "object", "properties": {}, "additionalProperties": False}}]}
    )
    form = OutputForm({}, None, thinking=thinking, is_thinking=True, most_thinking_tokens=3)
    grammar = form.grammar(vocabulary.special_ids, content)
    assert grammar is not None
    matcher = LLMatcher(vocabulary.library, grammar, log_level=0)
    token_ids = vocabulary.tokenizer.encode("a b").ids[:2]
    final = "<|start|>assistant<|channel|>final<|message|>" if name == "harmony" else ""
    token_ids += vocabulary.tokenizer.encode(f"{thinking.end}{final}{{}}").ids
    for token_id in token_ids:
        matcher.compute_bitmask()
        assert matcher.consume_token(token_id), matcher.get_error()
    assert matcher.is_accepting()
    assert joined(parse(form, [vocabulary.text(token_ids)])).text == "{}"
    for most in (0, 1, 4):
        form = OutputForm({}, None, thinking=thinking, is_thinking=True, most_thinking_tokens=most)
        matcher = LLMatcher(vocabulary.library, str(form.grammar(vocabulary.special_ids, content)), log_level=0)
        assert most - 1 <= matcher.try_consume_tokens(token_ids[:1] * 9) <= most
        for text in (None, content):
            output = vocabulary.walk(form, random, text, long=8)
            parts = check(form, output)
            num_begun += bool(parts.reasoning)
            assert text is None or not parts.text or json.loads(parts.text) == {}
    assert num_begun


@pytest.mark.parametrize("name", FORMATS_BY_NAME)
def test_structured_output_is_beside_calls_and_after_thinking(name: str, vocabulary: Vocabulary) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    content = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": r"[ \n]{1,32}"})
    thinking = THINKING_BY_NAME["harmony" if name == "harmony" else "think"]
    random, num_calls, num_texts, num_thoughts = Random(name), 0, 0, 0
    for number in range(60):
        if num_calls and num_texts and num_thoughts:
            return
        form = OutputForm(TOOLS, FORMATS_BY_NAME[name], thinking=thinking, is_thinking=number % 2 == 0)
        output = vocabulary.walk(form, random, content, long=8)
        if output:
            parts = check(form, output)
            num_calls += len(parts.calls)
            num_thoughts += bool(parts.reasoning)
            if parts.text:
                num_texts += 1
                jsonschema.validate(json.loads(parts.text), schema)
            assert parts.calls or parts.text
    pytest.fail(f"{num_calls} calls, {num_texts} texts, {num_thoughts} thoughts")


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "pythonic", "deepseek_v32", "lfm2"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"anyOf": [{"required": ["a"]}]},
        {"properties": {"a<>(\n": {"type": "string"}}},
        {"properties": {"a": 5}},
        {"required": ["a"], "additionalProperties": False},
    ],
)
def test_a_schema_that_cannot_be_written_is_refused(name: str, parameters: dict[str, object]) -> None:
    form = OutputForm({"f": Tool("f", parameters, is_strict=True)}, FORMATS_BY_NAME[name])
    with pytest.raises(ValueError, match="f"):
        form.grammar({})


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "pythonic", "deepseek_v32", "lfm2"])
@pytest.mark.parametrize("wrong", [5, [5], {"a": 5}, "a", None, [[]], True])
def test_a_malformed_schema_is_no_error_of_the_format(name: str, wrong: object) -> None:
    """The compiler of grammars names what is wrong with it."""
    for keyword in ("type", "enum", "anyOf", "allOf", "$ref", "const"):
        parameters = {"properties": {"a": {keyword: wrong}}, "required": wrong}
        form = OutputForm({"f": Tool("f", parameters)}, FORMATS_BY_NAME[name])
        assert form.grammar({})
        for output in (
            "<tool_call><function=f><parameter=a>x</parameter>",
            "<tool_call>f<arg_key>a</arg_key><arg_value>x",
            '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">x',
            "<|tool_call_start|>[f(a='x'",
        ):
            parse(form, [output])


@pytest.mark.parametrize("text", ["", "Less < more, then <<"])
def test_a_mark_with_a_special_token_inside_is_that_token_behind_any_text(text: str) -> None:
    vocabulary = Vocabulary(["｜DSML｜"])
    arguments = {"city": ("true", "Ro</me><"), "days": ("false", "2"), "where": ("false", '{"x": 1}')}
    given = "".join(
        f'<｜DSML｜parameter name="{name}" string="{is_text}">{value}</｜DSML｜parameter>\n'
        for name, (is_text, value) in arguments.items()
    )
    call = f'<｜DSML｜invoke name="weather">\n{given}</｜DSML｜invoke>'
    output = f"{text}<｜DSML｜function_calls>\n{call}\n</｜DSML｜function_calls>"
    form = OutputForm(TOOLS, FORMATS_BY_NAME["deepseek_v32"])
    token_ids = vocabulary.tokenizer.encode(output).ids
    assert token_ids.count(vocabulary.special_ids["｜DSML｜"]) == output.count("｜DSML｜")
    grammar = form.grammar(vocabulary.special_ids)
    assert grammar is not None
    matcher = LLMatcher(vocabulary.library, grammar, log_level=0)
    assert matcher.consume_tokens(token_ids) and matcher.is_accepting(), matcher.get_error()
    found = check(form, output)
    assert (found.text, found.calls[0][1]["city"]) == (text, "Ro</me><")
