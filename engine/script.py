"""A model whose answers are in a file: rules choose one by the text of the prompt (`engine.timed_steps.script`).

It is the model of a `TimedRunner`, as the hash is. The KV pool holds the hash of all tokens so far
(`engine.token_hash`), and the next token is looked up by that hash among those along the answer. So each worker that
has a request's prompt and KV goes on where another one stopped, and KV that was lost, damaged or mixed up ends the
output too early.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch
import yaml
from tokenizers import Tokenizer
from torch import Tensor

from cluster.config.source import read_text
from cluster.errors import CheckpointError, ConfigError
from cluster.model_folder import read_model_file
from engine.models.config import ModelConfig
from engine.sampling.params import SampleRow
from engine.sampling.rules import allows, follow_constraints
from engine.sampling.samples import Samples
from engine.token_hash import TokenHash

_KEYS = {"when", "say"}
_MOST_PROMPTS = 256
"""Prompts whose answers are kept as tokens; those of others are looked up again."""
_TAIL = 200
"""Characters of a prompt without an answer that its error shows."""


@dataclass(frozen=True)
class _Rule:
    """What the model writes behind some prompts."""

    when: re.Pattern[str]
    say: str


class Script:
    """The rules of one file."""

    def __init__(self, rules: Sequence[_Rule]) -> None:
        self._rules = rules

    @classmethod
    def from_file(cls, path: str) -> Self:
        """Reads a YAML list of rules, each with `say`, and `when` but for one that answers all other prompts.

        Raises ConfigError."""
        try:
            rules = yaml.safe_load(read_text(path))
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: is not YAML: {error}") from error
        if not isinstance(rules, list) or not rules:
            raise ConfigError(f"{path}: must be a list of rules, such as `- {{when: weather, say: It rains.}}`")
        return cls([_rule(f"{path}: rule {number}", rule) for number, rule in enumerate(rules, 1)])

    def answer(self, prompt: str) -> str | None:
        """What the rule says whose `when` is found last in the prompt, of several there the first; None without one."""
        ends = [max((found.end() for found in rule.when.finditer(prompt)), default=-1) for rule in self._rules]
        last = max(ends)
        return None if last < 0 else self._rules[ends.index(last)].say


def _rule(where: str, rule: Any) -> _Rule:
    if not isinstance(rule, dict) or not isinstance(rule.get("say"), str):
        raise ConfigError(f"{where}: has no text under `say`: {rule!r:.100}")
    if unknown := rule.keys() - _KEYS:
        raise ConfigError(f"{where}: has no key {sorted(map(str, unknown))[0]!r}; there are `when` and `say`")
    when = rule.get("when", r"\A")
    try:
        return _Rule(re.compile(when), rule["say"])
    except (re.error, TypeError) as error:
        raise ConfigError(f"{where}: `when` is not a regular expression: {when!r:.100} ({error})") from error


class ScriptChooser:
    """Chooses tokens by a script and the states of a `TimedRunner` (`worker.group.TokenChooser`). It is always sure; at
    its answer's end, and where a state is none of the answer's, it chooses the end of sequence."""

    def __init__(self, script: Script, tokenizer: Tokenizer, end_token_id: int) -> None:
        self._script = script
        self._tokenizer = tokenizer
        self._end_token_id = end_token_id
        self._next_tokens = lru_cache(_MOST_PROMPTS)(self._answer)

    @classmethod
    def from_files(cls, path: str, folder: Path, config: ModelConfig) -> Self:
        """Of a script and the folder of a model. Raises ConfigError and CheckpointError."""
        if not config.eos_token_ids:
            raise ConfigError(f"engine.timed_steps.script: {folder} names no eos_token_id, by which answers end")
        try:
            tokenizer = Tokenizer.from_str(read_model_file(folder / "tokenizer.json").decode("utf-8"))
            tokenizer.no_truncation()
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{folder}/tokenizer.json: a script needs a tokenizer: {error}") from error
        return cls(Script.from_file(path), tokenizer, config.eos_token_ids[0])

    def launch(self, logits: Tensor, rows: Sequence[SampleRow]) -> Samples:
        """`logits`: int64 [R], the state before each row's token."""
        constrained = [r for r, row in enumerate(rows) if row.params.constraint is not None]
        allowed, problems = follow_constraints(rows, constrained)
        chosen = []
        for r, (state, row) in enumerate(zip(logits.tolist(), rows, strict=True)):
            next_tokens = self._next_tokens(tuple(row.prompt_token_ids))
            if next_tokens is None:
                tail = self._text(row.prompt_token_ids)[-_TAIL:]
                problems[r] = f"no rule of engine.timed_steps.script has a `when` that is in this prompt: ...{tail!r}"
            token = (next_tokens or {}).get(state % 2**64, self._end_token_id)
            if r in allowed and not allows(allowed[r], token):
                said, text = self._text(row.output_token_ids)[-_TAIL:], self._text([token])
                problems.setdefault(r, f"the script goes on with {text!r}, which may not follow here: ...{said!r}")
            chosen.append(token)
        return Samples(torch.tensor(chosen, dtype=torch.int64), problems=problems)

    def _answer(self, prompt: tuple[int, ...]) -> dict[int, int] | None:
        """The tokens of the prompt's answer, each by the state before it; None where no rule has one."""
        answer = self._script.answer(self._text(prompt))
        if answer is None:
            return None
        before, next_tokens = TokenHash(prompt), {}
        for token in self._tokenizer.encode(answer, add_special_tokens=False).ids:
            next_tokens[before.state] = token
            before.extend([token])
        return next_tokens

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
