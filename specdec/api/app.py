"""The OpenAI-compatible HTTP application over a `GenerationEngine`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response

from specdec.api.body import read_model
from specdec.api.connection import run_while_connected
from specdec.api.convert import chat_to_generation, check_model_name, completion_to_generation
from specdec.api.errors import install_error_handlers, to_json
from specdec.api.logprobs import LogprobsWriter
from specdec.api.openapi import DescribedApp, describe_responses, request_body
from specdec.api.reply import ChatReply, CompletionReply, Reply, streamed_reply, whole_reply
from specdec.api.request_id import RequestScope
from specdec.api.responses import (
    ChatCompletion,
    Completion,
    HealthReport,
    ModelCard,
    ModelList,
    ReadinessReport,
)
from specdec.api.schema import ChatCompletionRequest, CompletionRequest, GenerationFields, RequestModel
from specdec.api.sse import EventStreamResponse, event_stream
from specdec.config import ApiSettings
from specdec.orchestrator.base import GenerationEngine
from specdec.types import GenerationRequest

Endpoint = Callable[..., Awaitable[Response]]


def create_app(engine: GenerationEngine, settings: ApiSettings, *, send_request_id: bool = True) -> FastAPI:
    """Build the application. Nothing is shared between two of them but ``engine``.

    Args:
        engine: generates; must be usable from the event loop that serves the application.
        settings: limits.
        send_request_id: whether responses carry ``x-request-id``. False behind a proxy that adds the header
            itself, as Ray Serve's does; two of them would reach the client as one, "id, id".
    """
    endpoints = Endpoints(engine, settings)
    app = DescribedApp(
        title="specdec",
        description="OpenAI-compatible completions, decoded speculatively with exactly the target model's output.",
        redirect_slashes=False,
    )
    app.add_middleware(RequestScope, send_request_id=send_request_id)
    install_error_handlers(app)
    posts: list[tuple[str, Endpoint, type[RequestModel], type]] = [
        ("/v1/completions", endpoints.completions, CompletionRequest, Completion),
        ("/v1/chat/completions", endpoints.chat_completions, ChatCompletionRequest, ChatCompletion),
    ]
    gets: list[tuple[str, Endpoint, type]] = [
        ("/v1/models", endpoints.models, ModelList),
        ("/v1/models/{model_id:path}", endpoints.model, ModelCard),
        ("/health", endpoints.health, HealthReport),
        ("/ready", endpoints.ready, ReadinessReport),
    ]
    for path, endpoint, body, answer in posts:
        app.add_api_route(
            path, endpoint, methods=["POST"], responses=describe_responses(answer), openapi_extra=request_body(body)
        )
    for path, endpoint, answer in gets:
        app.add_api_route(path, endpoint, methods=["GET"], responses=describe_responses(answer))
    return app


class Endpoints:
    """The handlers of one application."""

    def __init__(self, engine: GenerationEngine, settings: ApiSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._created = int(time.time())

    async def completions(self, request: Request) -> Response:
        """Continue a prompt."""
        body = await read_model(request, CompletionRequest, self._settings.max_body_bytes)
        response_id = f"cmpl-{request.state.request_id}"
        generation = completion_to_generation(body, self._engine, self._settings, response_id)
        return await self._answer(request, body, CompletionReply(*self._reply_arguments(response_id, body, generation)))

    async def chat_completions(self, request: Request) -> Response:
        """Give the assistant's next turn of a conversation."""
        body = await read_model(request, ChatCompletionRequest, self._settings.max_body_bytes)
        response_id = f"chatcmpl-{request.state.request_id}"
        generation = chat_to_generation(body, self._engine, self._settings, response_id)
        return await self._answer(request, body, ChatReply(*self._reply_arguments(response_id, body, generation)))

    async def models(self) -> Response:
        """List the served model."""
        models: ModelList = {"object": "list", "data": [self._model_card()]}
        return _json(models)

    async def model(self, model_id: str) -> Response:
        """Describe the served model. Its id may contain slashes."""
        check_model_name(model_id, self._engine)
        return _json(self._model_card())

    async def health(self) -> Response:
        """Say that this process is alive, whatever its workers do."""
        report: HealthReport = {"status": "ok"}
        return _json(report)

    async def ready(self) -> Response:
        """Say whether requests are answered in full: 200, or 503 with the reason."""
        readiness = await self._engine.readiness()
        report: ReadinessReport = {
            "ready": readiness.ready,
            "target": readiness.target,
            "draft": readiness.draft,
            "detail": readiness.detail,
        }
        return _json(report, status=200 if readiness.ready else 503)

    async def _answer(self, request: Request, body: GenerationFields, reply: Reply) -> Response:
        chunks = self._engine.generate(reply.request)
        if body.stream:
            objects = streamed_reply(chunks, reply, include_usage=body.include_usage)
            return EventStreamResponse(event_stream(objects, request.state.request_id))
        return _json(await run_while_connected(request.receive, whole_reply(chunks, reply)))

    def _reply_arguments(
        self, response_id: str, body: GenerationFields, generation: GenerationRequest
    ) -> tuple[str, str, GenerationRequest, bool, LogprobsWriter | None]:
        """What every `Reply` is made of."""
        logprobs = None if generation.sampling.logprobs is None else LogprobsWriter(self._engine.tokenizer)
        return response_id, self._engine.model_name, generation, body.return_token_ids is True, logprobs

    def _model_card(self) -> ModelCard:
        return {
            "id": self._engine.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "specdec",
            "max_model_len": self._engine.max_model_len,
        }


def _json(content: object, status: int = 200) -> Response:
    return Response(to_json(content), status, media_type="application/json")
