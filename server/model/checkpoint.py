"""Whether a checkpoint folder holds what the model needs, found out before any memory is allocated.

Looks at the index, at file headers, sizes and names, never at tensor data. `metadata.total_size` of the index is not used:
the released value counts tensors that were never uploaded.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from server.model.parameter import Parameter, Piece
from server.model.stored_file import E4M3_TYPES, FileFault, StoredTensor, UnusableFileError, read_bytes, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_NOT_LOADED = ("language_model.model.mtp.",)  # draft modules, which configs announce and some copies carry
_MAX_LISTED = 5


class CheckpointError(Exception):
    """The checkpoint cannot be loaded; the message says what is wrong with it.

    Attributes:
        found: every finding, by kind; the message lists the first few of each.
    """

    def __init__(self, message: str, found: Mapping[str, Sequence[str]]) -> None:
        super().__init__(message)
        self.found = found


class _Faults:
    """Findings by kind, rendered as one short message."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = defaultdict(list)

    def add(self, kind: str, item: str) -> None:
        self._found[kind].append(item)

    def raise_if_any(self) -> None:
        parts = []
        for kind, items in self._found.items():
            more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
            parts.append(f"{len(items)} {kind}: {', '.join(items[:_MAX_LISTED])}{more}")
        if parts:
            raise CheckpointError("the checkpoint cannot be loaded; " + "; ".join(parts), self._found)


def verify(model_dir: Path, parameters: Sequence[Parameter]) -> dict[str, StoredTensor]:
    """Check a checkpoint folder against the parameters that it shall fill.

    Returns:
        Where each needed tensor is stored, by released name.

    Raises:
        CheckpointError: lists files that are missing, truncated, Git-LFS pointers or not safetensors, and tensors that are
            missing, unexpected, of the wrong shape or of a type that cannot be loaded or that config.json does not name.
    """
    faults = _Faults()
    index = _read_index(model_dir)
    stored: dict[str, StoredTensor] = {}
    unusable: set[str] = set()
    for file_name in sorted(set(index.values())) or [SINGLE_FILE]:
        try:
            tensors = read_header(model_dir / file_name)
        except UnusableFileError as error:
            faults.add(error.fault, error.detail)
            unusable.add(file_name)
        else:  # of a tensor that several files hold, the index decides which one counts
            stored |= {name: tensor for name, tensor in tensors.items() if index.get(name, file_name) == file_name}
    needed = {piece.name: piece for parameter in parameters for piece in parameter.stored}
    for name, piece in needed.items():
        if name in stored:
            _check_tensor(piece, stored[name], faults)
        elif index.get(name, SINGLE_FILE) not in unusable:  # the tensors of an unusable file are not listed one by one
            faults.add("missing tensors", name)
    for name in stored:
        if name not in needed and not name.startswith(_NOT_LOADED):
            faults.add("unexpected tensors", name)
    faults.raise_if_any()
    return {name: stored[name] for name in needed}


def _check_tensor(piece: Piece, tensor: StoredTensor, faults: _Faults) -> None:
    if tensor.shape != piece.shape:
        faults.add("tensors of the wrong shape", f"{piece.name} {list(tensor.shape)} instead of {list(piece.shape)}")
    if tensor.dtype in piece.types:
        return
    if tensor.dtype in E4M3_TYPES:
        faults.add("FP8 tensors that config.json does not call quantised", piece.name)
    elif piece.types == E4M3_TYPES:
        faults.add("tensors that config.json calls MXFP8", f"{piece.name} {tensor.dtype}")
    else:
        faults.add("tensors of an unsupported type", f"{piece.name} {tensor.dtype}")


def _read_index(model_dir: Path) -> Mapping[str, str]:
    """File name by tensor name; empty for a checkpoint in a single file.

    Raises:
        CheckpointError: the index cannot be understood or names files outside the folder; without it nothing else can be said.
    """
    faults = _Faults()
    try:
        weight_map = json.loads(read_bytes(model_dir / INDEX_FILE))["weight_map"]
        index = {str(name): str(file_name) for name, file_name in weight_map.items()}
    except UnusableFileError as error:
        if error.fault is FileFault.MISSING:
            return {}
        faults.add(error.fault, error.detail)
        index = {}
    except (ValueError, KeyError, TypeError, AttributeError):
        faults.add(FileFault.UNREADABLE, f"{INDEX_FILE} (has no weight_map)")
        index = {}
    for file_name in sorted({file_name for file_name in index.values() if Path(file_name).name != file_name}):
        faults.add("files outside the folder", file_name)
    faults.raise_if_any()
    return index
