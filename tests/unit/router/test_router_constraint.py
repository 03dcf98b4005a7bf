"""Constraints of the contract become grammars, and mistakes in them are named by their field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from cluster_fixture import BUNDLED_MODEL

from cluster.errors import InvalidRequest
from cluster.grammar import GrammarProcesses
from cluster.pb import generation_pb2 as pb
from router.api.call import ValidatedRequest
from router.api.grammar import LONGEST_REGEX, MOST_CHOICES, check_bounds
from router.api.served_model import ServedModel
from router.api.tokenizer import Tokenizer
from router.api.validate import validate

VOCAB_SIZE = 1024
MODEL = ServedModel("m", VOCAB_SIZE, 256, 16, (0,))
TOKENIZER = Tokenizer.from_folder(BUNDLED_MODEL)
PROCESSES = GrammarProcesses(lambda: TOKENIZER.definition, VOCAB_SIZE)


@pytest.fixture(scope="module", autouse=True)
def ended_processes() -> Iterator[None]:
    yield
    PROCESSES.close()


def try_grammar(kind: str, text: str) -> str:
    check_bounds(kind, text)
    return PROCESSES.compile(text, kind).grammar


def check(model: ServedModel = MODEL, stopping: Any = None, **sampling: Any) -> ValidatedRequest:
    spec = pb.GenerationSpec(text="hi", sampling=pb.SamplingParams(**sampling), stopping=stopping)
    return validate(spec, model, lambda _: (1, 2), try_grammar=try_grammar, fresh_seed=1)


def takes(grammar: str, text: str) -> bool:
    """Whether an output may end behind this text."""
    process = PROCESSES.compile(grammar)
    slot = process.begin()
    assert slot is not None
    process.ask(slot, 0, TOKENIZER.encode(text, add_special_tokens=False).token_ids, MODEL.eos_token_ids)
    if process.wait(slot):
        return False
    (end,) = MODEL.eos_token_ids
    return bool(process.mask(slot)[end // 8] >> end % 8 & 1)


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("given", "right", "wrong"),
    [
        (
            {"json_schema": json.dumps(OBJECT)},
            ['{"a":1}', '{ "a" : 12 }', '{\n  "a": 1\n}'],
            ['{"b":1}', "{}", '{"a":"'],
        ),
        ({"json_schema": "true"}, ["1", '"x"', "[{}]"], ["x"]),
        ({"json_object": True}, ["{}", '{"x": [1, {"y": null}]}'], ["[]", '"x"']),
        ({"regex": "a+|b"}, ["a", "aaa", "b"], ["ab", "", "c"]),
        ({"grammar_ebnf": 'root ::= "x" [0-9]+'}, ["x1", "x99"], ["x", "1"]),
        ({"grammar_ebnf": 'start: "x" /[0-9]/+'}, ["x1"], ["x"]),
        ({"choice": pb.ChoiceConstraint(choices=["yes", 'a "b"\n', "é☃"])}, ["yes", 'a "b"\n', "é☃"], ["no", "ye"]),
    ],
    ids=str,
)
def test_what_a_constraint_takes(given: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    grammar = check(**given).sampling.grammar
    assert [text for text in right if not takes(grammar, text)] == []
    assert [text for text in wrong if takes(grammar, text)] == []


def test_space_between_parts_of_json_has_an_end() -> None:
    grammar = check(json_object=True).sampling.grammar
    assert takes(grammar, "{" + "\n" * 32 + "}")
    assert not takes(grammar, "{" + "\n" * 33 + "}")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"json_schema": "{"}, "cannot be followed"),
        ({"json_schema": ""}, "must be 1 to"),
        ({"json_schema": '{"type": "object", "uniqueItems": true, "not": {}}'}, "not"),
        ({"json_schema": '{"$ref": "http://127.0.0.1:1/x"}'}, "http://127.0.0.1:1/x"),
        ({"json_schema": '{"type": "integer", "minimum": 3, "maximum": 1}'}, "minimum"),
        ({"json_schema": "[1]"}, "object"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "x" * (LONGEST_REGEX + 1)}, f"(got {LONGEST_REGEX + 1})"),
        ({"grammar_ebnf": 'root ::= "a" other'}, "other"),
        ({"grammar_ebnf": "\x00"}, "cannot be followed"),
        ({"choice": pb.ChoiceConstraint()}, "(got 0)"),
        ({"choice": pb.ChoiceConstraint(choices=["x"] * (MOST_CHOICES + 1))}, f"at most {MOST_CHOICES}"),
    ],
    ids=str,
)
def test_a_constraint_that_cannot_be_followed_is_refused_by_its_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check(**given)
    (violation,) = refusal.value.violations
    assert violation.field == f"spec.sampling.{next(iter(given))}"
    assert said in violation.description and len(violation.description) < 400


def test_what_cannot_go_with_a_constraint() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check(regex="a", allowed_token_ids=[1], stopping=pb.StoppingCriteria(ignore_eos=True))
    named = {violation.field for violation in refusal.value.violations}
    assert named == {"spec.stopping.ignore_eos", "spec.sampling.allowed_token_ids"}
    with pytest.raises(InvalidRequest, match="end-of-sequence"):
        check(ServedModel("m", VOCAB_SIZE, 256, 16, ()), regex="a")


def test_no_object_asked_for_is_no_constraint() -> None:
    assert not check(json_object=False).sampling.grammar
    assert not check().sampling.grammar
