"""A span for every request, in the client's trace when it sends one (W3C `traceparent`).

Spans go to whatever OpenTelemetry SDK the process was started with, as `opentelemetry-instrument` does; the
API alone, which is all this server needs, drops them. What clients and the model say is not in them.
"""

from typing import Final

from opentelemetry import propagate
from opentelemetry.trace import SpanKind, StatusCode, Tracer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.access_log import QUIET_PATHS, note_of
from server.api.middleware import WatchedSend, request_id

FIRST_SERVER_ERROR: Final = 500


class TracingMiddleware:
    """Opens and closes the spans."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self.app = app
        self.tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http" or scope["path"] in QUIET_PATHS:
            await self.app(scope, receive, send)
            return
        watched = WatchedSend(send)
        parent = propagate.extract(dict(Headers(scope=scope).items()))
        span = self.tracer.start_span(scope["method"], parent, SpanKind.SERVER)
        try:
            await self.app(scope, receive, watched)
        finally:
            note = note_of(scope)
            route = getattr(scope.get("route"), "path", None)  # paths that no route has would be names without number
            if route is not None:
                span.update_name(f"{scope['method']} {route}")
            ended = watched.status if note.status is None else note.status  # a stream's own end, where there was one
            attributes = {
                "http.request.method": scope["method"],
                "http.route": route,
                "url.path": scope["path"],
                "http.response.status_code": ended,
                "m3.request_id": request_id(scope),
                "gen_ai.usage.input_tokens": note.num_prompt_tokens,
                "gen_ai.usage.output_tokens": note.num_output_tokens,
                "gen_ai.response.time_to_first_chunk": note.first_token_s,
            }
            span.set_attributes({name: value for name, value in attributes.items() if value is not None})
            if ended is None or ended >= FIRST_SERVER_ERROR:
                span.set_status(StatusCode.ERROR)
            span.end()
