"""Errors as clients see them: OpenAI's error object and the right status, whoever raised the error.

Nothing here shows what a client sent beyond the names of its fields, and a bug shows nothing but that it is one.
"""

import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Final

import msgspec
from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from server.api.middleware import request_id
from server.errors import (
    BadRequestError,
    BodyTimeoutError,
    EngineUnavailableError,
    M3Error,
    OverloadedError,
    PayloadTooLargeError,
    ShuttingDownError,
)
from server.logs import frames_of

logger = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 5

# Pydantic's words where ours say it better; the rest of its messages are good enough.
MESSAGES: Final = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "list_type": "must be an array",
    "missing": "is required",
    "model_type": "must be an object",
    "string_type": "must be a string",
}


def param_path(location: Sequence[str | int]) -> str | None:
    """OpenAI's spelling of a place in the body: ("messages", 0, "content") -> `messages[0].content`."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("<"):
            path += f".{step}" if path else step
    return path or None


def from_validation(error: ValidationError) -> BadRequestError:
    """The first fault that pydantic found, as a client's error."""
    fault = error.errors(include_url=False, include_input=False)[0]
    if fault["type"] == "json_invalid":
        return BadRequestError(f"the body is not valid JSON: {fault['ctx']['error']}", code="invalid_json")
    param = param_path(fault["loc"])
    text = MESSAGES.get(fault["type"]) or fault["msg"][0].lower() + fault["msg"][1:]
    if fault["type"] in MESSAGES:
        return BadRequestError(f"{param or 'the body'} {text}", param=param)
    return BadRequestError(f"{param or 'the body'}: {text}", param=param)


def error_response(error: M3Error) -> Response:
    """The whole answer to a request that failed before its first byte."""
    headers = {}
    if isinstance(error, EngineUnavailableError | OverloadedError):
        headers["retry-after"] = str(RETRY_AFTER_S)
    if isinstance(error, PayloadTooLargeError | BodyTimeoutError | ShuttingDownError):
        headers["connection"] = "close"  # the rest of the body is not read, or nobody will read the next request
    return Response(msgspec.json.encode(error.body()), error.status, headers, media_type="application/json")


def from_bug(error: Exception, request_id: str) -> M3Error:
    """Log where an unexpected exception came from, without its text, which may quote the request; the client's error."""
    logger.error("request %s failed with %s\n%s", request_id, type(error).__name__, frames_of(error))
    return M3Error("internal error; the server's log has the details under this request's id", code="internal_error")


def install_handlers(
    app: FastAPI, answer: Callable[[Scope, M3Error], Response] = lambda scope, error: error_response(error)
) -> None:
    """Give every error that leaves a route the shape that `answer` knows, OpenAI's unless told otherwise."""

    async def on_m3_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, M3Error)
        return answer(request.scope, error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        code = {404: "not_found", 405: "method_not_allowed"}.get(status, "http_error")
        problem = M3Error(f"{status.phrase}: {request.method} {request.url.path}", code=code)
        problem.status = status
        problem.type = "invalid_request_error" if status < 500 else "server_error"
        response = answer(request.scope, problem)
        response.headers.update(error.headers or {})
        return response

    async def on_bug(request: Request, error: Exception) -> Response:
        return answer(request.scope, from_bug(error, request_id(request.scope)))

    app.add_exception_handler(M3Error, on_m3_error)
    app.add_exception_handler(Exception, on_bug)
    app.add_exception_handler(HTTPException, on_http_error)
