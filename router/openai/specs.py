"""A body as the GenerationSpecs that it asks for, one for each of its prompts. Pure.

Refuses what the API has and Baton does not, by the name that the client used; everything else is left to
`router.api.validate`. Raises InvalidRequest or NotServed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.errors import FieldViolation, NotServed
from cluster.pb import generation_pb2 as pb
from router.api.violations import Violations, shown
from router.openai.bodies import (
    AllowedTools,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    NamedTool,
    ResponseFormat,
    StructuredOutputs,
    TokenizeBody,
    ToolBody,
    ToolChoice,
)

_DEEPEST = 32
"""Depth of nested lists and objects that a template may read: each level takes two or three messages, and protobuf
reads no more than a hundred levels."""
_MOST_VALUES = 65_536
"""Values, at any depth, in the messages, tools and keyword arguments of one conversation."""
_LONGEST_ID = 10
"""Digits of the largest token id that fits into 32 bits."""
INT32 = range(-(2**31), 2**31)
UINT32, _UINT64 = range(2**32), range(2**64)
_SAMPLING = pb.SamplingParams.DESCRIPTOR.fields
_FRACTIONS = [field.name for field in _SAMPLING if field.type == field.TYPE_FLOAT]
_WHOLE_NUMBERS = {
    **{field.name: INT32 for field in _SAMPLING if field.type == field.TYPE_INT32},
    **{field.name: UINT32 for field in _SAMPLING if field.type == field.TYPE_UINT32 and not field.is_repeated},
}
"""Sampling parameters that have the same name in a body, by their type."""


def completion_specs(body: CompletionBody, request_id: str) -> list[pb.GenerationSpec]:
    """Returns a spec for each prompt."""
    _refuse(
        best_of=(
            body.best_of is not None and body.best_of != (1 if body.n is None else body.n),
            "must be equal to n: all sequences are returned",
        ),
    )
    wrong = Violations()
    prompts = body.prompts
    if not prompts:
        wrong.add("prompt", "must hold at least one token (it is empty)")
    spec = _common(body, request_id, wrong, max_tokens=("max_tokens", body.max_tokens))
    spec.suffix = body.suffix or ""
    if body.logprobs is not None:
        set_whole(spec.output, "top_logprobs", "logprobs", body.logprobs, UINT32, wrong)
        if body.echo:
            spec.output.prompt_logprobs = max(spec.output.prompt_logprobs, spec.output.top_logprobs)
            if spec.suffix:
                wrong.add("echo", "with logprobs excludes suffix: the model reads the two in another order")
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            _check_ids(prompt, f"prompt[{number}]", wrong)
    wrong.raise_if_any()
    return [_with_prompt(spec, prompt) for prompt in prompts]


def chat_spec(body: ChatBody, request_id: str) -> pb.GenerationSpec:
    _refuse(
        modalities=(body.modalities not in (None, ["text"]), "must be [text]"),
    )
    wrong = Violations()
    most = body.max_completion_tokens
    name, most = ("max_tokens", body.max_tokens) if most is None else ("max_completion_tokens", most)
    spec = _common(body, request_id, wrong, max_tokens=(name, most))
    kwargs = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        kwargs["add_generation_prompt"] = body.add_generation_prompt
    spec.chat.CopyFrom(chat_of(body.messages, _plain(body.tools), kwargs, wrong))
    choose_tools(spec.chat.tool_choice, body.tool_choice, is_parallel=body.parallel_tool_calls is not False)
    if body.reasoning_effort is not None:
        spec.reasoning.effort = body.reasoning_effort
    if body.thinking_token_budget is not None:
        set_whole(spec.reasoning, "max_tokens", "thinking_token_budget", body.thinking_token_budget, UINT32, wrong)
    if body.top_logprobs is not None and not body.logprobs:
        wrong.add("top_logprobs", "needs logprobs: true")
    if body.logprobs:
        set_whole(spec.output, "top_logprobs", "top_logprobs", body.top_logprobs or 0, UINT32, wrong)
    if body.response_format is not None:
        _format(spec.sampling, body.response_format, wrong)
    wrong.raise_if_any()
    return spec


def choose_tools(wanted: pb.ToolChoice, choice: ToolChoice | None, *, is_parallel: bool) -> None:
    """Fills in `wanted`."""
    modes = {"none": wanted.MODE_NONE, "required": wanted.MODE_REQUIRED}
    wanted.single = not is_parallel
    match choice:
        case NamedTool():
            wanted.mode = wanted.MODE_REQUIRED
            wanted.names.append(choice.function.name)
        case AllowedTools():
            wanted.mode = modes.get(choice.allowed_tools.mode, wanted.MODE_AUTO)
            wanted.names.extend(tool.function.name for tool in choice.allowed_tools.tools)
        case None | str():
            wanted.mode = modes.get(choice or "auto", wanted.MODE_AUTO)


def names_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """Names in a body with these fields that differ from the usual ones, for `errors.failure_of`."""
    names = {"top_logprobs": "logprobs"} if "prompt" in fields else {}
    if fields.get("echo") and fields.get("prompt_logprobs") is None:
        names["prompt_logprobs"] = "logprobs"
    if fields.get("max_completion_tokens") is not None:
        names["max_output_tokens"] = "max_completion_tokens"
    if fields.get("structured_outputs") is not None:
        names |= {"json_schema": "structured_outputs.json", "json_object": "structured_outputs.json_object"}
    return names


def tokenize_request(body: TokenizeBody) -> pb.TokenizeRequest:
    wrong = Violations()
    if (body.prompt is None) == (body.messages is None):
        wrong.add("prompt", "exactly one of prompt or messages must be set")
        wrong.raise_if_any()
    request = pb.TokenizeRequest(model=body.model, add_special_tokens=body.add_special_tokens)
    if body.prompt is not None:
        request.text = body.prompt
    else:
        chat = chat_of(body.messages or [], _plain(body.tools), body.chat_template_kwargs or {}, wrong)
        request.chat.CopyFrom(chat)
    wrong.raise_if_any()
    return request


def detokenize_request(body: DetokenizeBody) -> pb.DetokenizeRequest:
    wrong = Violations()
    _check_ids(body.tokens, "tokens", wrong)
    wrong.raise_if_any()
    return pb.DetokenizeRequest(model=body.model, token_ids=body.tokens)


def _refuse(**given: tuple[bool, str]) -> None:
    """Raises NotServed. `given`: for each field of the API that is not served, whether it asks for something, and the
    remedy."""
    violations = tuple(FieldViolation(field, remedy) for field, (asks, remedy) in given.items() if asks)
    if violations:
        message = "; ".join(f"{v.field} is not served: {v.description}" for v in violations)
        raise NotServed(message, violations=violations)


def _with_prompt(common: pb.GenerationSpec, prompt: str | list[int]) -> pb.GenerationSpec:
    spec = pb.GenerationSpec()
    spec.CopyFrom(common)
    if isinstance(prompt, str):
        spec.text = prompt
    else:
        spec.token_ids.ids.extend(prompt)
    return spec


def _common(
    body: CompletionBody | ChatBody, request_id: str, wrong: Violations, *, max_tokens: tuple[str, int | None]
) -> pb.GenerationSpec:
    spec = pb.GenerationSpec(model=body.model, request_id=request_id)
    sampling, stopping = spec.sampling, spec.stopping
    for name in _FRACTIONS:
        value = getattr(body, name)
        if value is not None:
            setattr(sampling, name, value)
    for name, values in _WHOLE_NUMBERS.items():
        set_whole(sampling, name, name, getattr(body, name), values, wrong)
    _seed(sampling, body.seed, wrong)
    set_whole(stopping, "max_output_tokens", max_tokens[0], max_tokens[1], UINT32, wrong)
    set_whole(stopping, "min_output_tokens", "min_tokens", body.min_tokens, UINT32, wrong)
    stopping.stop.extend([body.stop] if isinstance(body.stop, str) else body.stop or ())
    stopping.include_stop_in_output, stopping.ignore_eos = body.include_stop_str_in_output, body.ignore_eos
    if _check_ids(body.stop_token_ids or (), "stop_token_ids", wrong):
        stopping.stop_token_ids.extend(body.stop_token_ids or ())
    _bias(sampling, body.logit_bias or {}, wrong)
    if body.structured_outputs is not None:
        _structure(sampling, body.structured_outputs, wrong)
    spec.output.include_timing = body.timing
    set_whole(spec.output, "prompt_logprobs", "prompt_logprobs", body.prompt_logprobs, UINT32, wrong)
    if body.stream and body.prompt_logprobs is not None:
        wrong.add("prompt_logprobs", "is of whole answers, and has no place in a stream; leave out one of them")
    spec.cache.cache_salt, spec.scheduling.session_id = body.cache_salt or "", body.session_id or ""
    set_whole(spec.scheduling, "priority", "priority", body.priority, INT32, wrong)
    return spec


def _check_ids(ids: Sequence[int], name: str, wrong: Violations) -> bool:
    """Whether each fits into the 32 bits of its field; `router.api.validate` knows the vocabulary."""
    do_fit = all(token_id in UINT32 for token_id in ids)
    if not do_fit:
        wrong.add(name, "token ids must be from 0 to the vocabulary's size")
    return do_fit


def set_whole(message: Any, field: str, name: str, value: int | None, values: range, wrong: Violations) -> None:
    """Sets a field if the value fits into its bits; `router.api.validate` checks what it may be."""
    if value is None:
        return
    if value in values:
        setattr(message, field, value)
    else:
        wrong.add(name, f"must be from {values[0]} to {values[-1]} (got {shown(value)})")


def _seed(sampling: pb.SamplingParams, seed: int | None, wrong: Violations) -> None:
    """Takes any 64 bits; a negative seed is the unsigned number with the same bits."""
    set_whole(sampling, "seed", "seed", seed if seed is None or seed >= 0 else seed + _UINT64.stop, _UINT64, wrong)


def _bias(sampling: pb.SamplingParams, biases: Mapping[str, float], wrong: Violations) -> None:
    for token_id, bias in biases.items():
        is_number = token_id.isascii() and token_id.isdigit() and len(token_id) <= _LONGEST_ID
        if is_number and int(token_id) in UINT32:
            sampling.logit_bias[int(token_id)] = bias
        else:
            wrong.add("logit_bias", f"keys must be token ids (got {token_id[:20]!r})")
            return


def _plain(tools: Sequence[ToolBody] | None) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in tools or ()]


def chat_of(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any],
    wrong: Violations,
) -> pb.ChatInput:
    """The conversation, whose objects keep their order; empty where it is wrong, which is added to `wrong`."""
    num_left = _MOST_VALUES
    for field, given in (
        *((f"messages[{number}]", each) for number, each in enumerate(messages)),
        *((f"tools[{number}]", each) for number, each in enumerate(tools)),
        ("chat_template_kwargs", template_kwargs),
    ):
        num_values = _num_values(given)
        if num_values is None:
            wrong.add(field, "nests too deep, or holds a number that JSON does not have")
        elif num_values > num_left:
            wrong.add(field, f"a conversation holds at most {_MOST_VALUES} values, and ends here; send less")
        num_left -= min(num_left, num_values or 0)
    if wrong.found:
        return pb.ChatInput()
    found = {"messages": messages, "tools": tools, "template_kwargs": template_kwargs}
    return pb.ChatInput(json=json.dumps(found, ensure_ascii=False))


def _num_values(value: object) -> int | None:
    """Returns how many values a JSON value holds, itself included; more than _MOST_VALUES are not counted to their end.
    None: they nest too deep, or a number is none of JSON's or as long as no float."""
    level, total = [value], 1
    for _ in range(_DEEPEST):
        inside = [each for each in level if isinstance(each, dict | list)]
        total += sum(map(len, inside))
        if total > _MOST_VALUES:
            return total
        level = [each for one in inside for each in (one.values() if isinstance(one, dict) else one)]
        if any(isinstance(each, int | float) and not abs(each) <= sys.float_info.max for each in level):
            return None
        if not level:
            return total
    return None if any(isinstance(each, dict | list) for each in level) else total


