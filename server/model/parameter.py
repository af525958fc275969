"""A parameter of the model on one rank, and the stored tensors that fill it, in MXFP8 or not.

A projection in MXFP8 is two parameters, e4m3 values and their scales. A stack of which only some pieces are quantised is one
unquantised parameter, whose quantised pieces name their scales.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from server.kernels.mxfp8 import GROUP_SIZE
from server.model.quantization import SCALES, Quantization
from server.model.stored_file import E4M3_TYPES, FLOAT_TYPES, SCALE_TYPES

WHOLE = slice(None)


@dataclass(frozen=True)
class Piece:
    """A released tensor and where this rank's part of it goes.

    Attributes:
        name: released name.
        shape: released shape.
        cut: what this rank reads; dimensions left out are read whole.
        into: index into the parameter, of the shape of what was read.
        types: what it may be stored as, in the spelling of safetensors.
        scales: those of e4m3 values that go into an unquantised parameter.
    """

    name: str
    shape: tuple[int, ...]
    cut: tuple[slice, ...] = ()
    into: tuple[int | slice, ...] = ()
    types: tuple[str, ...] = FLOAT_TYPES
    scales: "Piece | None" = None

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """Shape of what this rank reads."""
        cut = self.cut + (WHOLE,) * (len(self.shape) - len(self.cut))
        return tuple(len(range(*part.indices(size))) for part, size in zip(cut, self.shape, strict=True))


@dataclass(frozen=True)
class Parameter:
    """A tensor of the model on one rank.

    Attributes:
        name: our name, the key under which the model finds it.
        shape: on this rank.
        pieces: what fills it, completely.
        dtype: whatever the model dtype is (fp32 of router and patch projection, MXFP8); None: the model dtype.
        is_projection: a matrix of the decoder that checkpoints may hold in MXFP8.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    dtype: torch.dtype | None = None
    is_projection: bool = False

    @property
    def stored(self) -> Iterator[Piece]:
        """The released tensors that are read to fill it."""
        for piece in self.pieces:
            yield piece
            if piece.scales:
                yield piece.scales


def in_format(parameter: Parameter, quantization: Quantization | None) -> Iterator[Parameter]:
    """What a parameter becomes for a checkpoint that is quantised this way.

    Raises:
        ValueError: this rank's columns cut through a group that shares a scale; names the tensor.
    """
    pieces = parameter.pieces
    is_quantised = [bool(quantization and parameter.is_projection and quantization.covers(piece.name)) for piece in pieces]
    if not any(is_quantised):
        yield parameter
    elif all(is_quantised):
        *rows, width = parameter.shape
        values = tuple(replace(piece, types=E4M3_TYPES) for piece in pieces)
        yield replace(parameter, pieces=values, dtype=torch.float8_e4m3fn)
        scales = tuple(_scales_of(piece) for piece in pieces)
        yield Parameter(f"{parameter.name}.{SCALES}", (*rows, width // GROUP_SIZE), scales, torch.uint8)
    else:
        mixed = [
            replace(piece, types=E4M3_TYPES, scales=_scales_of(piece)) if has_scales else piece
            for piece, has_scales in zip(pieces, is_quantised, strict=True)
        ]
        yield replace(parameter, pieces=tuple(mixed))


def _scales_of(piece: Piece) -> Piece:
    rows, width = piece.shape
    row_cut, column_cut = (*piece.cut, WHOLE, WHOLE)[:2]
    begin, end, _ = column_cut.indices(width)
    if width % GROUP_SIZE or begin % GROUP_SIZE or end % GROUP_SIZE:
        raise ValueError(
            f"{piece.name}: columns {begin} to {end} of {width} cut through groups of {GROUP_SIZE} that share an MXFP8 scale"
        )
    cut = (row_cut, slice(begin // GROUP_SIZE, end // GROUP_SIZE))
    return Piece(f"{piece.name}_scale_inv", (rows, width // GROUP_SIZE), cut, piece.into, SCALE_TYPES)
