"""A checkpoint folder on disk: its files, what their headers promise, and whether that is what the model needs.

Everything is checked from headers, sizes and names, before any memory is allocated. `metadata.total_size` of the index is not
used: the released value counts tensors that were never uploaded.
"""

import json
import math
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from server.model.weights import Parameter

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_LOADABLE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_LFS_MARK = b"version https://git-lfs"
_NOT_LOADED = ("language_model.model.mtp.",)  # draft modules, which the released index announces and some copies carry
_MAX_LISTED = 5


class CheckpointError(Exception):
    """The checkpoint cannot be loaded; the message lists everything that is wrong with it."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place and type according to a file's header; `dtype` in the format's spelling."""

    file_name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of a loadable tensor."""
        return math.prod(self.shape) * _LOADABLE_BYTES.get(self.dtype, 0)


class _Faults:
    """Findings by kind, rendered as one short message."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = defaultdict(list)

    def add(self, kind: str, item: str) -> None:
        self._found[kind].append(item)

    def raise_if_any(self) -> None:
        parts = []
        for kind, items in self._found.items():
            more = f", and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
            parts.append(f"{len(items)} {kind}: {', '.join(items[:_MAX_LISTED])}{more}")
        if parts:
            raise CheckpointError("the checkpoint cannot be loaded; " + "; ".join(parts))


def verify(model_dir: Path, parameters: Sequence[Parameter]) -> dict[str, StoredTensor]:
    """Check a checkpoint folder against the parameters to fill, without reading tensor data.

    Returns:
        Where each needed tensor is stored, by released name.

    Raises:
        CheckpointError: lists files that are missing, truncated, Git-LFS pointers or not safetensors; tensors that are
            missing, unexpected, of the wrong shape or of a type that cannot be loaded.
    """
    faults = _Faults()
    promised = _promised_files(model_dir, faults)
    stored: dict[str, StoredTensor] = {}
    unreadable: set[str] = set()
    for file_name in sorted(set(promised.values()) or {SINGLE_FILE}):
        tensors = _read_header(model_dir / file_name, faults)
        if tensors is None:
            unreadable.add(file_name)
        else:
            stored.update(tensors)
    needed = {piece.name: piece.shape for parameter in parameters for piece in parameter.pieces}
    for name, shape in needed.items():
        tensor = stored.get(name)
        if tensor is None:
            # The tensors of an unreadable file are not listed one by one, as far as the index tells whose they are.
            if promised.get(name, SINGLE_FILE if not promised else "") not in unreadable:
                faults.add("missing tensors", name)
        elif tensor.shape != shape:
            faults.add("wrong shapes", f"{name} {list(tensor.shape)} instead of {list(shape)}")
        elif tensor.dtype not in _LOADABLE_BYTES:
            faults.add("unsupported types", f"{name} {tensor.dtype}")
    for name in stored:
        if name not in needed and not name.startswith(_NOT_LOADED):
            faults.add("unexpected tensors", name)
    faults.raise_if_any()
    return {name: stored[name] for name in needed}


def _promised_files(model_dir: Path, faults: _Faults) -> Mapping[str, str]:
    """File name by tensor name according to the index; empty for a checkpoint in a single file."""
    index_path = model_dir / INDEX_FILE
    if not index_path.exists():
        return {}
    raw = index_path.read_bytes()
    if raw.startswith(_LFS_MARK):
        faults.add("Git-LFS pointers instead of files", INDEX_FILE)
        faults.raise_if_any()
    try:
        weight_map = json.loads(raw)["weight_map"]
        entries = {str(name): str(file_name) for name, file_name in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        faults.add("unreadable files", f"{INDEX_FILE} (no weight_map)")
        faults.raise_if_any()
        raise AssertionError("unreachable") from None
    outside = sorted({file_name for file_name in entries.values() if Path(file_name).name != file_name})
    for file_name in outside:
        faults.add("file names in the index that leave the folder", file_name)
    if outside or not entries:
        faults.add("unreadable files", f"{INDEX_FILE} (weight_map)")
        faults.raise_if_any()
    return entries


def _read_header(path: Path, faults: _Faults) -> dict[str, StoredTensor] | None:
    """The tensors of one safetensors file; None, and a fault, when the file is not what its header promises."""
    try:
        with path.open("rb") as file:
            prefix = file.read(len(_LFS_MARK))
            if prefix == _LFS_MARK:
                faults.add("Git-LFS pointers instead of files", path.name)
                return None
            file.seek(0)
            size = path.stat().st_size
            header_len = struct.unpack("<Q", file.read(8))[0] if size >= 8 else 0
            if size >= 8 and header_len > _MAX_HEADER_BYTES:
                faults.add("unreadable files", f"{path.name} (not safetensors)")
                return None
            if size < 8 + header_len or header_len == 0:
                faults.add("truncated files", f"{path.name} ({size} bytes)")
                return None
            header = json.loads(file.read(header_len))
        header.pop("__metadata__", None)
        tensors = {
            str(name): StoredTensor(path.name, str(entry["dtype"]), tuple(entry["shape"])) for name, entry in header.items()
        }
        expected = 8 + header_len + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except FileNotFoundError:
        faults.add("missing files", path.name)
        return None
    except OSError as error:
        faults.add("unreadable files", f"{path.name} ({error.strerror})")
        return None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        faults.add("unreadable files", f"{path.name} (not safetensors)")
        return None
    if size != expected:
        kind = "truncated files" if size < expected else "unreadable files"
        faults.add(kind, f"{path.name} ({size} of {expected} bytes)")
        return None
    return tensors