def _format(sampling: pb.SamplingParams, form: ResponseFormat, wrong: Violations) -> None:
    if form.type != "text" and sampling.WhichOneof("constraint") is not None:
        wrong.add("response_format", "cannot be set with structured_outputs, which says the same")
    if form.type == "json_object":
        sampling.json_object = True
    elif form.type == "json_schema":
        schema = form.json_schema.schema_ if form.json_schema is not None else None
        if schema is None:
            wrong.add("response_format.json_schema", "must be set, with its schema, where the type is json_schema")
        else:
            sampling.json_schema = json.dumps(schema)


def _structure(sampling: pb.SamplingParams, wanted: StructuredOutputs, wrong: Violations) -> None:
    given = wanted.model_dump(by_alias=True, exclude_none=True)
    if len(given) != 1:
        names = ", ".join(sorted(given)) or "none"
        wrong.add("structured_outputs", f"exactly one of json, regex, choice, grammar or json_object (got {names})")
        return
    ((kind, value),) = given.items()
    match kind:
        case "json":
            sampling.json_schema = value if isinstance(value, str) else json.dumps(value)
        case "regex":
            sampling.regex = value
        case "choice":
            sampling.choice.choices.extend(value)
        case "grammar":
            sampling.grammar_ebnf = value
        case "json_object":
            sampling.json_object = value
