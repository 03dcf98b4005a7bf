"""Items, of which inputs and outputs of responses consist, and the messages of a chat that they are. Pure.

    message (user, system, developer)                    one message
    reasoning, message (assistant), function_call, ...   one message of the assistant, in the order of its turn
    function_call_output, custom_tool_call_output        one message of a tool

Items come in many spellings; `read_items` brings them into the one in which they are kept and listed. An item's id
names its response, so that it can be referred to.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from router.api.call import read_arguments
from router.api.violations import Violations, shortened
from router.responses.custom_tools import arguments_of
from router.responses.position import RESPONSE

Item = dict[str, Any]

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
CALLS = ("function_call", "custom_tool_call")
OUTPUTS_OF_CALLS = ("function_call_output", "custom_tool_call_output")
_ITEM_ID = re.compile(r"(?:msg|fc|fco|ctc|ctco|rs)_([0-9a-f]{48})([0-9a-f]{4})", re.ASCII)
_FIRST_OF_INPUT = 0x8000
"""Number of an input's first item; those of outputs count from 0."""
_ENCODED = "baton-v1."
"""What encoded reasoning begins with."""
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Parts that are text, each with the field that has it."""
_ROLES = ("user", "assistant", "system", "developer")
_KNOWN: dict[str, tuple[str, ...]] = {
    "message": ("role", "content", "phase"),
    "function_call": ("call_id", "name", "arguments", "namespace"),
    "function_call_output": ("call_id", "output", "name"),
    "custom_tool_call": ("call_id", "name", "input", "namespace"),
    "custom_tool_call_output": ("call_id", "output", "name"),
    "reasoning": ("summary", "content", "encrypted_content"),
}
"""Fields of each type of item beside `id`, `type` and `status`, which change nothing; others must be null."""


class ItemReference(NamedTuple):
    """The place of an item."""

    response_id: str
    number: int

    @property
    def is_input(self) -> bool:
        return self.number >= _FIRST_OF_INPUT

    @property
    def place(self) -> int:
        """In the input or the output of its response."""
        return self.number - _FIRST_OF_INPUT if self.is_input else self.number

    @classmethod
    def parse(cls, item_id: object) -> ItemReference | None:
        found = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
        return None if found is None else cls(RESPONSE + found[1], int(found[2], 16))


def item_id(kind: str, response_id: str, index: int, *, is_input: bool = False) -> str:
    number = index + (_FIRST_OF_INPUT if is_input else 0)
    return f"{_PREFIXES[kind]}_{response_id.removeprefix(RESPONSE)}{number:04x}"


def is_reference(item: Mapping[str, Any]) -> bool:
    """Whether it stands for an item that is kept."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "role" not in item and "id" in item)


def name_in(namespace: str, name: str) -> str:
    """The name by which the model knows a tool of a namespace, or of none."""
    return f"{namespace}__{name}" if namespace else name


def encode_reasoning(text: str) -> str:
    """Reasoning as clients that keep nothing of it carry it: not a secret, as they are sent the text as well."""
    return _ENCODED + base64.b64encode(text.encode()).decode()


def read_items(
    given: str | Sequence[Item], response_id: str, before: Sequence[Item], resolve: Callable[[Item], Item | None]
) -> list[Item]:
    """The items of an input, as they are kept. Raises InvalidRequest, which names them by their place in it.

    `before`: those of the conversation that they continue. `resolve` finds what a reference stands for.
    """
    wrong = Violations()
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given and not before:
        wrong.add("input", "must hold at least one item")
    called = {item["call_id"] for item in before if item["type"] in CALLS}
    items: list[Item] = []
    for index, item in enumerate(given):
        field = f"input[{index}]"
        if is_reference(item):
            found = resolve(item)
            if found is None:
                what = f"{shortened(str(item.get('id')))!r} is no item that is kept here"
                wrong.add(f"{field}.id", f"{what}; send the item itself")
                continue
            item = found
        kind = item.get("type", "message")
        read = _READERS.get(kind) if isinstance(kind, str) else None
        if read is None:
            known = ", ".join(_READERS)
            wrong.add(f"{field}.type", f"must be {known} or item_reference (got {shortened(str(kind))!r})")
            continue
        _check_fields(item, kind, field, wrong)
        items.append(
            {"id": item_id(kind, response_id, index, is_input=True), "type": kind} | read(item, field, called, wrong)
        )
    wrong.raise_if_any()
    return items


def _check_fields(item: Item, kind: str, field: str, wrong: Violations) -> None:
    for name, value in item.items():
        if name not in ("id", "type", "status", *_KNOWN[kind]) and value not in (None, []):
            wrong.add(f"{field}.{shortened(name, 64)}", "is not a field that is known here; leave it out")


def _message(item: Item, field: str, called: set[str], wrong: Violations) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        wrong.add(f"{field}.role", f"must be one of {', '.join(_ROLES)} (got {shortened(str(role))!r})")
    texts = _texts(item.get("content"), f"{field}.content", wrong)
    if role == "assistant":
        content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in texts]
    else:
        content = [{"type": "input_text", "text": text} for text in texts]
    return {"role": role, "status": "completed", "content": content}


