"""The routes of Anthropic's Messages API. A handler reads a body and calls the same methods that gRPC calls."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cluster.pb import generation_pb2 as pb
from router.anthropic.answers import MessageAnswer, MessageEvent, ModelInfo, ModelList, TokenCount
from router.anthropic.bodies import CountBody, MessagesBody
from router.anthropic.errors import ANTHROPIC, NAMES
from router.anthropic.events import MessageEvents, MessageForm, MessagePosition
from router.anthropic.specs import count_request, message_spec
from router.api.call import Call
from router.api.model_service import ModelService
from router.openai.errors import timing_headers
from router.openai.generating import Generate, GenerateStream, StreamedAnswer, resumption, together, unknown_event
from router.openai.http import GENERATES, HAS_BODY, NEEDS_KEY, Answer, Operation, Reception, parse

VERSION = "anthropic-version"
"""A header of all requests by Anthropic's clients."""


class MessageRoutes:
    """`operations`: for the HTTP API."""

    def __init__(
        self, generate: Generate, generate_stream: GenerateStream, models: ModelService, reception: Reception
    ) -> None:
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._generate = generate
        self._generate_stream = generate_stream
        self._models = models
        self._reception = reception
        self.operations = [
            Operation(
                "POST",
                "/v1/messages",
                self._create,
                "Answer in a conversation, as Anthropic's API does",
                (*GENERATES, 413, 529),
                MessageAnswer,
                body=MessagesBody,
                chunk=MessageEvent,
                names=NAMES,
                dialect=ANTHROPIC,
            ),
            Operation(
                "POST",
                "/v1/messages/count_tokens",
                self._count,
                "Tokens of a conversation, as Anthropic's API counts them",
                (*HAS_BODY, 404, 413, 429),
                TokenCount,
                body=CountBody,
                names=NAMES,
                dialect=ANTHROPIC,
            ),
            Operation(
                "GET",
                "/v1/models",
                self._list_models,
                "The served model, as Anthropic's API names it",
                NEEDS_KEY,
                ModelList,
                dialect=ANTHROPIC,
                header=VERSION,
            ),
            Operation(
                "GET",
                "/v1/models/{model:path}",
                self._get_model,
                "One model, as Anthropic's API names it",
                (*NEEDS_KEY, 404),
                ModelInfo,
                dialect=ANTHROPIC,
                header=VERSION,
            ),
        ]

    async def _create(self, request: Request) -> Answer:
        self._reception.check(request)
        request_id: str = request.state.request_id

        def read(data: bytes) -> tuple[MessagesBody, pb.GenerationSpec]:
            body = parse(data, MessagesBody)
            return body, message_spec(body, request_id)

        body, spec = await self._reception.read(request, read)
        form = MessageForm.of(body)
        may_resume, last = resumption(request.headers, is_streaming=bool(body.stream))
        call = self._reception.call(request)  # the key may have been revoked meanwhile
        if not body.stream:
            (answer,) = await together([self._generate(pb.GenerateRequest(spec=spec), call)], request.receive)
            message = form.whole(answer)
            return JSONResponse(message, headers=timing_headers(message.get("timing", {})))
        resumed = None if last is None else MessagePosition.parse(last)
        if last is not None and resumed is None:
            raise unknown_event(last)
        if may_resume:
            spec.resume.SetInParent()
        if resumed is not None:
            spec.resume.generation_id, spec.resume.next_token_index = resumed.generation_id, resumed.num_tokens
        events = MessageEvents(form, request_id, may_resume=may_resume, resumed=resumed)
        return StreamedAnswer([spec], events, self._generate_stream, call, request_id)

    async def _count(self, request: Request) -> Response:
        self._reception.check(request)
        wanted = await self._reception.read(request, lambda data: count_request(parse(data, CountBody)))
        found = await self._models.Tokenize(wanted, self._reception.call(request))
        answer: TokenCount = {"input_tokens": len(found.token_ids)}
        return JSONResponse(answer)

    async def _list_models(self, request: Request) -> Response:
        self._reception.check(request)
        found = await self._models.ListModels(pb.ListModelsRequest(), Call())
        models = [self._model_info(model) for model in found.models]
        ids = {"first_id": models[0]["id"], "last_id": models[-1]["id"]}
        return JSONResponse({"data": models, "has_more": False, **ids})

    async def _get_model(self, request: Request) -> Response:
        self._reception.check(request)
        found = await self._models.GetModel(pb.GetModelRequest(model=request.path_params["model"]), Call())
        return JSONResponse(self._model_info(found.model))

    def _model_info(self, model: pb.Model) -> ModelInfo:
        return {
            "type": "model",
            "id": model.name,
            "display_name": model.name,
            "created_at": self._started_at,
            "max_input_tokens": model.max_input_tokens,
            "max_tokens": model.max_output_tokens,
            "lifecycle": "active",
            "capabilities": None,
            "line": None,
            "deprecated_at": None,
            "retires_at": None,
        }
