"""The ASGI application: routes, middleware, error shapes, and a lifespan that starts and stops the service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from fastapi import FastAPI
from opentelemetry.trace import get_tracer

from server import __version__
from server.api import chat, completions, health, messages_api, models, responses, tokenize_routes
from server.api.access_log import AccessLogMiddleware
from server.api.admin import AdminServer
from server.api.auth import ApiKeys, AuthMiddleware
from server.api.chat_format import ChatFormat
from server.api.completions_schema import CompletionBody
from server.api.engine_client import EngineClient
from server.api.grammar_checker import GrammarChecker
from server.api.messages_errors import shaped_error
from server.api.messages_schema import CountTokensBody, MessagesBody
from server.api.middleware import BodyLimitMiddleware, RequestIdMiddleware
from server.api.openapi import describe
from server.api.problems import install_handlers
from server.api.responses_schema import ResponsesBody
from server.api.schema import ChatBody
from server.api.service import Service
from server.api.tokenize_prepare import DetokenizeBody, TokenizeBody
from server.api.tracing import TracingMiddleware
from server.media.pipeline import MediaPipeline
from server.settings import Settings

BODIES: Final = (
    ChatBody,
    CompletionBody,
    ResponsesBody,
    MessagesBody,
    CountTokensBody,
    TokenizeBody,
    DetokenizeBody,
)


def create_app(
    settings: Settings,
    *,
    engine: EngineClient | None = None,
    media: MediaPipeline | None = None,
    chat_format: ChatFormat | None = None,
    grammars: GrammarChecker | None = None,
    owns_process: bool = False,
) -> FastAPI:
    """Put an application together.

    Args:
        settings: the operator's.
        engine: what to use instead of an engine process made from the settings.
        media: what to use instead of a pool made from the settings.
        chat_format: what to use instead of the checkpoint's files.
        grammars: what to use instead of a process that judges grammars.
        owns_process: end the process with a non-zero code when the engine cannot start or dies, and start ahead what only
            some requests need; for a process that serves nothing else.

    Raises:
        SettingsError: the API keys cannot be used.
    """
    keys = ApiKeys.from_settings(settings)
    service = Service(settings, engine, media, chat_format, grammars, owns_process=owns_process)
    admin = None if settings.admin_port is None else AdminServer(service, settings.admin_host, settings.admin_port)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            if admin is not None:
                admin.start()
            await service.start(None if admin is None else admin.port)
            yield
        finally:
            await service.stop()
            if admin is not None:
                await asyncio.to_thread(admin.stop)

    app = FastAPI(title="m3-server", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.state.admin = admin
    routers = [chat.router, models.router, models.version_router, health.router]
    routers += [completions.router, responses.router, messages_api.router, tokenize_routes.router]
    for router in [*routers, health.metrics_router] if admin is None else routers:
        app.include_router(router)
    describe(app, *BODIES)
    install_handlers(app, shaped_error)
    app.add_middleware(BodyLimitMiddleware, max_bytes=settings.max_body_bytes)
    app.add_middleware(AuthMiddleware, keys=keys)
    app.add_middleware(AccessLogMiddleware)
    app.add_middleware(TracingMiddleware, tracer=get_tracer("m3-server", __version__))
    app.add_middleware(RequestIdMiddleware)  # added last, so it is outermost
    return app
