"""The checkpoint's sampling defaults and end-of-turn ids."""

from pathlib import Path

import msgspec

from server.api.checkpoint import CheckpointError, read_optional_json
from server.api.conversation import JsonObject


class GenerationDefaults(msgspec.Struct, frozen=True):
    """What a request samples with when it does not say; generation_config.json.

    Attributes:
        temperature, top_p, top_k: as in `SamplingParams`; a file that turns sampling off gives temperature 0.
        eos_token_ids: ids that end an answer; empty when the file does not say.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def load(cls, model_dir: Path) -> "GenerationDefaults":
        """Read generation_config.json; without one the defaults above hold.

        Raises:
            CheckpointError: a value has the wrong type or range.
        """
        values = read_optional_json(model_dir / "generation_config.json")
        temperature = _number(values, "temperature", 1.0)
        top_p, top_k = _number(values, "top_p", 1.0), _number(values, "top_k", 0)
        if temperature < 0 or not 0 < top_p <= 1 or top_k != int(top_k):
            raise CheckpointError("generation_config.json: temperature, top_p or top_k is out of range")
        if values.get("do_sample") is False:
            temperature = 0.0
        eos = values.get("eos_token_id")
        eos_token_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        integers = tuple(index for index in eos_token_ids if isinstance(index, int))
        if len(integers) != len(eos_token_ids):
            raise CheckpointError("generation_config.json: eos_token_id must be an id or a list of ids")
        return cls(temperature, top_p, max(0, int(top_k)), integers)


def _number(values: JsonObject, key: str, default: float) -> float:
    """The number under `key`, or the default when it is absent or null."""
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"generation_config.json: {key} must be a number")
    return value
