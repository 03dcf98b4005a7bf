"""Constraints on a request's output, compiled to one grammar that workers can follow.

A grammar is bounded, then tried with the model's own tokens before its request is queued: in a process of its own
(`cluster.grammar`), within a limit of time, and no more than a few of one tenant at a time. Its time is charged to the
tenant; grammars that were tried lately cost nothing.

The compiler of grammars (llguidance) is native code that recurses: what is too deep or too large is refused before the
compiler sees it (`check_bounds`), without recursion and in time linear in the text.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from cluster.errors import InternalError
from cluster.grammar import GrammarLimits, GrammarLost, GrammarProcesses, GrammarTooSlow
from cluster.pb import generation_pb2 as pb
from router.api.call import Principal
from router.api.violations import Violations, shortened
from router.queue.quota import Exceeded, TokenBucket
from router.tool_calls.output import OutputForm

MOST_CHOICES = 1024
LONGEST_GRAMMAR = 256 * 1024
"""Characters of any constraint."""
LONGEST_REGEX = 32 * 1024
"""Characters of a regular expression: compiling one may take time quadratic in its length."""
MOST_RULES = 1000
MOST_REFERENCES = 500
"""Definitions that the `$ref`s of one schema name."""
DEEPEST = 128
"""Levels of nested brackets; an object in an object of a JSON schema takes two."""

_JSON_TOKENS = re.compile(r'(?P<literal>"(?:[^"\\]|\\.)*+"?)|(?P<open>[\[{])|(?P<close>[\]}])', re.DOTALL)
_REGEX_TOKENS = re.compile(r"(?P<literal>\\.|\[(?:[^\]\\]|\\.)*+\]?)|(?P<open>\()|(?P<close>\))", re.DOTALL)
_LITERAL = r'(?P<literal>"(?:[^"\\\n]|\\.)*+"?|/(?:[^/\\\n]|\\.)*+/?'
_RULE = r"(?P<rule>(?<=[\w\]}-])[ \t]*:(?::=)?)"
_GRAMMAR_TOKENS = (
    re.compile(_LITERAL + rf"|\[(?:[^\]\\]|\\.)*+\]?)|{_RULE}|(?P<open>[({{])|(?P<close>[)}}])", re.DOTALL),
    re.compile(_LITERAL + rf")|{_RULE}|(?P<open>\[)|(?P<close>\])", re.DOTALL),
)
"""Brackets outside strings and expressions: once without what may be a character class, once only square ones."""
LONGEST_PROBLEM = 300
_ANY_OBJECT = '{"type": "object"}'
_AT_ONCE, _OF_A_TENANT = 4, 2
"""Grammars that are tried at one time."""
_KEPT = 256
"""Grammars of which it is known whether they can be followed."""

TryGrammar = Callable[[str, str], str]
"""The grammar of a constraint, of its kind and text; raises ValueError for one that cannot be followed."""


class WrongTool(ValueError):
    """The schema of a tool cannot be followed."""

    def __init__(self, index: int, reason: str) -> None:
        """`index`: of the tool in its request."""
        super().__init__(reason)
        self.index = index


class Grammars:
    """Tries grammars with one tokenizer. Lives in one event loop."""

    def __init__(
        self,
        definition: Callable[[], str],
        vocab_size: int,
        limits: GrammarLimits | None = None,
        *,
        compile_s_per_min: int | None = 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`definition` reads the content of tokenizer.json, when the first grammar comes. `compile_s_per_min`: seconds
        of compiling that one tenant has in a minute; None: no limit."""
        self._processes = GrammarProcesses(definition, vocab_size, limits)
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="grammars")
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_OF_A_TENANT))
        self._buckets: dict[str, TokenBucket] = {}
        self._compile_s_per_min = compile_s_per_min
        self._clock = clock
        self._trying: dict[tuple[str, bytes], asyncio.Task[str | ValueError]] = {}
        """Trials of grammars by tenant and grammar: several requests with one grammar try it once."""
        self._known: OrderedDict[bytes, str | ValueError] = OrderedDict()

    async def compile(self, kind: str, text: str, principal: Principal) -> str:
        """The grammar. Raises ValueError for one that cannot be followed, QuotaExceeded when the tenant has had its
        time."""
        name = hashlib.sha256(f"{kind} {text}".encode(errors="surrogatepass")).digest()
        outcome = self._known.get(name)
        if outcome is None:
            by = principal.tenant, name
            trying = self._trying.get(by) or asyncio.create_task(self._try_in_turn(kind, text, principal))
            self._trying[by] = trying
            trying.add_done_callback(partial(self._tried, by))
            outcome = await asyncio.shield(trying)  # a client that leaves has not paid yet
            if not isinstance(outcome, GrammarTooSlow):
                self._known[name] = outcome
        if name in self._known:
            self._known.move_to_end(name)
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)
        if isinstance(outcome, ValueError):
            raise ValueError(str(outcome))
        return outcome

    async def compile_form(
        self, form: OutputForm, special_ids: Mapping[str, int], content: str, principal: Principal
    ) -> str:
        """The grammar of outputs of this form, whose answer is held to `content`, a grammar or empty; empty: they are
        free. Raises as `compile` does; WrongTool where it is one tool's schema that cannot be followed."""
        text = form.grammar(special_ids, content or None)
        if text is None:
            return content
        schemas = {tool.index: json.dumps(tool.schema()) for tool in form.tools.values()}
        for index, schema in schemas.items():
            try:
                check_bounds("json_schema", schema)
            except ValueError as error:
                raise WrongTool(index, str(error)) from error
        try:
            return await self.compile("grammar", text, principal) or text
        except ValueError as error:
            for index, schema in schemas.items():
                try:
                    await self.compile("json_schema", schema, principal)
                except ValueError as reason:
                    raise WrongTool(index, str(reason)) from error
            raise

    def _tried(self, by: tuple[str, bytes], trying: asyncio.Task[str | ValueError]) -> None:
        self._trying.pop(by, None)
        if not trying.cancelled():
            trying.exception()  # read, also where the client has left

    async def _try_in_turn(self, kind: str, text: str, principal: Principal) -> str | ValueError:
        """Charges the tenant for the time that it takes, also where it fails."""
        async with self._turns[principal.tenant]:
            bucket = self._bucket(principal)
            loop = asyncio.get_running_loop()
            elapsed_s, outcome = await loop.run_in_executor(self._threads, self._try, kind, text)
            if bucket is not None:
                most_s = self._processes.limits.compile_s  # what is longer, it has waited beside other work
                bucket.take(1000 * min(elapsed_s, most_s), self._clock())
        if isinstance(outcome, InternalError):
            raise outcome
        return outcome

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._processes.close()

    def _bucket(self, principal: Principal) -> TokenBucket | None:
        """The tenant's, in milliseconds. Raises QuotaExceeded when it is used up."""
        now, per_min = self._clock(), self._compile_s_per_min
        if per_min is None:
            return None
        bucket = self._buckets.setdefault(principal.tenant, TokenBucket(1000 * per_min, now))
        wait_s = bucket.wait_s(1.0, now)
        if wait_s > 0:
            what = f"the grammars of this tenant have used the {per_min} s of compiling that they have in a minute"
            raise Exceeded("grammars", what, wait_s).error_for(principal)
        return bucket

    def _try(self, kind: str, text: str) -> tuple[float, str | ValueError | InternalError]:
        """The seconds that it took, and what came of it."""
        began = self._clock()
        grammar: str | ValueError | InternalError
        try:
            check_bounds(kind, text)
            process = self._processes.compile(text, kind)
            process.close()
            grammar = process.grammar
        except ValueError as error:
            grammar = error
        except (GrammarLost, OSError) as error:
            grammar = InternalError(f"no process could compile the grammar: {error}")
        return self._clock() - began, grammar


