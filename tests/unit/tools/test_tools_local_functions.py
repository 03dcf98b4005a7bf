"""Functions of a file as tools that a model may call."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.errors import InvalidRequest
from tools.local_functions import LocalFunctions

FILE = '''
from __future__ import annotations
from json import dumps

def roll(sides: int, times: int = 1) -> list[int]:
    """Rolls a die.

    As often as it is told.
    """
    return [sides] * times

def now() -> str:
    return "noon"

def _own(x): ...
'''


def functions_of(folder: Path, text: str) -> LocalFunctions:
    (folder / "tools.py").write_text(text)
    return LocalFunctions.from_file(folder / "tools.py")


def test_a_function_is_told_by_its_signature_and_docstring(tmp_path: Path) -> None:
    now, roll = functions_of(tmp_path, FILE).tools
    assert (now["function"]["name"], now["function"]["description"]) == ("now", "")
    assert roll["function"]["description"] == "Rolls a die.\n\nAs often as it is told."
    assert roll["function"]["parameters"]["required"] == ["sides"]
    assert {name: each["type"] for name, each in roll["function"]["parameters"]["properties"].items()} == {
        "sides": "integer",
        "times": "integer",
    }


def test_results_and_errors_are_text_for_the_model(tmp_path: Path) -> None:
    functions = functions_of(tmp_path, FILE)
    assert functions.call("roll", '{"sides": 6, "times": 2}') == "[6, 6]"
    assert functions.call("now", "{}") == "noon"
    assert functions.call("roll", '{"sides": "six"}').startswith("error: ValidationError")
    assert functions.call("other", "{}") == "error: KeyError: 'other'"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("_x = 1", "defines no function"),
        ("1 +", "cannot be run: SyntaxError"),
        ("def f(x: object()): ...", "f: its parameters have no JSON schema"),
        ("def f(x, /): ...", "f: models pass arguments by name"),
    ],
)
def test_a_file_without_tools_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        functions_of(tmp_path, text)


def test_a_file_that_is_no_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="is not a Python file"):
        LocalFunctions.from_file(tmp_path / "none.py")
