"""Reading the small JSON files of a checkpoint directory."""

import json
from pathlib import Path

from server.api.conversation import JsonObject, JsonValue


class CheckpointError(Exception):
    """The checkpoint's tokenizer, template or configuration cannot be used; the operator sees the message, no client does."""


def read_json(path: Path) -> JsonObject:
    """The JSON object in `path`.

    Raises:
        CheckpointError: the file is missing, not JSON or not an object.
    """
    try:
        value: JsonValue = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


def read_optional_json(path: Path) -> JsonObject:
    """The JSON object in `path`, or an empty one when there is no such file."""
    return read_json(path) if path.exists() else {}


def get_object(values: JsonObject, key: str) -> JsonObject:
    """The object under `key`; an empty one when it is absent or null."""
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def get_int(values: JsonObject, *keys: str) -> int:
    """The integer under the first of `keys` that exists.

    Raises:
        CheckpointError: none of them is an integer.
    """
    for key in keys:
        value = values.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    raise CheckpointError(f"the configuration has no integer {' or '.join(keys)}")