def _texts(content: object, field: str, wrong: Violations) -> list[str]:
    """The texts of a content, which is one or a list of parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        wrong.add(field, "must be a string or a list of parts")
        return []
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXTS.get(kind, "")) if isinstance(part, dict) and isinstance(kind, str) else None
        if isinstance(text, str):
            texts.append(text)
        else:
            got = "" if isinstance(kind, str) and kind in _TEXTS else f" (got {shortened(str(kind))!r})"
            what = 'must be {"type": "input_text", "text": …}: this model reads text only'
            wrong.add(f"{field}[{index}]", what + got)
    return texts


def _call(item: Item, field: str, called: set[str], wrong: Violations) -> Item:
    call, arguments = _named_call(item, field, called, wrong), item.get("arguments")
    if not isinstance(arguments, str) or read_arguments(arguments) is None:
        wrong.add(f"{field}.arguments", "must be the text of a JSON object")
    return call | {"arguments": arguments}


def _custom_call(item: Item, field: str, called: set[str], wrong: Violations) -> Item:
    call, text = _named_call(item, field, called, wrong), item.get("input")
    if not isinstance(text, str):
        wrong.add(f"{field}.input", "must be the text that the tool was called with")
    return call | {"input": text}


def _named_call(item: Item, field: str, called: set[str], wrong: Violations) -> Item:
    """A call without what the tool was called with."""
    call_id, name, namespace = (item.get(each) for each in ("call_id", "name", "namespace"))
    if not isinstance(call_id, str) or not call_id:
        wrong.add(f"{field}.call_id", "must be the id of the call")
    else:
        called.add(call_id)
    if not isinstance(name, str) or not name:
        wrong.add(f"{field}.name", "must be the name of a function")
    if namespace is not None and not isinstance(namespace, str):
        wrong.add(f"{field}.namespace", "must be the name of a namespace among the tools")
    call = {"status": "completed", "call_id": call_id, "name": name}
    return call | ({"namespace": namespace} if namespace else {})


def _call_output(item: Item, field: str, called: set[str], wrong: Violations) -> Item:
    call_id, output = item.get("call_id"), item.get("output")
    if not isinstance(call_id, str) or call_id not in called:
        what = "must be that of a call before it, here or in the conversation that this continues"
        wrong.add(f"{field}.call_id", f"{what} (got {shortened(str(call_id))!r})")
    texts = _texts(output, f"{field}.output", wrong)
    kept = output if isinstance(output, str) else [{"type": "input_text", "text": text} for text in texts]
    return {"status": "completed", "call_id": call_id, "output": kept}


def _reasoning(item: Item, field: str, called: set[str], wrong: Violations) -> Item:
    """Its content, or what was encoded of it; a summary is not what the model thought."""
    content, encoded, texts = item.get("content"), item.get("encrypted_content"), []
    if content:
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
        if not all(isinstance(text, str) for text in texts):
            wrong.add(f"{field}.content", 'must be a list of {"type": "reasoning_text", "text": …}')
    elif encoded is not None:
        try:
            if not isinstance(encoded, str) or not encoded.startswith(_ENCODED):
                raise ValueError
            texts = [base64.b64decode(encoded.removeprefix(_ENCODED), validate=True).decode()]
        except (ValueError, binascii.Error):
            wrong.add(f"{field}.encrypted_content", "is none that was made here; leave the item out")
    kept = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"status": "completed", "summary": [], "content": kept}


_READERS: dict[str, Callable[[Item, str, set[str], Violations], Item]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _call_output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _call_output,
    "reasoning": _reasoning,
}


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The messages of a chat that these items are."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    for item in items:
        kind = item["type"]
        if kind in OUTPUTS_OF_CALLS or (kind == "message" and item["role"] != "assistant"):
            turn = None
            messages.append(_plain_message(item))
            continue
        if turn is None or _begins_a_message(item, turn):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        _add_to_turn(turn, item)
    return messages


def _plain_message(item: Item) -> dict[str, Any]:
    if item["type"] == "message":
        return {"role": item["role"], "content": "".join(part["text"] for part in item["content"])}
    output = item["output"]
    text = output if isinstance(output, str) else "".join(part["text"] for part in output)
    return {"role": "tool", "tool_call_id": item["call_id"], "content": text}


def _begins_a_message(item: Item, turn: Mapping[str, Any]) -> bool:
    """Whether an item of the assistant cannot be of the message before it."""
    if item["type"] == "reasoning":
        return bool(turn["content"]) or "tool_calls" in turn
    return item["type"] == "message" and bool(turn["content"]) and "tool_calls" not in turn


def _add_to_turn(turn: dict[str, Any], item: Item) -> None:
    if item["type"] in CALLS:
        name = name_in(item.get("namespace", ""), item["name"])
        is_custom = item["type"] == "custom_tool_call"
        function = {"name": name, "arguments": arguments_of(item["input"]) if is_custom else item["arguments"]}
        turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    elif item["type"] == "reasoning":
        text = "".join(part["text"] for part in item["content"])
        if text:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text
    else:
        turn["content"] += "".join(part["text"] for part in item["content"])


def cuts_of(items: Sequence[Item]) -> list[int]:
    """Where a conversation may begin: at a message of a user if there is one, and never between a call and its
    output."""
    begun: dict[str, int] = {}
    is_inside = [False] * (len(items) + 1)
    for index, item in enumerate(items):
        if item["type"] in CALLS:
            begun[item["call_id"]] = index
        elif item["type"] in OUTPUTS_OF_CALLS:
            for inside in range(begun.get(item["call_id"], index) + 1, index + 1):
                is_inside[inside] = True
    free = [index for index in range(1, len(items)) if not is_inside[index]]
    return [index for index in free if items[index].get("role") == "user"] or free