def constraint_of(params: pb.SamplingParams) -> tuple[str, str] | None:
    """The field that constrains the output, and its text; None where there is none."""
    kind = params.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not params.json_object):
        return None
    if kind == "choice":
        choices = params.choice.choices
        return kind, json.dumps(list(choices), ensure_ascii=False) if 0 < len(choices) <= MOST_CHOICES else ""
    return kind, _ANY_OBJECT if kind == "json_object" else getattr(params, kind)


def read_constraint(params: pb.SamplingParams, try_grammar: TryGrammar, wrong: Violations) -> str:
    """The grammar of `params`; empty where there is none, or where it is wrong, which is added to `wrong`."""
    constraint = constraint_of(params)
    if constraint is None:
        return ""
    kind, text = constraint
    field = f"sampling.{kind}"
    if not wrong.at_most(field, params.choice.choices, MOST_CHOICES, "choices"):
        return ""
    try:
        return try_grammar(kind, text)
    except ValueError as error:
        wrong.add(field, f"cannot be followed: {shortened(' '.join(str(error).split()), LONGEST_PROBLEM)}")
        return ""


def check_bounds(kind: str, text: str) -> None:
    """Raises ValueError with the value, the limit and the remedy. `kind`: a field of SamplingParams."""
    longest = LONGEST_REGEX if kind == "regex" else LONGEST_GRAMMAR
    if not 0 < len(text) <= longest:
        raise ValueError(f"must be 1 to {longest} characters long (got {len(text)})")
    match kind:
        case "json_schema":
            _check_tokens(text, _JSON_TOKENS)
            _check_references(text)
        case "regex":
            _check_tokens(text, _REGEX_TOKENS)
        case "grammar_ebnf":
            for tokens in _GRAMMAR_TOKENS:
                _check_tokens(text, tokens)
            _check_number_of_references(text.count('"$ref"'))


def _check_tokens(text: str, tokens: re.Pattern[str]) -> None:
    """Counts rules, and brackets that are open at one time within a rule."""
    num_rules = depth = 0
    for token in tokens.finditer(text):
        match token.lastgroup:
            case "open":
                depth += 1
                if depth > DEEPEST:
                    raise ValueError(f"is nested more than {DEEPEST} levels deep; make it flatter")
            case "close":
                depth = max(0, depth - 1)
            case "rule":
                num_rules, depth = num_rules + 1, 0
    if num_rules > MOST_RULES:
        raise ValueError(f"has {num_rules} rules, and may have {MOST_RULES}; join or leave out some")


def _check_references(text: str) -> None:
    """Text that is no JSON is left to the compiler, whose words name the place."""
    try:
        schema = json.loads(text)
    except ValueError:
        return
    targets: set[str] = set()
    left: list[Any] = [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            target = value.get("$ref")
            if isinstance(target, str):
                targets.add(target)
            left += value.values()
        elif isinstance(value, list):
            left += value
    _check_number_of_references(len(targets))


def _check_number_of_references(number: int) -> None:
    if number > MOST_REFERENCES:
        remedy = "write definitions where they are used, or leave out some"
        raise ValueError(f"refers to {number} definitions, and may refer to {MOST_REFERENCES}; {remedy}")
