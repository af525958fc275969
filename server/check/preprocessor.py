"""Preprocessor configs, which the server does not read: whether they ask for what it does."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from server.api.checkpoint import CheckpointError, read_json
from server.api.conversation import JsonObject, JsonValue
from server.check.findings import Area, Finding, Level
from server.kernels.patchify import PIXEL_MEAN, PIXEL_STD
from server.media.geometry import IMAGE_AREA, MERGE, PATCH, TEMPORAL_PATCH, VIDEO_AREA
from server.model.config import M3Config

_PIXELS: Final[Mapping[str, JsonValue]] = {
    "patch_size": PATCH,
    "temporal_patch_size": TEMPORAL_PATCH,
    "merge_size": MERGE,
    "image_mean": list(PIXEL_MEAN),
    "image_std": list(PIXEL_STD),
    "rescale_factor": 1 / 255,
}
_BOUNDS: Final[Mapping[str, Mapping[str, JsonValue]]] = {
    "preprocessor_config.json": {"min_pixels": IMAGE_AREA.min_pixels, "max_pixels": IMAGE_AREA.max_pixels},
    "video_preprocessor_config.json": {"min_pixels": VIDEO_AREA.min_pixels, "max_pixels": VIDEO_AREA.max_pixels},
}


def check_preprocessors(model_dir: Path, _: M3Config | None) -> Iterator[Finding]:
    """Other patches or colours are errors, other sizes are warnings: the server uses its own."""
    for file_name, bounds in _BOUNDS.items():
        path = model_dir / file_name
        if not path.exists():
            continue
        try:
            values = read_json(path)
        except (CheckpointError, OSError) as error:
            yield Finding(Level.WARNING, Area.PREPROCESSOR, str(error))
            continue
        for level, ours in ((Level.ERROR, _PIXELS), (Level.WARNING, bounds)):
            yield from (Finding(level, Area.PREPROCESSOR, f"{file_name}: {text}") for text in _differences(values, ours))


def _differences(values: JsonObject, ours: Mapping[str, JsonValue]) -> Iterator[str]:
    for key, own in ours.items():
        theirs = values.get(key)
        if theirs is not None and not _is_same(theirs, own):
            yield f"{key} is {theirs}, the server uses {own}"


def _is_same(theirs: JsonValue, own: JsonValue) -> bool:
    if isinstance(theirs, list) and isinstance(own, list):
        return len(theirs) == len(own) and all(map(_is_same, theirs, own))
    if isinstance(theirs, int | float) and isinstance(own, int | float):
        return math.isclose(theirs, own, rel_tol=1e-5)
    return theirs == own
