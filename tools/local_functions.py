"""The functions of a Python file as tools that a model may call: `baton chat --tools FILE`.

A function's name, docstring and signature are what the model is told of it. Whoever names a file runs it, and nothing
keeps its functions from what Python can do.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pydantic

from cluster.errors import InvalidRequest

_MODULE = "baton_tools"


class LocalFunctions:
    """The public functions that a file defines, by name."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Raises InvalidRequest for one whose parameters have no JSON schema."""
        self._calls: dict[str, Callable[..., Any]] = {}
        self.tools: list[dict[str, Any]] = []
        """Their definitions, as OpenAI's API has them."""
        for name, function in functions.items():
            try:
                schema = pydantic.TypeAdapter(cast(Any, function)).json_schema()
                self._calls[name] = pydantic.validate_call(function)
            except pydantic.errors.PydanticUserError as error:
                raise InvalidRequest(f"{name}: its parameters have no JSON schema: {error}") from error
            if schema.get("type") != "object":
                raise InvalidRequest(f"{name}: models pass arguments by name, so it can have none without one")
            about = {"name": name, "description": inspect.getdoc(function) or "", "parameters": schema}
            self.tools.append({"type": "function", "function": about})

    @classmethod
    def from_file(cls, path: Path) -> LocalFunctions:
        """Runs the file. Raises InvalidRequest."""
        spec = importlib.util.spec_from_file_location(_MODULE, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise InvalidRequest(f"{path}: is not a Python file; its name must end with .py")
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise InvalidRequest(f"{path}: cannot be run: {type(error).__name__}: {error}") from error
        defined = inspect.getmembers(module, inspect.isfunction)
        public = {name: each for name, each in defined if not name.startswith("_") and each.__module__ == _MODULE}
        if not public:
            raise InvalidRequest(f"{path}: defines no function that a model could call")
        return cls(public)

    def call(self, name: str, arguments: str) -> str:
        """Calls a function with a JSON object of arguments; returns its result, or its error, as models are told it."""
        try:
            result = self._calls[name](**json.loads(arguments))
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"
