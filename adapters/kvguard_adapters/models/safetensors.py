"""Read the headers of safetensors files: names, types and sizes of tensors, never their data.

Format: https://github.com/huggingface/safetensors#format. An eight-byte length, then JSON. Every size is
checked against its shape and the file before it is believed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvguard.model import ModelError

MAX_HEADER_BYTES = 100_000_000  # the library's own limit
DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "I4": 4,
    "U4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor, as stored."""

    name: str
    dtype: str
    elements: int
    dims: int
    size_bytes: int


class _Entry(msgspec.Struct):
    """One tensor's entry. Its defaults let `__metadata__` pass through the same decoder."""

    dtype: str = ""
    shape: list[int] = []
    data_offsets: tuple[int, int] = (0, 0)


_DECODER = msgspec.json.Decoder(dict[str, _Entry])


def read_header(path: Path) -> tuple[bytes, list[Tensor]]:
    """Return a file's raw header and its tensors. Raises: ModelError with what is wrong."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise ModelError(f"{path}: its header claims {length} bytes of {size}: no safetensors file")
            raw = file.read(length)
    except OSError as exc:
        raise ModelError(f"{path}: {exc.strerror or exc}") from exc
    return raw, _tensors(path, raw, size - 8 - length)


def _tensors(path: Path, raw: bytes, data_bytes: int) -> list[Tensor]:
    try:
        decoded = _DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ModelError(f"{path}: its header is not valid: {exc}") from exc
    decoded.pop("__metadata__", None)
    if raw.count(b'"data_offsets"') > len(decoded):
        raise ModelError(f"{path}: a tensor's name appears twice in its header")
    tensors = [_tensor(path, name, entry, data_bytes) for name, entry in decoded.items()]
    if sum(tensor.size_bytes for tensor in tensors) > data_bytes:
        raise ModelError(f"{path}: its tensors overlap, or the file is truncated")
    return tensors


def _tensor(path: Path, name: str, entry: _Entry, data_bytes: int) -> Tensor:
    begin, end = entry.data_offsets
    shape, bits = entry.shape, DTYPE_BITS.get(entry.dtype)
    if bits is None:
        raise ModelError(
            f"{_where(path, name)} is of unknown type {entry.dtype[:20]!r}: no size can be known"
        )
    if not 0 <= begin <= end:
        raise ModelError(f"{_where(path, name)} lies at {begin} to {end}")
    if end > data_bytes:
        raise ModelError(f"{_where(path, name)} ends {end - data_bytes} bytes after the file: truncated")
    if len(shape) > 16 or min(shape, default=0) < 0:
        raise ModelError(f"{_where(path, name)} has the shape {shape[:17]}")
    elements = math.prod(shape)
    if -(-elements * bits // 8) != end - begin:
        raise ModelError(f"{_where(path, name)} holds {end - begin} bytes, not those of its shape and type")
    return Tensor(name=name, dtype=entry.dtype, elements=elements, dims=len(shape), size_bytes=end - begin)


def _where(path: Path, name: str) -> str:
    return f"{path}: tensor {name[:80]!r}"


def read_json(path: Path, max_bytes: int = 64 << 20) -> dict[str, Any]:
    """Read a JSON object of bounded size. Raises: ModelError."""
    try:
        if path.stat().st_size > max_bytes:
            raise ModelError(f"{path}: {path.stat().st_size} bytes of JSON")
        value = msgspec.json.decode(path.read_bytes())
    except OSError as exc:
        raise ModelError(f"{path}: {exc.strerror or exc}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ModelError(f"{path}: not valid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object is needed")
    return value
