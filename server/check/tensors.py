"""Configuration and tensors: names, shapes, types and sizes, from file headers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from server.check.findings import Area, Finding, Level
from server.model.checkpoint import CheckpointError, verify
from server.model.config import M3Config
from server.model.shard import Shard
from server.model.stored_file import StoredTensor
from server.model.weights import Parameter, parameters


@dataclass(frozen=True)
class Summary:
    """What a sound checkpoint is.

    Attributes:
        format: `mxfp8`, or the type that most bytes are stored as, in the spelling of safetensors.
        num_tensors, num_files, num_bytes: of what would be loaded.
        window: tokens.
    """

    format: str
    num_tensors: int
    num_files: int
    num_bytes: int
    window: int


def check_tensors(model_dir: Path, config: M3Config) -> tuple[list[Finding], Summary | None]:
    """Findings, and a summary when all tensors are there."""
    needed = parameters(config, Shard())
    try:
        stored = verify(model_dir, needed)
    except CheckpointError as error:
        texts = [f"{kind}: {item}" for kind, items in error.found.items() for item in items]
        return [Finding(Level.ERROR, Area.TENSORS, text) for text in texts], None
    bytes_by_type: dict[str, int] = {}
    for tensor in stored.values():
        bytes_by_type[tensor.dtype] = bytes_by_type.get(tensor.dtype, 0) + tensor.num_bytes
    summary = Summary(
        format="mxfp8" if config.quantization else max(bytes_by_type, key=bytes_by_type.__getitem__),
        num_tensors=len(stored),
        num_files=len({tensor.file_name for tensor in stored.values()}),
        num_bytes=sum(bytes_by_type.values()),
        window=config.text.max_position_embeddings,
    )
    return list(_check_precision(needed, stored)), summary


def _check_precision(needed: Sequence[Parameter], stored: Mapping[str, StoredTensor]) -> Iterator[Finding]:
    """The released routers and patch projection are fp32; a copy that rounded them routes and sees differently."""
    for parameter in needed:
        for piece in parameter.pieces if parameter.dtype is torch.float32 else ():
            if (dtype := stored[piece.name].dtype) != "F32":
                text = f"stored with less precision than the model keeps it: {piece.name} {dtype} instead of F32"
                yield Finding(Level.WARNING, Area.TENSORS, text)
