"""`POST /v1/chat/completions`: a body in, a stream of events or one JSON object out."""

import secrets
import time
from collections.abc import AsyncIterator
from typing import Final

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from server.api.disconnect import ClientGoneError, unless_client_gone
from server.api.fold import Fold
from server.api.generate import Generation
from server.api.middleware import request_id
from server.api.openapi import json_body
from server.api.problems import from_bug
from server.api.schema import ChatBody
from server.api.service import Service
from server.api.sse import DONE, HEARTBEAT, EventStream, event
from server.api.wire import Chunk, ChunkChoice, Completion
from server.errors import M3Error

# Nobody reads it; the number is nginx's for a client that closed the connection.
CLIENT_GONE: Final = 499

router = APIRouter()

REQUEST_BODY: Final = {"requestBody": json_body(ChatBody)}


class Reply:
    """The answer to one request, in both forms; the JSON form is the fold of the stream's deltas."""

    def __init__(self, service: Service, identity: str) -> None:
        self.status = CLIENT_GONE  # until something better is known
        self._service = service
        self._request_id = identity
        self._generation = Generation(service)
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._include_usage = False
        self._is_admitted = False
        self._is_closed = False

    def admit(self) -> None:
        """Take a place among the open requests.

        Raises:
            EngineUnavailableError: the server is not ready.
            OverloadedError: there is no place.
        """
        self._service.admit()
        self._is_admitted = True

    async def start(self, raw: bytes) -> bool:
        """Hand the request to the engine; whether it wants a stream."""
        prepared = await self._generation.start(raw)
        self._include_usage = prepared.call.include_usage
        return prepared.call.stream

    async def completion(self) -> bytes:
        """The whole answer as JSON."""
        fold = Fold()
        while not self._generation.finished:
            fold.add(await self._generation.next())
        completion = Completion(
            id=self._id,
            created=self._created,
            model=self._service.settings.model_name,
            choices=fold.choices(),
            usage=self._generation.usage,
        )
        self.status = 200
        return msgspec.json.encode(completion)

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as events. A failure becomes the last event: the status line is long gone."""
        try:
            while not self._generation.finished:
                deltas = await self._generation.next()
                yield b"".join(event(self._chunk([delta])) for delta in deltas) or HEARTBEAT
            if self._include_usage:
                yield event(msgspec.structs.replace(self._chunk([]), usage=self._generation.usage))
            self.status = 200
            yield DONE
        except M3Error as error:
            yield self._failed(error)
        except Exception as error:
            yield self._failed(from_bug(error, self._request_id))

    def close(self) -> None:
        """Give back what the request holds. Idempotent and synchronous."""
        self._generation.close()
        if not self._is_closed:
            self._is_closed = True
            if self._is_admitted:
                self._service.discharge()
            self._service.metrics.request_ended(self.status, self._generation.elapsed_s())

    def _chunk(self, choices: list[ChunkChoice]) -> Chunk:
        usage = None if self._include_usage else UNSET
        model = self._service.settings.model_name
        return Chunk(id=self._id, created=self._created, model=model, choices=choices, usage=usage)

    def _failed(self, error: M3Error) -> bytes:
        self.status = error.status
        return event(error.body())


@router.post("/v1/chat/completions", openapi_extra=REQUEST_BODY)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    identity = request_id(request.scope)
    reply = Reply(service, identity)
    is_streaming = False
    try:
        reply.admit()  # a server that cannot take the request does not read its body
        raw = await request.body()
        if await unless_client_gone(request.receive, reply.start(raw)):
            is_streaming = True
            return EventStream(reply.events(), reply.close)
        return Response(await unless_client_gone(request.receive, reply.completion()), media_type="application/json")
    except (ClientGoneError, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    except M3Error as error:
        reply.status = error.status
        raise
    except Exception as error:
        problem = from_bug(error, identity)
        reply.status = problem.status
        raise problem from None
    finally:
        if not is_streaming:
            reply.close()
