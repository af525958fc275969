"""One safetensors file on disk: what its header promises, and whether the file is whole.

Reads the header only. A file that was not downloaded (a Git-LFS pointer), or not to its end, is told apart from one that is
something else, because the cure differs.
"""

import enum
import json
import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

# Types that can be loaded, in the format's spelling.
FLOAT_TYPES = ("F32", "BF16", "F16")
E4M3_TYPES = ("F8_E4M3",)
SCALE_TYPES = ("U8",)
_BYTES_PER_ELEMENT = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1}

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_LFS_MARK = b"version https://git-lfs"


class FileFault(enum.StrEnum):
    """What can be wrong with a file, in the plural of a report."""

    MISSING = "missing files"
    UNREADABLE = "unreadable files"
    TRUNCATED = "truncated files"
    LFS_POINTER = "Git-LFS pointers instead of files"
    FOREIGN = "files that are not safetensors"


class UnusableFileError(Exception):
    """The file cannot be used; `detail` names it, without its folder."""

    def __init__(self, fault: FileFault, detail: str) -> None:
        super().__init__(f"{fault}: {detail}")
        self.fault = fault
        self.detail = detail


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's file, type in the format's spelling, shape, and first byte among the file's tensor data."""

    file_name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Size of a tensor of a loadable type."""
        return math.prod(self.shape) * _BYTES_PER_ELEMENT[self.dtype]


def read_bytes(path: Path) -> bytes:
    """The content of a small file.

    Raises:
        UnusableFileError: it is missing, unreadable or a Git-LFS pointer.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _os_fault(path, error) from error
    if content.startswith(_LFS_MARK):
        raise UnusableFileError(FileFault.LFS_POINTER, path.name)
    return content


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name.

    Raises:
        UnusableFileError: the file is not what its header promises.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(max(_LENGTH_BYTES, len(_LFS_MARK)))
            header_len = int.from_bytes(start[:_LENGTH_BYTES], "little")
            file.seek(_LENGTH_BYTES)
            raw = file.read(header_len) if header_len <= _MAX_HEADER_BYTES else b""
    except OSError as error:
        raise _os_fault(path, error) from error
    if start.startswith(_LFS_MARK):
        raise UnusableFileError(FileFault.LFS_POINTER, path.name)
    if len(start) < _LENGTH_BYTES or len(raw) < header_len <= _MAX_HEADER_BYTES:
        raise UnusableFileError(FileFault.TRUNCATED, f"{path.name} ({size} bytes)")
    tensors, data_bytes = _parse_header(path, raw)
    expected = _LENGTH_BYTES + header_len + data_bytes
    if size < expected:
        raise UnusableFileError(FileFault.TRUNCATED, f"{path.name} ({size} of {expected} bytes)")
    try:
        with safe_open(path, framework="np"):  # checks sizes against shapes and types, and overlaps; torch would reserve memory
            return tensors
    except SafetensorError as error:
        raise UnusableFileError(FileFault.FOREIGN, path.name) from error


def _parse_header(path: Path, raw: bytes) -> tuple[dict[str, StoredTensor], int]:
    """Tensors by name, and the bytes that their data takes."""
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        tensors = {
            str(name): StoredTensor(
                file_name=path.name,
                dtype=str(entry["dtype"]),
                shape=tuple(int(size) for size in entry["shape"]),
                offset=int(entry["data_offsets"][0]),
            )
            for name, entry in entries.items()
        }
        return tensors, max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UnusableFileError(FileFault.FOREIGN, path.name) from error


def _os_fault(path: Path, error: OSError) -> UnusableFileError:
    if isinstance(error, FileNotFoundError):
        return UnusableFileError(FileFault.MISSING, path.name)
    return UnusableFileError(FileFault.UNREADABLE, f"{path.name} ({error.strerror})")
