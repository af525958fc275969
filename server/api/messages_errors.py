"""Errors in Anthropic's shape: the same statuses as everywhere, other names for their kinds."""

from typing import Final

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from server.api.messages_wire import ErrorBody, ErrorDetail
from server.api.middleware import request_id
from server.api.problems import error_response
from server.errors import M3Error

PATH: Final = "/v1/messages"

KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: M3Error, request_id: str) -> ErrorBody:
    """The JSON object that Anthropic's clients expect. It has no field for the parameter, so the message names it."""
    message = error.message
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return ErrorBody(ErrorDetail(kind, message), request_id)


def messages_error(error: M3Error, request_id: str) -> Response:
    """The whole answer to a request that failed before its first byte."""
    response = error_response(error)
    headers = {name: response.headers[name] for name in ("retry-after", "connection") if name in response.headers}
    content = msgspec.json.encode(error_body(error, request_id))
    return Response(content, error.status, headers, media_type="application/json")


def shaped_error(scope: Scope, error: M3Error) -> Response:
    """The whole answer in the shape of the endpoint that was asked."""
    if scope["path"].startswith(PATH):
        return messages_error(error, request_id(scope))
    return error_response(error)
