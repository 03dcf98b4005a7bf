"""The routes of completions, models, tokens and health, and the application of all routes.

A handler reads and checks a body, asks the gate whose call it is, and calls the same methods that gRPC calls. Knows no
worker and no queue; every rule about a request is the service's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cluster.pb import admin_pb2
from cluster.pb import generation_pb2 as pb
from cluster.site import OwnSite
from router.api.call import Call
from router.api.model_service import ModelService
from router.openai import specs
from router.openai.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    ModelAnswer,
    ModelsAnswer,
    StatusAnswer,
    TextAnswer,
    TextCompletion,
    TextCompletionChunk,
    TokensAnswer,
    VersionAnswer,
)
from router.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.openai.errors import timing_headers
from router.openai.generating import (
    BodyKind,
    CompletionCall,
    CompletionEvents,
    Generate,
    GenerateStream,
    StreamedAnswer,
)
from router.openai.http import (
    EVERY,
    GENERATES,
    HAS_BODY,
    NEEDS_KEY,
    TEXT,
    Answer,
    Handler,
    Operation,
    Reception,
    json_of,
    new_app,
    parse,
)
from router.openai.logprobs import TokenBytes
from router.openai.schema import openapi

STATUS = admin_pb2.DESCRIPTOR.services_by_name["StatusService"].full_name


class OpenAiApp:
    """`app` is the ASGI application."""

    def __init__(
        self,
        generate: Generate,
        generate_stream: GenerateStream,
        models: ModelService,
        reception: Reception,
        token_bytes: TokenBytes,
        registries: Sequence[CollectorRegistry],
        can_serve: Callable[[], bool],
        *,
        site: OwnSite,
        more_operations: Sequence[Operation] = (),
        more_routes: Sequence[Route] = (),
    ) -> None:
        """`more_operations`, `more_routes`: of other parts of the API, in its document or not."""
        self._generate_one = generate
        self._generate_stream = generate_stream
        self._models = models
        self._reception = reception
        self._token_bytes = token_bytes
        self._registries = registries
        self._can_serve = can_serve
        self._started_at = int(time.time())
        self._operations = [*self._own_operations(), *more_operations]
        self.app = new_app(self._operations, more_routes, site)

    def _own_operations(self) -> list[Operation]:
        def get(
            path: str, handle: Handler, summary: str, failures: tuple[int, ...], answer: Any, **more: Any
        ) -> Operation:
            return Operation("GET", path, handle, summary, failures, answer, **more)

        has_model = (*HAS_BODY, 404, 429)
        return [
            Operation(
                "POST",
                "/v1/completions",
                lambda request: self._generate(request, CompletionBody),
                "Continue a text",
                GENERATES,
                TextCompletion,
                body=CompletionBody,
                chunk=TextCompletionChunk,
                can_resume=True,
            ),
            Operation(
                "POST",
                "/v1/chat/completions",
                lambda request: self._generate(request, ChatBody),
                "Answer in a conversation",
                GENERATES,
                ChatCompletion,
                body=ChatBody,
                chunk=ChatCompletionChunk,
                can_resume=True,
            ),
            Operation(
                "POST",
                "/tokenize",
                self._tokenize,
                "Token ids of a text or a conversation",
                has_model,
                TokensAnswer,
                body=TokenizeBody,
            ),
            Operation(
                "POST",
                "/detokenize",
                self._detokenize,
                "Text of token ids",
                has_model,
                TextAnswer,
                body=DetokenizeBody,
                names={"token_ids": "tokens"},
            ),
            get("/v1/models", self._list_models, "The served model", NEEDS_KEY, ModelsAnswer),
            get("/v1/models/{model:path}", self._get_model, "One model", (*NEEDS_KEY, 404), ModelAnswer),
            get("/metrics", self._metrics, "Metrics for Prometheus", NEEDS_KEY, None, media_type=TEXT),
            get("/healthz", self._is_alive, "Whether the router lives", EVERY, StatusAnswer),
            get(
                "/readyz", self._is_ready, "Whether workers are ready", EVERY, StatusAnswer, others={503: StatusAnswer}
            ),
            get("/version", self._version, "Baton's version", EVERY, VersionAnswer),
            get("/openapi.json", self._openapi, "This document", EVERY, dict[str, Any]),
        ]

    async def _generate(self, request: Request, kind: BodyKind) -> Answer:
        self._reception.check(request)
        request_id: str = request.state.request_id
        wanted = await self._reception.read(
            request, lambda data: CompletionCall.read(json_of(data), kind, request_id, self._token_bytes)
        )
        wanted = wanted.with_resume(request.headers)
        request.state.names = wanted.names
        call = self._reception.call(request)  # the key may have been revoked meanwhile
        if wanted.body.stream:
            return StreamedAnswer(wanted.specs, CompletionEvents(wanted), self._generate_stream, call, request_id)
        answer = await wanted.whole(self._generate_one, call, request.receive)
        return JSONResponse(answer, headers=timing_headers(answer.get("timing", {})))

    async def _list_models(self, request: Request) -> Response:
        self._reception.check(request)
        found = await self._models.ListModels(pb.ListModelsRequest(), Call())
        answer: ModelsAnswer = {"object": "list", "data": [self._model_answer(model) for model in found.models]}
        return JSONResponse(answer)

    async def _get_model(self, request: Request) -> Response:
        self._reception.check(request)
        found = await self._models.GetModel(pb.GetModelRequest(model=request.path_params["model"]), Call())
        return JSONResponse(self._model_answer(found.model))

    def _model_answer(self, model: pb.Model) -> ModelAnswer:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "baton",
            "max_model_len": model.max_context_tokens,
            "capabilities": list(model.capabilities),
        }

    async def _tokenize(self, request: Request) -> Response:
        self._reception.check(request)
        wanted = await self._reception.read(request, lambda data: specs.tokenize_request(parse(data, TokenizeBody)))
        found = await self._models.Tokenize(wanted, self._reception.call(request))
        tokens = list(found.token_ids)
        answer: TokensAnswer = {"tokens": tokens, "count": len(tokens), "max_model_len": found.max_context_tokens}
        return JSONResponse(answer)

    async def _detokenize(self, request: Request) -> Response:
        self._reception.check(request)
        wanted = await self._reception.read(request, lambda data: specs.detokenize_request(parse(data, DetokenizeBody)))
        answer: TextAnswer = {"prompt": (await self._models.Detokenize(wanted, self._reception.call(request))).text}
        return JSONResponse(answer)

    async def _metrics(self, request: Request) -> Response:
        """Answers the page of metrics. Where keys are needed, it needs one with the scope admin."""
        self._reception.check(request, STATUS)
        page = b"".join(map(generate_latest, self._registries))
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    async def _is_alive(self, request: Request) -> Response:
        return _status("ok")

    async def _is_ready(self, request: Request) -> Response:
        """Answers 503 until workers are there to serve."""
        return _status("ready") if self._can_serve() else _status("no prefill or no decode worker is ready", 503)

    async def _version(self, request: Request) -> Response:
        answer: VersionAnswer = {"version": version("baton")}
        return JSONResponse(answer)

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(openapi(version("baton"), self._operations))


def _status(text: str, status_code: int = 200) -> Response:
    answer: StatusAnswer = {"status": text}
    return JSONResponse(answer, status_code=status_code)
