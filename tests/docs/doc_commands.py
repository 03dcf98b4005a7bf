"""What the documentation may name: the commands of `baton` with their options, the Makefile's targets, the keys of the
configuration."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

import typer
from doc_pages import ROOT, Page, Said

from cli.main import app
from cluster.config.schema import ServingConfig

BATON = re.compile(r"(?:^|[\s;&|(])(?:\.venv/bin/)?baton +(?=[a-z-])")


@cache
def commands() -> dict[str, set[str]]:
    """Each subcommand, such as `bench compare`, and its options; `bench` itself has those that it takes alone."""
    found: dict[str, set[str]] = {}

    def walk(command: Any, name: str) -> None:
        options = {option for p in command.params for option in (*p.opts, *p.secondary_opts) if option.startswith("-")}
        found[name] = options | {"--help", "-h"}
        for sub, below in getattr(command, "commands", {}).items():
            walk(below, f"{name} {sub}".strip())

    walk(typer.main.get_command(app), "")
    return found


def wrong_in(command_line: str) -> str | None:
    """What is wrong with the words after `baton`, as far as names go."""
    lexer = shlex.shlex(command_line, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    for word in lexer:
        if re.fullmatch(r"[;&|()<>]+", word):
            break
        words.append(word)
    name = ""
    while words and f"{name} {words[0]}".strip() in commands():
        name = f"{name} {words.pop(0)}".strip()
    if not name and words and not words[0].startswith("-"):
        return f"there is no `baton {words[0]}`"
    unknown = {w.partition("=")[0] for w in words if w.startswith("--") and len(w) > 2} - commands()[name]
    return f"`baton {name}` has no {', '.join(sorted(unknown))}" if unknown else None


def baton_lines(page: Page) -> list[Said]:
    """What follows `baton` wherever a page writes a command of it."""
    found: list[Said] = []
    for block in page.written_in("sh"):
        text = block.text.replace("\\\n", "  ")
        for number, line in enumerate(text.splitlines()):
            found += [Said(page.name, block.line + number, line[m.end() :]) for m in BATON.finditer(line)]
    for span in page.spans:
        if m := BATON.match(span.text):
            found.append(Said(page.name, span.line, span.text[m.end() :]))
    return found


@cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


@cache
def config_keys() -> set[str]:
    """Every key under `metadata.serving`, sections among them, such as `roles.prefill`."""
    found: set[str] = set()

    def walk(section: type, path: str) -> None:
        hints = get_type_hints(section)
        for field in fields(section):  # type: ignore[arg-type]
            key = f"{path}.{field.name}".lstrip(".")
            found.add(key)
            if is_dataclass(hints[field.name]):
                walk(hints[field.name], key)  # type: ignore[arg-type]

    walk(ServingConfig, "")
    return found
