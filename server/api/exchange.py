"""One request from admission to its last byte, the same for every endpoint that generates.

An endpoint brings a `Form`: how its body becomes a prepared request, and how deltas become its JSON or its events. Everything
else is here: the place among the open requests, a client that leaves, errors before and after the first byte, metrics.
"""

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Final, Generic, Protocol, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from server.api.access_log import Note, note_of
from server.api.body import RequestBody, body_of
from server.api.disconnect import ClientGoneError, unless_client_gone
from server.api.generate import Generation
from server.api.middleware import request_id
from server.api.open_requests import Place
from server.api.prepare import Job, Prepared
from server.api.problems import from_bug
from server.api.service import Service
from server.api.sse import EventStream
from server.errors import M3Error

MAX_LOGGED_LEN: Final = 32_768
# Nobody reads it; the number is nginx's for a client that closed the connection.
CLIENT_GONE: Final = 499

R = TypeVar("R", bound=Prepared)


class Form(Protocol[R]):
    """One request in the shapes of one API. Made for each request; `begin` is called first."""

    @property
    def job(self) -> Job[R]:
        """How its bodies are prepared."""
        ...

    def begin(self, prepared: R) -> None:
        """Take what was made of the body; `call.form.stream` says which of the two forms is sent."""
        ...

    async def whole(self, generation: Generation) -> bytes:
        """The whole answer as JSON."""
        ...

    def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The answer as server-sent events, including those that close it."""
        ...

    def failed(self, error: M3Error) -> bytes:
        """The last event of a stream that breaks off."""
        ...


class Exchange(Generic[R]):
    """One request and what it holds."""

    def __init__(self, service: Service, form: Form[R], identity: str, note: Note) -> None:
        self.status = CLIENT_GONE  # until something better is known
        self.generation = Generation(service)
        self._service = service
        self._form = form
        self._request_id = identity
        self._note = note
        self._body: RequestBody | None = None
        self._place: Place | None = None
        self._is_closed = False

    def admit(self) -> None:
        """Take a place among the open requests.

        Raises:
            EngineUnavailableError: the server is not ready, or drains.
            OverloadedError: there is no place.
        """
        self._place = self._service.admit()

    async def receive(self, request: Request) -> None:
        """Wait for the body."""
        self._body = await body_of(request, self._service.bodies, self._service.settings.body_timeout_s)

    async def start(self) -> bool:
        """Hand the request to the engine; whether it wants a stream. The body, which may be large, does not outlast it."""
        body = self._body
        assert body is not None
        if self._service.settings.log_content:
            self._note.body = body.head(MAX_LOGGED_LEN).decode(errors="replace")
        prepared = await self._service.prepare(self._form.job, body)
        self._form.begin(prepared)
        await self.generation.start(prepared)
        body.close()
        self._note.stream = prepared.call.form.stream
        return prepared.call.form.stream

    async def whole(self) -> bytes:
        """The whole answer as JSON."""
        answer = await self._form.whole(self.generation)
        self.status = 200
        return answer

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as events. A failure becomes the last event: the status line is long gone."""
        try:
            async for part in self._form.events(self.generation):
                yield part
            self.status = 200
        except M3Error as error:
            yield self._failed(error)
        except Exception as error:
            yield self._failed(from_bug(error, self._request_id))

    def close(self) -> None:
        """Give back what the request holds. Idempotent and synchronous."""
        self.generation.close()
        if self._body is not None:
            self._body.close()
        if not self._is_closed:
            self._is_closed = True
            if self._place is not None:
                self._place.give_back()
            self._count()
            self._write_note()

    def _count(self) -> None:
        counts, generation = self._service.metrics.front, self.generation
        counts.request_ended(self.status)
        if self._place is not None and self.status == CLIENT_GONE:
            counts.client_left()
        if generation.is_submitted:
            done = "length" if generation.hit_limit else "stop"
            counts.generation_ended({HTTPStatus.OK: done, CLIENT_GONE: "abort"}.get(self.status, "error"))
            if self.status == HTTPStatus.OK:
                generation.answered()

    def stream(self) -> EventStream:
        """The response that sends the events."""
        if self._place is not None:
            self._place.keep_task()
        return EventStream(self.events(), self.close, self._service.settings.slow_client_timeout_s)

    def cancelled(self, error: asyncio.CancelledError) -> BaseException:
        """What to raise for a cancellation before the first byte."""
        reason = error if self._place is None else self._place.reason(error)
        if isinstance(reason, M3Error):
            self.status = reason.status
        return reason

    def _write_note(self) -> None:
        self._note.status = self.status
        if self.generation.prompts:
            usage = self.generation.usage
            self._note.num_prompt_tokens = usage.prompt_tokens
            self._note.num_cached_tokens = usage.prompt_tokens_details.cached_tokens
            self._note.num_output_tokens = usage.completion_tokens
            self._note.first_token_s = self.generation.timeline.first_token_s

    def _failed(self, error: M3Error) -> bytes:
        self.status = error.status
        return self._form.failed(error)


async def answer(request: Request, form: Form[R]) -> Response:
    """Run one request to its end, or to the response that streams it.

    Raises:
        M3Error: it failed before its first byte.
    """
    service: Service = request.app.state.service
    identity = request_id(request.scope)
    exchange = Exchange(service, form, identity, note_of(request.scope))
    is_streaming = False
    try:
        exchange.admit()  # a server that cannot take the request does not read its body
        await exchange.receive(request)
        if await unless_client_gone(request.receive, exchange.start()):
            is_streaming = True
            return exchange.stream()
        return Response(await unless_client_gone(request.receive, exchange.whole()), media_type="application/json")
    except (ClientGoneError, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    except asyncio.CancelledError as error:
        raise exchange.cancelled(error) from None
    except M3Error as error:
        exchange.status = error.status
        raise
    except Exception as error:
        problem = from_bug(error, identity)
        exchange.status = problem.status
        raise problem from None
    finally:
        if not is_streaming:
            exchange.close()
