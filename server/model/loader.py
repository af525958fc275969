"""Fills parameters from a verified checkpoint, file by file, reading only this rank's parts."""

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from server.kernels.mxfp8 import MAX_SCALE, Mxfp8Weight, dequantize_torch, largest_scale, with_nan_scales
from server.model.checkpoint import CheckpointError, verify
from server.model.parameter import Parameter, Piece
from server.model.progress import Progress
from server.model.quantization import SCALES
from server.model.stored_file import SCALE_TYPES, StoredTensor

logger = logging.getLogger(__name__)


def load_parameters(
    model_dir: Path, parameters: Sequence[Parameter], device: torch.device, dtype: torch.dtype, progress: Progress
) -> dict[str, Tensor]:
    """Load all parameters of one rank.

    Args:
        model_dir: folder with `model.safetensors`, or an index and its files.
        parameters: what to fill.
        device: where parameters live.
        dtype: model dtype; parameters that have a dtype of their own ignore it.
        progress: told the bytes to read, then each part of them.

    Returns:
        Tensors by parameter name.

    Raises:
        CheckpointError: before anything is allocated, see `verify`; or while reading, a scale that kernels do not take.
    """
    stored = verify(model_dir, parameters)
    by_file: dict[str, list[tuple[Parameter, Piece]]] = defaultdict(list)
    for parameter in parameters:
        if any(piece.scales for piece in parameter.pieces):
            logger.warning("%s is loaded unquantised, because some of its parts are", parameter.name)
        for piece in parameter.pieces:
            by_file[stored[piece.name].file_name].append((parameter, piece))
    tensors = {p.name: torch.empty(p.shape, dtype=p.dtype or dtype, device=device) for p in parameters}
    progress.start(sum(_num_bytes(piece, stored) for parameter in parameters for piece in parameter.stored))
    for file_name, pieces in sorted(by_file.items()):
        with safe_open(model_dir / file_name, framework="pt") as file:
            for parameter, piece in sorted(pieces, key=lambda placed: stored[placed[1].name].offset):  # reads run forward
                read = file.get_slice(piece.name)[piece.cut or (slice(None),)]
                if piece.scales:
                    read = _dequantized(read, piece.scales, model_dir / stored[piece.scales.name].file_name)
                    progress.advance(_num_bytes(piece.scales, stored))
                elif piece.types == SCALE_TYPES:
                    _refuse_large(read, piece.name)
                tensors[parameter.name][piece.into].copy_(read)
                progress.advance(_num_bytes(piece, stored))
    _mark_nans(tensors)
    progress.finish()
    return tensors


def _num_bytes(piece: Piece, stored: Mapping[str, StoredTensor]) -> int:
    return stored[piece.name].num_bytes * math.prod(piece.cut_shape) // math.prod(piece.shape)


def _dequantized(values: Tensor, scales: Piece, path: Path) -> Tensor:
    """MXFP8 values as fp32, with the scales that `path` holds."""
    with safe_open(path, framework="pt") as file:
        return dequantize_torch(Mxfp8Weight(values, file.get_slice(scales.name)[scales.cut]), torch.float32)


def _refuse_large(scales: Tensor, name: str) -> None:
    largest = largest_scale(scales)
    if largest > MAX_SCALE:
        found = f"{name} (2^{largest - 127})"
        kind = f"MXFP8 scales above 2^{MAX_SCALE - 127}"
        raise CheckpointError(f"the checkpoint cannot be loaded; {kind}: {found}", {kind: [found]})


def _mark_nans(tensors: Mapping[str, Tensor]) -> None:
    """Let kernels see NaNs among e4m3 values by their scales; matrix by matrix, because a stack fills much of the memory."""
    for name, values in tensors.items():
        scales = tensors.get(f"{name}.{SCALES}")
        if scales is not None:
            for values_of_one, scales_of_one in zip(_matrices(values), _matrices(scales), strict=True):
                scales_of_one.copy_(with_nan_scales(values_of_one, scales_of_one))


def _matrices(tensor: Tensor) -> Tensor:
    return tensor.view(-1, *tensor.shape[-2:])
