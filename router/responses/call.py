"""One response that a client asks for: its body and the conversation that it continues, as the request of a chat.

A body becomes a ChatBody, from which `router.openai.specs` makes the GenerationSpec, so that what holds for chats holds
here. Conversations are kept as items, and every turn's request is made of all of them in the same way: the tokens of a
turn are the beginning of the next one's, as far as the model's chat template writes old turns as it wrote them first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.errors import FieldViolation, InvalidRequest, NotServed
from cluster.pb import generation_pb2 as pb
from router.api.call import INLINE_BYTES, LONGEST_NAME, MOST_MESSAGES, Call, Principal, TurnTokens, run_aside
from router.api.violations import Violations, invalid
from router.openai import specs
from router.openai.bodies import ChatBody
from router.openai.completions import Form
from router.openai.errors import RESUME_NAMES
from router.openai.http import checked
from router.openai.logprobs import TokenBytes, chat_logprobs
from router.responses.answers import ResponseAnswer
from router.responses.bodies import (
    AS_IN_CHATS,
    LONGEST_KEY,
    LONGEST_VALUE,
    ChosenFunction,
    CustomTool,
    FunctionTool,
    NamespaceTool,
    ReasoningOptions,
    ResponseBody,
    Tool,
    WebSearchTool,
)
from router.responses.custom_tools import parameters_of
from router.responses.events import ResponseEvents
from router.responses.items import (
    Item,
    ItemReference,
    cuts_of,
    is_reference,
    messages_of,
    name_in,
    read_items,
)
from router.responses.position import ResponsePosition, ToldEvents
from router.responses.store import (
    NO_CONVERSATION,
    KeptConversation,
    ResponseStore,
    StoredResponse,
    new_response_id,
)

NAMES: Mapping[str, str] = {
    "chat.messages": "input",
    "chat.tools": "tools",
    "chat.tool_choice": "tool_choice",
    "chat.template_kwargs": "chat_template_kwargs",
    "chat": "input",
    "max_output_tokens": "max_output_tokens",
    "json_schema": "text.format.schema",
    "json_object": "text.format",
    "session_id": "session_id",
    **RESUME_NAMES,
}
"""This client's names for fields of the .proto, as `router.openai.errors.failure_of` takes them."""


def names_of(body: ResponseBody) -> Mapping[str, str]:
    """NAMES, and where the tools of this body are, of which the model is told as one list of functions."""
    places: list[str] = []
    for index, tool in enumerate(body.tools or ()):
        own = f"tools[{index}]"
        is_space = isinstance(tool, NamespaceTool)
        places += [f"{own}.tools[{each}]" if is_space else own for each in range(len(_functions(tool)))]
    return {**NAMES, **{f"tools[{index}].function": place for index, place in enumerate(places)}}


def names_in(found: Mapping[str, Any]) -> Mapping[str, str]:
    """The names of fields in what may be the body of a response, and need not be one."""
    try:
        return names_of(checked(found, ResponseBody))
    except InvalidRequest:
        return NAMES


GetModel = Callable[[pb.GetModelRequest, Call], Coroutine[Any, Any, pb.GetModelResponse]]
Tokenize = Callable[[pb.TokenizeRequest, Call], Coroutine[Any, Any, pb.TokenizeResponse]]


@dataclass(frozen=True)
class ResponseCall:
    """What a body asks for."""

    response_id: str
    body: ResponseBody
    items: list[Item]
    """Those of the input, as they are kept."""
    session: str
    """Empty: the response belongs to no session."""
    turns: Sequence[TurnTokens]
    """Those that it continues, as `Call.turns`."""
    spec: pb.GenerationSpec
    form: Form
    answer: ResponseAnswer
    """The response before it has begun."""
    position: ResponsePosition | None = None
    """Of a stream that may be resumed."""
    kept_turns: list[TurnTokens] = field(default_factory=list)
    """The tokens of its turn, as the last one, once it is over and if they are to be kept."""

    def generating(self, call: Call) -> Call:
        """The call with which it is generated."""
        keep_turn = self.kept_turns.append if self.answer["store"] else None
        return replace(call, turns=self.turns, keep_turn=keep_turn)

    def stored(self, principal: Principal, **fields: Any) -> StoredResponse:
        """Its record; `fields` are those of one that is worked on."""
        response = StoredResponse(
            self.response_id,
            principal.tenant,
            principal.key_id,
            self.answer["created_at"],
            0,
            self.answer["status"],
            self.body.previous_response_id,
            self.session,
            bool(self.body.background),
        )
        return replace(response, **fields)

    def resumed_at(self, position: ResponsePosition) -> ResponseCall:
        """The call as one whose stream may be resumed, or goes on there."""
        self.spec.resume.generation_id = position.generation_id
        self.answer["created_at"] = position.created_at
        return replace(self, position=position)

    def events(self, told: ToldEvents | None = None) -> ResponseEvents:
        """`told` as `ResponseEvents` has it."""
        return ResponseEvents(
            self.answer,
            name_tokens=self._name_tokens if self.form.wants_logprobs else None,
            encodes_reasoning="reasoning.encrypted_content" in (self.body.include or ()),
            told=told,
        )

    def _name_tokens(self, logprobs: Sequence[pb.TokenLogprob]) -> Any:
        return chat_logprobs(logprobs, self.form.token_bytes)["content"]

    @property
    def given(self) -> dict[str, Any]:
        """What is kept of it: enough to make it again."""
        fields = self.body.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {"body": {**fields, "input": []}, "items": self.items, "answer": {**self.answer, "output": []}}


