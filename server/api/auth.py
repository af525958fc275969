"""API keys: which ones there are, and the middleware that asks for one.

Only digests are kept. A given key is compared with every one of them in constant time, so neither how much of a key is right
nor which key it is can be measured.
"""

import hashlib
import hmac
from collections.abc import Iterable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.messages_errors import shaped_error
from server.errors import AuthenticationError
from server.settings import Settings, SettingsError

# Probes have no key.
OPEN_PATHS: Final = frozenset({"/livez", "/readyz", "/health"})
SCHEME: Final = "bearer "


class ApiKeys:
    """The keys that open this server; none at all leaves it open."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Raises: SettingsError: a key that no header can carry."""
        distinct = set(keys)
        if not all(key.isascii() and key.isprintable() and " " not in key for key in distinct):
            raise SettingsError("API keys must be printable ASCII characters without blanks")
        self._digests = [_digest(key) for key in distinct]

    @classmethod
    def from_settings(cls, settings: Settings) -> "ApiKeys":
        """The keys of `api_keys` and of the lines of `api_keys_file`.

        Raises:
            SettingsError: a file that cannot be read, or settings that are there and hold no key.
        """
        if settings.api_keys is None and settings.api_keys_file is None:
            return cls(())
        keys = [] if settings.api_keys is None else settings.api_keys.get_secret_value().split(",")
        if settings.api_keys_file is not None:
            try:
                lines = settings.api_keys_file.read_text().splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise SettingsError(f"api_keys_file cannot be read: {type(error).__name__}") from None
            keys += [line for line in lines if not line.startswith("#")]
        keys = [key.strip() for key in keys if key.strip()]
        if not keys:
            raise SettingsError("api_keys and api_keys_file hold no key")
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def allow(self, headers: Headers) -> bool:
        """Whether a request brings a key, as a bearer token or in `x-api-key`."""
        authorization = headers.get("authorization", "")
        is_bearer = authorization[: len(SCHEME)].lower() == SCHEME
        given = authorization[len(SCHEME) :].strip() if is_bearer else headers.get("x-api-key", "")
        digest = _digest(given)
        return sum([hmac.compare_digest(digest, known) for known in self._digests]) > 0


class AuthMiddleware:
    """Answers requests without a key before their body is read."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        is_open = scope["type"] != "http" or not self.keys or scope["path"] in OPEN_PATHS
        if is_open or self.keys.allow(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        error = AuthenticationError("a valid API key is required")
        response = shaped_error(scope, error)
        response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
