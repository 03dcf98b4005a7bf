"""The pages of documentation as markdown-it reads them: fenced blocks, code spans, links and the anchors of headings.

Knows nothing of Baton: what a block or a span must hold is the tests' business.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is that of its first line of text, from 1."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Said:
    """A code span or the target of a link, and where it is."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


class Page:
    """`name`: its path from the root of the repository."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = (ROOT / name).read_text(encoding="utf-8")
        self._tokens = MarkdownIt("commonmark").enable("table").parse(self.text)

    @property
    def blocks(self) -> list[Block]:
        return [
            Block(self.name, token.map[0] + 2, token.info.strip(), token.content)
            for token in self._tokens
            if token.type == "fence" and token.map
        ]

    def written_in(self, language: str) -> list[Block]:
        return [block for block in self.blocks if block.language == language]

    @property
    def spans(self) -> list[Said]:
        return [
            Said(self.name, line, " ".join(t.content.split())) for line, t in self._inline() if t.type == "code_inline"
        ]

    @property
    def links(self) -> list[Said]:
        """Of text and of images."""
        targets = {"link_open": "href", "image": "src"}
        return [Said(self.name, line, str(t.attrs[targets[t.type]])) for line, t in self._inline() if t.type in targets]

    @property
    def anchors(self) -> set[str]:
        """Of its headings, as GitHub makes them."""
        headings = [i for i, token in enumerate(self._tokens) if token.type == "heading_open"]
        return {anchor_of("".join(t.content for t in self._tokens[i + 1].children or [])) for i in headings}

    def _inline(self) -> Iterator[tuple[int, Token]]:
        line = 0
        for token in self._tokens:
            line = token.map[0] + 1 if token.map else line
            yield from ((line, child) for child in token.children or [])


def anchor_of(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@cache
def pages() -> list[Page]:
    """README.md and docs/*.md: those that an operator reads."""
    return [Page("README.md"), *(Page(f"docs/{path.name}") for path in sorted((ROOT / "docs").glob("*.md")))]


@cache
def all_pages() -> list[Page]:
    """Every page of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    return [Page(name) for name in listed if (ROOT / name).is_file()]
