"""What the clients here have in common: a test asks for one step after the other, in lines of JSON.

    {"step": "chat", "base_url": "http://127.0.0.1:8000/v1", "model": "tiny-shakespeare"}   is answered with
    {"text": "Ay, madam", "finish_reason": "length", "prompt_tokens": 24, "completion_tokens": 12}

Knows no client and nothing of Baton: a client may need other versions of Baton's own libraries, so that it runs in an
environment of its own (`make test-clients`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import Any

import pydantic

MESSAGES: list[dict[str, str]] = [{"role": "user", "content": "Good morrow, fair Juliet."}]
NUM_TOKENS = 40
WRONG_TEMPERATURE = 2.5
"""Baton takes up to 2."""
TRIES = 20
"""More than a test lets be refused."""
TIMEOUT_S = 60.0
MERRY: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 400}
"""The bundled model's most likely JSON is blanks without an end."""
SCHEMA = {
    "title": "Line",
    "description": "A line of a play.",
    "type": "object",
    "properties": {"mood": {"enum": ["merry", "sad"]}, "verses": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["mood", "verses"],
    "additionalProperties": False,
}

Told = dict[str, Any]
Step = Callable[[str, str], Told | Awaitable[Told]]
"""Of the base URL and the model; what came of it."""


def told(text: str | None, finish_reason: str | None, prompt_tokens: int, completion_tokens: int) -> Told:
    return {
        "text": text,
        "finish_reason": finish_reason,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
    }


def told_whole(answer: Any) -> Told:
    """A chat completion, as OpenAI's client and LiteLLM have it."""
    choice, usage = answer.choices[0], answer.usage
    return told(choice.message.content, choice.finish_reason, usage.prompt_tokens, usage.completion_tokens)


def told_chunks(chunks: list[Any]) -> Told:
    """Those of a streamed one, with its usage."""
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    reason = next(c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason)
    usage = next(c.usage for c in chunks if getattr(c, "usage", None))
    return told("".join(texts), reason, usage.prompt_tokens, usage.completion_tokens) | {"num_chunks": len(chunks)}


def checked(answer: Any, but_for: Collection[str] = ()) -> Any:
    """An answer or an event, in which a client's own models know every field but for those."""
    unknown = set(_unknown(answer)) - set(but_for)
    assert not unknown, f"the client does not know {unknown} of {type(answer).__name__}"
    return answer


def _unknown(found: Any) -> Iterator[str]:
    if isinstance(found, pydantic.BaseModel):
        yield from found.model_extra or ()
        for name in type(found).model_fields:
            yield from _unknown(getattr(found, name))
    elif isinstance(found, list):
        for each in found:
            yield from _unknown(each)


def told_error(error: Exception) -> Told:
    """`kinds`: the class of what was raised, and those that it stems from."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    return {"kinds": kinds, "message": str(error), "status": getattr(error, "status_code", None)}


def answer_asked(*named: Step) -> None:
    """Until nothing more is asked; `async_chat` is the step `async chat`. What a client prints goes to stderr.

    An empty answer before all others says that it is ready, as a large library takes seconds to import.
    """
    steps = {step.__name__.replace("_", " "): step for step in named}
    answers, sys.stdout = sys.stdout, sys.stderr
    print("{}", file=answers, flush=True)
    with asyncio.Runner() as runner:  # one loop for all: clients keep their connections
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                said = steps[asked["step"]](asked["base_url"], asked["model"])
                answer = runner.run(_of(said)) if inspect.isawaitable(said) else said
            except Exception:
                answer = {"failed": traceback.format_exc()}
            print(json.dumps(answer), file=answers, flush=True)


async def _of(work: Awaitable[Told]) -> Told:
    return await work