class ResponseReader:
    """Reads calls. `store` None: nothing is kept here. `get_model`, `tokenize`: methods of the API."""

    def __init__(
        self, store: ResponseStore | None, get_model: GetModel, tokenize: Tokenize, token_bytes: TokenBytes
    ) -> None:
        self._store = store
        self._get_model = get_model
        self._tokenize = tokenize
        self._token_bytes = token_bytes

    async def read(
        self, body: ResponseBody, call: Call, request_id: str, position: ResponsePosition | None = None
    ) -> ResponseCall:
        """`position`: of a stream that may be resumed. Raises InvalidRequest, NotServed or NotFound, and StoreAway."""
        _check(body)
        if self._store is None:
            for field in ("previous_response_id", "background", "store"):
                if getattr(body, field):
                    why = "responses are not kept here, as the routers of this cluster share no store for them"
                    raise NotServed(f"{field}: {why}; leave it out", violations=(FieldViolation(field, why),))
        if body.background and body.store is False:
            raise invalid((FieldViolation("store", "must not be false in the background: the response is read later"),))
        response_id = new_response_id() if position is None else position.response_id
        tenant = call.principal.tenant
        before = await self._conversation(body, tenant)
        given = body.input
        found = await self._find_references([] if isinstance(given, str) else given, tenant)
        items = read_items(given, response_id, before.items, lambda item: found.get(str(item.get("id"))))
        made = await self._made(body, response_id, before, items, call, request_id)
        return made if position is None else made.resumed_at(position)

    async def read_again(self, response_id: str, given: Mapping[str, Any], call: Call) -> ResponseCall:
        """The call of a response that is kept; `given` as `ResponseCall.given` was."""
        body = checked(given["body"], ResponseBody)
        before = await self._conversation(body, call.principal.tenant)
        return await self._made(body, response_id, before, given["items"], call, response_id)

    async def _conversation(self, body: ResponseBody, tenant: str) -> KeptConversation:
        if body.previous_response_id is None or self._store is None:
            return NO_CONVERSATION
        return await self._store.conversation(tenant, body.previous_response_id)

    async def _find_references(self, given: Sequence[Item], tenant: str) -> dict[str, Item]:
        """Items that others refer to, by their ids."""
        found: dict[str, Item] = {}
        for item in given:
            reference = ItemReference.parse(item.get("id")) if is_reference(item) else None
            if reference is not None and self._store is not None:
                kept = await self._store.item(tenant, reference)
                if kept is not None:
                    found[str(item["id"])] = kept
        return found

    async def _made(
        self,
        body: ResponseBody,
        response_id: str,
        before: KeptConversation,
        items: list[Item],
        call: Call,
        request_id: str,
    ) -> ResponseCall:
        model = (await self._get_model(pb.GetModelRequest(model=body.model), call)).model
        is_stored = self._store is not None and body.store is not False
        session = body.session_id or before.session or (body.prompt_cache_key or "")[:LONGEST_NAME]
        session = session or (response_id if is_stored else "")

        def spec_of(conversation: Sequence[Item]) -> tuple[ChatBody, pb.GenerationSpec]:
            chat = _chat_body(body, conversation, session)
            return chat, specs.chat_spec(chat, request_id)

        conversation = [*before.items, *items]
        is_long = bool(before.items) or sum(len(str(item)) for item in items) > INLINE_BYTES
        if body.truncation == "auto":
            conversation = await self._fitting(body, conversation, spec_of, call, model.max_context_tokens)
        elif len(conversation) > MOST_MESSAGES:
            what = f"the conversation has {len(conversation)} items, and at most {MOST_MESSAGES} are taken"
            raise invalid((FieldViolation("input", f"{what}; truncation: auto leaves out the oldest"),))
        chat, spec = await run_aside(is_long, lambda: spec_of(conversation))
        answer = _answer_head(body, response_id, model, is_stored=is_stored)
        form = Form.of(chat, self._token_bytes)
        return ResponseCall(response_id, body, items, session, before.turns, spec, form, answer)

    async def _fitting(
        self, body: ResponseBody, items: list[Item], spec_of: Any, call: Call, most_tokens: int
    ) -> list[Item]:
        """The conversation without its oldest items, as few as make it fit into the context. What stands before the
        first message of a user or an answer stays."""
        num_kept = next((n for n, item in enumerate(items) if item.get("role") not in ("system", "developer")), 0)
        head, rest = items[:num_kept], items[num_kept:]
        cuts = [0, *cuts_of(rest)]
        if len(items) > MOST_MESSAGES:
            cuts = [cut for cut in cuts if num_kept + len(rest) - cut <= MOST_MESSAGES] or cuts[-1:]
        least = 1 if body.max_output_tokens is None else body.max_output_tokens

        async def fits(cut: int) -> bool:
            _, spec = await run_aside(True, lambda: spec_of([*head, *rest[cut:]]))
            found = await self._tokenize(pb.TokenizeRequest(model=body.model, chat=spec.chat), call)
            return len(found.token_ids) + least <= most_tokens

        first, last = 0, len(cuts) - 1
        if not await fits(cuts[first]):
            while first < last:  # the cut that fits is behind `first`, and at `last` at the latest
                middle = (first + last) // 2
                if await fits(cuts[middle]):
                    last = middle
                else:
                    first = middle + 1
        return [*head, *rest[cuts[first] :]]


