"""The application that operators start: `M3_MODEL=/path uvicorn server.main:app --host 0.0.0.0 --port 8000`.

One process serves one engine. Settings come from the environment; a fault in them ends the process with one line.
"""

import multiprocessing
import os
import signal
import sys

from fastapi import FastAPI

from server.api.app import create_app
from server.logs import configure
from server.settings import LogFormat, SettingsError, load_settings

EXIT_USAGE = 2


def refuse(message: str) -> SystemExit:
    """Say why the server does not start."""
    print(f"m3-server: {message}", file=sys.stderr, flush=True)
    return SystemExit(EXIT_USAGE)


def build() -> FastAPI:
    """The application, from the environment.

    Raises:
        SystemExit: the settings cannot be used, or uvicorn was told to start several workers.
    """
    if multiprocessing.parent_process() is not None:
        # uvicorn would restart a worker that leaves, for ever.
        os.kill(os.getppid(), signal.SIGTERM)
        raise refuse("--workers and --reload are not supported: every worker would load the model; run one process per model")
    try:
        settings = load_settings()
        configure(settings.log_level.value, as_json=settings.log_format is LogFormat.JSON)
        return create_app(settings, owns_process=True)
    except SettingsError as error:
        raise refuse(str(error)) from None


app = build()
