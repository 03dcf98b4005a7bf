"""Questions about the served model: its card, the tokens of a text or a chat, the text of tokens.

These are methods of GenerationService that need no worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from cluster.pb import generation_pb2 as pb
from router.api.call import INLINE_BYTES, Call, run_aside
from router.api.chat import read_chat
from router.api.served_model import ServedModel
from router.api.tokenizer import Encoded, Tokenizer
from router.api.violations import Violations
from router.queue.waiting_queue import WaitingQueue

_CAPABILITIES = (
    "text",
    "token_ids",
    "streaming",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "stop_strings",
    "structured_outputs",
    "prefix_cache",
)


class ModelService:
    """`executor` runs the tokenizer on long texts; `weights_revision` is what the workers report, empty while none
    has. What takes the tokenizer's time counts in the quotas of `waiting`."""

    def __init__(
        self,
        model: ServedModel,
        tokenizer: Tokenizer,
        executor: Executor,
        weights_revision: Callable[[], str],
        waiting: WaitingQueue,
        chat_capabilities: Sequence[str],
    ) -> None:
        self._capabilities = [*_CAPABILITIES, *chat_capabilities]
        self._model = model
        self._tokenizer = tokenizer
        self._executor = executor
        self._waiting = waiting
        self._weights_revision = weights_revision

    async def Tokenize(self, request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        self._waiting.refuse_over_quota(call.principal)
        encoded = await run_aside(request.ByteSize() > INLINE_BYTES, lambda: self._tokenize(request), self._executor)
        self._waiting.charge(call.principal, len(encoded.token_ids))
        offsets = encoded.offsets if request.return_offsets else ()
        return pb.TokenizeResponse(
            token_ids=encoded.token_ids,
            offsets=[pb.TokenOffset(start=start, end=end) for start, end in offsets],
            max_context_tokens=self._model.max_model_len,
        )

    async def Detokenize(self, request: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        """Returns the text that generation would have given for these tokens: special tokens have none."""
        self._model.check_name("model", request.model)
        wrong = Violations()
        wrong.token_ids("token_ids", request.token_ids, self._model.vocab_size)
        wrong.raise_if_any()
        self._waiting.refuse_over_quota(call.principal)
        self._waiting.charge(call.principal, len(request.token_ids))
        is_long = request.ByteSize() > INLINE_BYTES
        text = await run_aside(is_long, lambda: self._tokenizer.decode(request.token_ids), self._executor)
        return pb.DetokenizeResponse(text=text)

    async def GetModel(self, request: pb.GetModelRequest, call: Call) -> pb.GetModelResponse:
        self._model.check_name("model", request.model)
        return pb.GetModelResponse(model=self._card())

    async def ListModels(self, request: pb.ListModelsRequest, call: Call) -> pb.ListModelsResponse:
        wrong = Violations()
        if request.page_size < 0:
            wrong.add("page_size", f"must not be negative (got {request.page_size})")
        if request.page_token:
            wrong.add("page_token", "is not one that this server gave; there is one page only")
        wrong.raise_if_any()
        return pb.ListModelsResponse(models=[self._card()])

    def _tokenize(self, request: pb.TokenizeRequest) -> Encoded:
        self._model.check_name("model", request.model)
        wrong = Violations()
        kind = request.WhichOneof("input")
        if kind is None:
            wrong.add("input", "exactly one of text or chat must be set (none is)")
        prompt = read_chat(request.chat, wrong, "chat", request.reasoning) if kind == "chat" else request.text
        wrong.raise_if_any()
        return self._tokenizer.encode_prompt(prompt, add_special_tokens=request.add_special_tokens)

    def _card(self) -> pb.Model:
        model, tokenizer = self._model, self._tokenizer
        return pb.Model(
            name=model.name,
            max_context_tokens=model.max_model_len,
            max_input_tokens=model.max_model_len - 1,
            max_output_tokens=model.max_model_len - 1,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            tokenizer_sha256=tokenizer.sha256,
            weights_revision=self._weights_revision(),
            default_sampling=model.defaults,
            capabilities=self._capabilities,
        )
