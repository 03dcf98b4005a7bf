"""The one validation layer: a GenerationSpec in, a frozen ValidatedRequest with every default filled in out.

Every front end comes through here. All violations of a request are collected and reported together. Pure: the prompt's
encoding, a trial of grammars and a fresh seed are passed in; it may run in any thread. Knows no worker, queue, stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cluster.errors import FieldViolation, NotServed, OutOfRange
from cluster.pb import generation_pb2, worker_pb2
from router.api.call import LONGEST_NAME, MOST_PRIORITY, ValidatedRequest
from router.api.chat import EFFORTS, Chat, Prompt, read_chat
from router.api.grammar import LONGEST_PROBLEM, TryGrammar, WrongTool, read_constraint
from router.api.infill import Infill, InfillTokens
from router.api.sampling import resolve_sampling
from router.api.served_model import ServedModel
from router.api.violations import Violations, invalid, shortened
from router.tool_calls.output import OutputForm
from router.tool_calls.parts import SequenceParts

MOST_STOP_STRINGS = 16
LONGEST_STOP_STRING = 256
MOST_STOP_TOKENS = 64
MOST_TOP_LOGPROBS = 20
LARGEST_STARTED_BYTES = 4_000_000
"""Size of the logprobs of a prompt, which one message carries: gRPC's clients take 4 MiB by default."""
LONGEST_TIMEOUT_S = 24 * 3600.0

Encode = Callable[[Prompt], tuple[int, ...]]
"""Token ids of a text or chat prompt; raises BatonError when the chat cannot be rendered."""
FormOf = Callable[[Chat, tuple[int, ...]], OutputForm | None]
"""What the outputs of a chat may hold beside text, given its ids."""
TryForm = Callable[[OutputForm, str], str]
"""The grammar of outputs of this form, whose answer is held to a grammar (empty: to none); empty: they are free. Raises
ValueError for one that cannot be followed."""


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt that was read, and what is wrong with it; its ids are empty then."""

    token_ids: tuple[int, ...]
    form: OutputForm | None
    wrong: Violations
    too_long: Violations
    end_ids: tuple[int, ...] = ()
    """Tokens that end an output beside the model's own: those of a text that is filled in."""


def read_prompt(
    spec: generation_pb2.GenerationSpec,
    model: ServedModel,
    encode: Encode,
    form_of: FormOf = lambda chat, token_ids: None,
    *,
    infill: InfillTokens | None = None,
) -> ReadPrompt:
    """The first part of `validate`. `infill`: how `encode` writes a text between two; None: it cannot. Raises NotFound
    (model) or NotServed, and what `encode` raises."""
    model.check_name("spec.model", spec.model)
    _refuse_not_served(spec, infill)
    wrong = Violations("spec.")
    too_long = Violations("spec.")
    token_ids, form = _prompt(spec, model, encode, form_of, wrong, too_long)
    return ReadPrompt(token_ids, form, wrong, too_long, infill.end_ids if infill is not None and spec.suffix else ())


def validate(
    spec: generation_pb2.GenerationSpec,
    model: ServedModel,
    prompt: ReadPrompt | Encode,
    *,
    try_grammar: TryGrammar,
    fresh_seed: int,
    is_streaming: bool = True,
    tenant: str = "",
    try_form: TryForm = lambda form, content: content,
) -> ValidatedRequest:
    """Raises NotFound (model), NotServed, InvalidRequest or OutOfRange (longer than the context), in this order.

    `is_streaming`: it is a GenerateStream, whose answer has fields that Generate's has not.
    `tenant`: the owner of the request; empty where there are no tenants. `prompt`: read before, or how it
    is encoded.
    """
    if not isinstance(prompt, ReadPrompt):
        prompt = read_prompt(spec, model, prompt)
    token_ids, form, wrong, too_long = prompt.token_ids, prompt.form, prompt.wrong, prompt.too_long
    params = resolve_sampling(
        spec.sampling,
        model.defaults,
        wrong,
        vocab_size=model.vocab_size,
        max_sequences=model.max_sequences,
        fresh_seed=fresh_seed,
    )
    sampling = worker_pb2.Sampling(params=params)
    _stopping(spec.stopping, (*model.eos_token_ids, *prompt.end_ids), model, len(token_ids), sampling, wrong, too_long)
    _constrain(spec, model, try_grammar, sampling, wrong)
    if form is not None:
        _constrain_form(spec, form, model, try_form, sampling, wrong)
    _reasoning(spec, wrong)
    _output(spec.output, sampling, len(token_ids), wrong)
    queue_timeout_s = _seconds(spec, "scheduling", "queue_timeout", wrong)
    retain_s = _seconds(spec, "cache", "retain_for", wrong) or 0.0
    wrong.number("scheduling.priority", spec.scheduling.priority, -MOST_PRIORITY, MOST_PRIORITY)
    _names(spec, wrong)
    if wrong.found:
        raise invalid(wrong.found + too_long.found)
    if too_long.found:
        raise OutOfRange(invalid(too_long.found).message, violations=too_long.found)
    output = spec.output
    return ValidatedRequest(
        prompt_token_ids=token_ids,
        sampling=sampling,
        stop=tuple(dict.fromkeys(spec.stopping.stop)),
        include_stop_in_output=spec.stopping.include_stop_in_output,
        wants_text=output.text if output.HasField("text") else True,
        wants_token_ids=output.token_ids,
        wants_logprobs=output.HasField("top_logprobs"),
        wants_timing=output.include_timing,
        stream_interval_tokens=output.stream_interval_tokens or None,
        cache_salt=salt_of(tenant, spec.cache.cache_salt),
        bypass_prefix_cache=spec.cache.bypass_prefix_cache,
        queue_timeout_s=queue_timeout_s,
        priority=spec.scheduling.priority,
        prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        client_request_id=spec.request_id,
        session_id=spec.scheduling.session_id,
        retain_s=retain_s,
        new_parts=partial(SequenceParts, form, streams_calls=is_streaming and bool(sampling.grammar)) if form else None,
        marks=form.marks if form is not None else frozenset(),
    )


def salt_of(tenant: str, client_salt: str) -> bytes:
    """The salt that keeps prefix caches apart. It differs for any two pairs: a tenant's name holds no zero byte."""
    own = client_salt.encode("utf-8")
    return b"\0" + tenant.encode("utf-8") + b"\0" + own if tenant else own


def _refuse_not_served(spec: generation_pb2.GenerationSpec, infill: InfillTokens | None) -> None:
    given = {
        "sampling.bad_words": bool(spec.sampling.bad_words),
        "extensions": spec.HasField("extensions"),
    }
    not_yet = "is not served yet; leave it unset"
    violations = [FieldViolation(f"spec.{field}", not_yet) for field, is_given in given.items() if is_given]
    if spec.suffix and infill is None:
        why = "is not served: this model's tokenizer has no tokens for filling in the middle; leave it out"
        violations.append(FieldViolation("spec.suffix", why))
    if violations:
        raise NotServed("; ".join(f"{v.field} {v.description}" for v in violations), violations=tuple(violations))


def _prompt(
    spec: generation_pb2.GenerationSpec,
    model: ServedModel,
    encode: Encode,
    form_of: FormOf,
    wrong: Violations,
    too_long: Violations,
) -> tuple[tuple[int, ...], OutputForm | None]:
    """The prompt's ids, and the form of its outputs; no ids when it is wrong, and `wrong` or `too_long` says so."""
    kind = spec.WhichOneof("prompt")
    if kind is None:
        wrong.add("prompt", "exactly one of text, token_ids or chat must be set (none is)")
        return (), None
    num_wrong = len(wrong.found)
    prompt: Prompt = Infill(spec.text, spec.suffix) if spec.suffix else spec.text
    if spec.suffix and kind != "text":
        wrong.add("suffix", "goes with a text alone, not with token ids or a chat")
    if kind == "chat":
        prompt = read_chat(spec.chat, wrong, "chat", spec.reasoning)
    elif kind == "token_ids" and len(spec.token_ids.ids) < model.max_model_len:
        wrong.token_ids("token_ids.ids", spec.token_ids.ids, model.vocab_size)
    if len(wrong.found) > num_wrong:
        return (), None
    if kind == "token_ids":
        length = len(spec.token_ids.ids)
        token_ids = tuple(spec.token_ids.ids) if length < model.max_model_len else ()
    else:
        token_ids = encode(prompt) if prompt else ()
        length = len(token_ids)
    if length == 0:
        wrong.add(kind, "the prompt must hold at least one token (it is empty)")
    elif length >= model.max_model_len:
        most = model.max_model_len - 1
        too_long.add(kind, f"the prompt has {length} tokens, the context of {model.max_model_len} allows {most}")
        return (), None
    return token_ids, form_of(prompt, token_ids) if isinstance(prompt, Chat) else None


def _stopping(
    criteria: generation_pb2.StoppingCriteria,
    end_ids: Sequence[int],
    model: ServedModel,
    num_prompt_tokens: int,
    sampling: worker_pb2.Sampling,
    wrong: Violations,
    too_long: Violations,
) -> None:
    """Fills in what ends a sequence, by itself `end_ids`; without `max_output_tokens`, the end of the context."""
    room = model.max_model_len - num_prompt_tokens
    if criteria.HasField("max_output_tokens"):
        most = criteria.max_output_tokens
        if most < 1:
            wrong.add("stopping.max_output_tokens", f"must be at least 1 (got {most})")
        if most > room and criteria.clip_to_context:
            most = room
        elif most > room:
            what = f"{num_prompt_tokens} prompt tokens and {most} output tokens exceed the context of"
            too_long.add("stopping.max_output_tokens", f"{what} {model.max_model_len}; at most {room} fit")
    else:
        most = min(room, model.max_new_tokens or room)
    if criteria.min_output_tokens > most:
        text = f"must be at most spec.stopping.max_output_tokens, {most} (got {criteria.min_output_tokens})"
        wrong.add("stopping.min_output_tokens", text)
    _stops(criteria, model, wrong)
    resolved = sampling.stopping
    resolved.max_output_tokens, resolved.min_output_tokens = most, criteria.min_output_tokens
    eos = () if criteria.ignore_eos else end_ids
    resolved.stop_token_ids.extend(sorted({*eos, *criteria.stop_token_ids[:MOST_STOP_TOKENS]}))


def _stops(criteria: generation_pb2.StoppingCriteria, model: ServedModel, wrong: Violations) -> None:
    if wrong.at_most("stopping.stop", criteria.stop, MOST_STOP_STRINGS, "stop strings"):
        for index, stop in enumerate(criteria.stop):
            if not 1 <= len(stop) <= LONGEST_STOP_STRING:
                text = f"must be 1 to {LONGEST_STOP_STRING} characters long (got {len(stop)})"
                wrong.add(f"stopping.stop[{index}]", text)
    if wrong.at_most("stopping.stop_token_ids", criteria.stop_token_ids, MOST_STOP_TOKENS, "ids"):
        wrong.token_ids("stopping.stop_token_ids", criteria.stop_token_ids, model.vocab_size)


def _constrain(
    spec: generation_pb2.GenerationSpec,
    model: ServedModel,
    try_grammar: TryGrammar,
    sampling: worker_pb2.Sampling,
    wrong: Violations,
) -> None:
    """Fills in the grammar; a constrained output ends by an end-of-sequence token, once it is whole."""
    sampling.grammar = read_constraint(spec.sampling, try_grammar, wrong)
    if not sampling.grammar:
        return
    field = f"sampling.{spec.sampling.WhichOneof('constraint')}"
    if not model.eos_token_ids:
        wrong.add(field, "needs a model with an end-of-sequence token, and this one names none")
    if spec.stopping.ignore_eos:
        wrong.add("stopping.ignore_eos", f"cannot be set with {field}, whose output ends by such a token")
    if sampling.params.allowed_token_ids:
        wrong.add("sampling.allowed_token_ids", f"cannot be set with {field}, which says what is allowed")


def _constrain_form(
    spec: generation_pb2.GenerationSpec,
    form: OutputForm,
    model: ServedModel,
    try_form: TryForm,
    sampling: worker_pb2.Sampling,
    wrong: Violations,
) -> None:
    """Makes the grammar one of thinking, calls and the answer. Where an output cannot be held to one, it is free unless
    it must call."""
    can_follow = model.eos_token_ids and not spec.stopping.ignore_eos and not sampling.params.allowed_token_ids
    if not can_follow and not sampling.grammar:
        if form.must_call:
            why = "cannot be followed with ignore_eos, allowed_token_ids, or a model without an end-of-sequence token"
            wrong.add("chat.tool_choice", why)
        return
    try:
        sampling.grammar = try_form(form, sampling.grammar)
    except ValueError as error:
        field = f"chat.tools[{error.index}].function.parameters" if isinstance(error, WrongTool) else "chat.tools"
        wrong.add(field, f"cannot be followed: {shortened(' '.join(str(error).split()), LONGEST_PROBLEM)}")


def _reasoning(spec: generation_pb2.GenerationSpec, wrong: Violations) -> None:
    if spec.HasField("reasoning") and not spec.HasField("chat"):
        wrong.add("reasoning", "is for chats: what a text leads to is not known; leave it unset")
    if spec.reasoning.effort not in ("", *EFFORTS):
        wrong.add("reasoning.effort", f"must be one of {', '.join(EFFORTS)} (got {shortened(spec.reasoning.effort)!r})")


def _output(
    output: generation_pb2.OutputOptions, sampling: worker_pb2.Sampling, num_prompt_tokens: int, wrong: Violations
) -> None:
    if output.HasField("top_logprobs"):
        wrong.number("output.top_logprobs", output.top_logprobs, 0, MOST_TOP_LOGPROBS)
        sampling.top_logprobs = output.top_logprobs
    if output.HasField("prompt_logprobs"):
        wrong.number("output.prompt_logprobs", output.prompt_logprobs, 0, MOST_TOP_LOGPROBS)
        most = most_prompt_logprobs(num_prompt_tokens)
        if most < output.prompt_logprobs <= MOST_TOP_LOGPROBS:
            remedy = f"ask for at most {most}" if most >= 0 else "leave it unset"
            what = f"{output.prompt_logprobs} for each of {num_prompt_tokens} prompt tokens do not fit in one message"
            wrong.add("output.prompt_logprobs", f"{what}; {remedy}")
    if output.HasField("stream_interval_tokens") and output.stream_interval_tokens < 1:
        wrong.add("output.stream_interval_tokens", "must be at least 1 (got 0)")


def most_prompt_logprobs(num_prompt_tokens: int) -> int:
    """Returns how many alternatives for each prompt token LARGEST_STARTED_BYTES hold; -1: not even the tokens' own
    logprobs.

    A TokenLogprob takes at most 23 bytes, and 13 more for each alternative.
    """
    return max(-1, (LARGEST_STARTED_BYTES // max(1, num_prompt_tokens) - 23) // 13)


def _names(spec: generation_pb2.GenerationSpec, wrong: Violations) -> None:
    for field, text in (
        ("request_id", spec.request_id),
        ("cache.cache_salt", spec.cache.cache_salt),
        ("scheduling.session_id", spec.scheduling.session_id),
    ):
        if len(text) > LONGEST_NAME:
            wrong.add(field, f"must be at most {LONGEST_NAME} characters long (got {len(text)})")


def _seconds(spec: generation_pb2.GenerationSpec, section: str, name: str, wrong: Violations) -> float | None:
    """A duration of the request; None where it is not set."""
    options = getattr(spec, section)
    if not options.HasField(name):
        return None
    duration = getattr(options, name)
    seconds: float = duration.seconds + duration.nanos / 1e9
    wrong.number(f"{section}.{name}", seconds, 0, LONGEST_TIMEOUT_S)
    return seconds
