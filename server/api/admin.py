"""Health and metrics on a port of their own, served by a thread of its own.

A probe must be answered while the main event loop is busy, and an operator's port need not be a client's. Everything that is
read here is a plain attribute of the service, so no lock is needed.
"""

import asyncio
import socket
import threading
from typing import Final

import uvicorn
from fastapi import FastAPI

from server.api import health, models
from server.api.middleware import RequestIdMiddleware
from server.api.problems import install_handlers
from server.api.service import Service

STOP_TIMEOUT_S: Final = 5.0


class AdminServer:
    """`start` and `stop` frame its life.

    Attributes:
        port: where it listens; differs from the setting when that is 0.
    """

    def __init__(self, service: Service, host: str, port: int) -> None:
        self.port = port
        self._host = host
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        app.state.service = service
        for router in (health.router, health.metrics_router, models.version_router):
            app.include_router(router)
        install_handlers(app)
        app.add_middleware(RequestIdMiddleware)
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen and serve.

        Raises:
            OSError: the address cannot be used.
        """
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, self.port), family=family)
        self.port = listener.getsockname()[1]
        serve = self._server.serve
        self._thread = threading.Thread(target=lambda: asyncio.run(serve([listener])), name="admin", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving; blocks for a moment."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