def _check(body: ResponseBody) -> None:
    wrong = Violations()
    if body.stream_options is not None and not body.stream:
        wrong.add("stream_options", "needs stream: true")
    text = None if body.text is None else body.text.format
    if text is not None and text.type == "json_schema":
        for name, value in (("name", text.name), ("schema", text.schema_)):
            if value is None:
                wrong.add(f"text.format.{name}", "must be set where the type is json_schema")
    if any(len(key) > LONGEST_KEY or len(value) > LONGEST_VALUE for key, value in (body.metadata or {}).items()):
        wrong.add("metadata", f"keys may have {LONGEST_KEY} characters, and values {LONGEST_VALUE}")
    wrong.raise_if_any()


def _chat_body(body: ResponseBody, items: Sequence[Item], session: str) -> ChatBody:
    fields: dict[str, Any] = {name: getattr(body, name) for name in AS_IN_CHATS if getattr(body, name) is not None}
    first = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    fields["messages"] = [*first, *messages_of(items)]
    if body.tools:
        fields["tools"] = [{"type": "function", "function": each} for tool in body.tools for each in _functions(tool)]
    choice = body.tool_choice
    if choice is not None:
        fields["tool_choice"] = choice if isinstance(choice, str) else _named_choice(choice)
    if body.max_tool_calls == 1:
        fields["parallel_tool_calls"] = False
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        form = body.text.format.model_dump(by_alias=True, exclude_none=True)
        kind = form.pop("type")
        fields["response_format"] = {"type": kind, "json_schema": form} if kind == "json_schema" else {"type": kind}
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if session:
        fields["session_id"] = session
    return checked(fields, ChatBody)


def _functions(tool: Tool) -> list[dict[str, Any]]:
    """The functions of a tool by the names that the model knows them by."""
    if isinstance(tool, FunctionTool):
        return [tool.model_dump(exclude_none=True, exclude={"type"})]
    if isinstance(tool, NamespaceTool):
        functions = [function for each in tool.tools for function in _functions(each)]
        return [{**function, "name": name_in(tool.name, function["name"])} for function in functions]
    if isinstance(tool, CustomTool):
        described = {} if tool.description is None else {"description": tool.description}
        parameters = parameters_of(None if tool.format is None else tool.format.definition)
        return [{"name": tool.name, **described, "parameters": parameters, "strict": True}]
    return []


def _told_tool(tool: FunctionTool | NamespaceTool | CustomTool) -> dict[str, Any]:
    """A tool as answers have it."""
    told: dict[str, Any] = {"description": None} | tool.model_dump(exclude_none=True)
    if isinstance(tool, CustomTool):
        return {"format": {"type": "text"}} | told
    if isinstance(tool, NamespaceTool):
        return told | {"description": tool.description or "", "tools": [_told_tool(each) for each in tool.tools]}
    return {"parameters": None, "strict": None} | told


def _named_choice(choice: Any) -> dict[str, Any]:
    """The choice of one tool, or of several, as chats write it."""

    def named(tool: ChosenFunction) -> dict[str, Any]:
        return {"type": "function", "function": {"name": tool.name}}

    if isinstance(choice, ChosenFunction):
        return named(choice)
    allowed = {"mode": choice.mode, "tools": [named(tool) for tool in choice.tools]}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _or_default(given: float | None, default: float) -> float:
    """The default is one of 32 bits."""
    return round(default, 6) if given is None else given


def _answer_head(body: ResponseBody, response_id: str, model: pb.Model, *, is_stored: bool) -> ResponseAnswer:
    defaults = model.default_sampling
    text = {} if body.text is None else body.text.model_dump(by_alias=True, exclude_none=True)
    tools = [_told_tool(tool) for tool in body.tools or () if not isinstance(tool, WebSearchTool)]
    choice = body.tool_choice or "auto"
    reasoning = body.reasoning or ReasoningOptions()
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "error": None,
        "incomplete_details": None,
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": model.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": "detailed" if reasoning.is_summarized else None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": _or_default(body.temperature, defaults.temperature),
        "top_p": _or_default(body.top_p, defaults.top_p),
        "presence_penalty": _or_default(body.presence_penalty, defaults.presence_penalty),
        "frequency_penalty": _or_default(body.frequency_penalty, defaults.frequency_penalty),
        "top_logprobs": body.top_logprobs or 0,
        "text": {"format": {"type": "text"}} | text,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": tools,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }
