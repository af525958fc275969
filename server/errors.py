"""The one tree of errors that may reach a client.

Every error knows its HTTP status, the `type`, `code` and `param` of OpenAI's error object, and a message that is safe to
show: it names limits and fields of the request, never paths, addresses or other requests. Anything that is not an
`M3Error` is a bug and becomes a 500 with a fixed text at the edge.
"""


class M3Error(Exception):
    """Base of all errors with a client-safe message.

    Args:
        message: text shown to the client.
        param: the request field at fault, in OpenAI's dotted spelling (`messages[0].content`), if there is one.
        code: machine-readable code; the class gives the default.
    """

    status: int = 500
    type: str = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON object that OpenAI clients expect: `{"error": {message, type, param, code}}`."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequestError(M3Error):
    """The request itself is wrong; sending it again gives the same answer."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextLengthError(BadRequestError):
    """Prompt, or prompt plus `max_tokens`, does not fit the context window or the cache."""

    code = "context_length_exceeded"


class MediaError(BadRequestError):
    """A picture or clip that cannot be decoded, is not supported, or exceeds a limit."""

    code = "invalid_media"


class AuthenticationError(M3Error):
    """No API key, or one that is not valid."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class NotFoundError(M3Error):
    """Unknown model or route."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class BodyTimeoutError(M3Error):
    """The client takes too long to send its body."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class PayloadTooLargeError(M3Error):
    """The HTTP body exceeds the configured limit."""

    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"


class OverloadedError(M3Error):
    """The queue is full; the client should retry later."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"


class RequestFailedError(M3Error):
    """One request failed inside the engine; others are not affected."""

    code = "request_failed"


class EngineUnavailableError(M3Error):
    """The engine is not ready yet, or died while the request was open."""

    status = 503
    code = "engine_unavailable"


class ShuttingDownError(EngineUnavailableError):
    """The server takes no new requests, or its time to finish this one is over; another replica may take it."""

    code = "shutting_down"
