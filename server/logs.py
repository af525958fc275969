"""How log lines look: text for people or one JSON object per line for machines. Imports nothing of ours.

A record may carry named values beside its message, as `extra={FIELDS: {...}}`; both forms print them. What is written into a
line is escaped, so no value can forge another line.
"""

import json
import logging
import traceback
from datetime import UTC, datetime
from typing import Any, Final

FIELDS: Final = "fields"


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, FIELDS, {})
    return fields


class TextFormatter(logging.Formatter):
    """Time, level, logger, message, then the named values."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line without a traceback."""
        values = [f"{name}={json.dumps(value, default=str)}" for name, value in _fields(record).items()]
        return " ".join([super().formatMessage(record), *values])


class JsonFormatter(logging.Formatter):
    """One JSON object: time (UTC, ISO 8601), level, logger, message, the named values, and a traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def frames_of(error: BaseException) -> str:
    """Where an exception came from, without its text, which may quote a request."""
    return "".join(traceback.format_tb(error.__traceback__))


def configure(level: str, *, as_json: bool) -> None:
    """Send our own log and uvicorn's to stderr in one form; uvicorn's access log gives way to ours."""
    formatter = JsonFormatter() if as_json else TextFormatter()
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler])
    logging.getLogger("server").setLevel(level.upper())
    logging.getLogger("uvicorn.access").disabled = True
    if as_json:
        for uvicorns in logging.getLogger("uvicorn").handlers:
            uvicorns.setFormatter(formatter)
