"""Fills parameters from a verified checkpoint, file by file, reading only this rank's parts."""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from server.model.checkpoint import verify
from server.model.progress import Progress
from server.model.weights import Parameter, Piece


def load_parameters(
    model_dir: Path, parameters: Sequence[Parameter], device: torch.device, dtype: torch.dtype, progress: Progress
) -> dict[str, Tensor]:
    """Load all parameters of one rank.

    Args:
        model_dir: folder with `model.safetensors`, or an index and its files.
        parameters: what to fill.
        device: where parameters live.
        dtype: model dtype; parameters that keep fp32 ignore it.
        progress: told the bytes to read, then each part of them.

    Returns:
        Tensors by parameter name.

    Raises:
        CheckpointError: before anything is allocated; see `verify`.
    """
    stored = verify(model_dir, parameters)
    by_file: dict[str, list[tuple[Parameter, Piece]]] = defaultdict(list)
    num_bytes: dict[str, int] = {}
    for parameter in parameters:
        for piece in parameter.pieces:
            tensor = stored[piece.name]
            by_file[tensor.file_name].append((parameter, piece))
            num_bytes[piece.name] = tensor.num_bytes * math.prod(piece.cut_shape) // math.prod(piece.shape)
    tensors = {p.name: torch.empty(p.shape, dtype=torch.float32 if p.keeps_fp32 else dtype, device=device) for p in parameters}
    progress.start(sum(num_bytes.values()))
    for file_name, pieces in sorted(by_file.items()):
        with safe_open(model_dir / file_name, framework="pt") as file:
            for parameter, piece in sorted(pieces, key=lambda placed: stored[placed[1].name].offset):  # reads run forward
                cut = piece.cut or (slice(None),)
                tensors[parameter.name][piece.into].copy_(file.get_slice(piece.name)[cut])
                progress.advance(num_bytes[piece.name])
    progress.finish()
    return tensors
