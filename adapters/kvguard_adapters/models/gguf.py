"""Read a GGUF file's header: metadata and tensor shapes, never a weight, never a token.

`gguf.GGUFReader` builds a numpy view of every token (8 s for a vocabulary of 262k); here an array of strings
is only stepped over. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3,
both endians). Every count and length is checked against the bytes that are really there before it is used.
"""

from __future__ import annotations

import hashlib
import mmap
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvguard.model import ModelError, ModelFile, ModelMeta, Weights

MAX_STRINGS = 4_000_000  # of one array; the largest vocabularies have 0.3 million
MAX_KEPT = 4096  # elements of an array of numbers that is kept, not only counted
MAX_TEXT_BYTES = 8 << 20  # a chat template is 10 kB
MAX_DIMS = 4
MAX_SHARDS = 1000

# type id -> (name, elements of a block, bytes of a block); ggml.h and gguf-py's GGML_QUANT_SIZES
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}

# general.file_type -> label (llama.h, enum llama_ftype): for people only, sizes come from the tensors
FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
}

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_SHARD = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_LAYER = re.compile(r"^blk\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"_(ch)?exps(\.|$)")
_INPUT_TENSORS = ("token_embd.", "token_types.", "position_embd.", "per_layer_token_embd.")
_FIRST_LAYER_TENSORS = ("token_embd_norm.", "rope_")


@dataclass(frozen=True, slots=True)
class Counted:
    """Stands for an array that was stepped over: its length, and the bytes of its strings."""

    length: int
    text_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor of a file, as stored."""

    name: str
    elements: int
    type_name: str
    size_bytes: int


@dataclass(slots=True, kw_only=True)
class Header:
    """A GGUF file's header."""

    version: int
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    digest: bytes = b""


class _Cursor:
    """Reads the header forward, never past the end of the file."""

    def __init__(self, view: mmap.mmap, path: Path) -> None:
        self.view, self.path, self.position, self.end = view, path, 0, len(view)
        self.order = "<"

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what} (at byte {self.position} of {self.end})")

    def skip(self, size: int, what: str) -> int:
        """Move past `size` bytes; return where they begin."""
        start = self.position
        if size > self.end - start:
            raise self.fail(f"the file ends inside {what}: truncated, or not a GGUF file")
        self.position = start + size
        return start

    def number(self, code: str, what: str) -> Any:
        layout = struct.Struct(self.order + code)
        return layout.unpack_from(self.view, self.skip(layout.size, what))[0]

    def text(self, what: str) -> str:
        length = self.number("Q", what)
        if length > MAX_TEXT_BYTES:
            raise self.fail(f"{what} claims a text of {length} bytes")
        start = self.skip(length, what)
        return self.view[start : start + length].decode("utf-8", errors="replace")

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY and depth < 2:
            return self.array(what, depth)
        raise self.fail(f"{what} has a value of unknown type {kind}")

    def array(self, what: str, depth: int) -> Any:
        kind, count = self.number("I", what), self.number("Q", what)
        if kind in _SCALARS:
            layout = struct.Struct(self.order + _SCALARS[kind])
            start = self.skip(count * layout.size, what)
            if count > MAX_KEPT:
                return Counted(count)
            return struct.unpack_from(f"{self.order}{count}{_SCALARS[kind]}", self.view, start)
        if count > min(MAX_STRINGS, (self.end - self.position) // 8):
            raise self.fail(f"{what} claims {count} elements")
        if kind == _STRING:
            return self.strings(count, what)
        for _ in range(count):
            self.value(kind, what, depth + 1)
        return Counted(count)

    def strings(self, count: int, what: str) -> Counted:
        """Step over an array of strings: this loop is the whole time of a large vocabulary."""
        unpack = struct.Struct(self.order + "Q").unpack_from
        view, position = self.view, self.position
        try:
            for _ in range(count):
                position += 8 + unpack(view, position)[0]
        except (struct.error, OverflowError) as exc:
            raise self.fail(f"the file ends inside {what}: truncated, or not a GGUF file") from exc
        text_bytes = position - self.position - 8 * count
        if position > self.end:
            raise self.fail(f"the file ends inside {what}: truncated, or not a GGUF file")
        self.position = position
        return Counted(count, text_bytes)


def read_header(path: Path) -> Header:
    """Read one file's header. Raises: ModelError with the place of the fault."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return _parse(_Cursor(view, path))
    except OSError as exc:
        raise ModelError(f"{path}: {exc.strerror or exc}") from exc
    except ValueError as exc:  # an empty file cannot be mapped
        if isinstance(exc, ModelError):
            raise
        raise ModelError(f"{path}: the file is empty") from exc


def _parse(cursor: _Cursor) -> Header:
    if cursor.end < 24 or cursor.view[:4] != b"GGUF":
        raise ModelError(f"{cursor.path}: not a GGUF file")
    cursor.position = 4
    header = Header(version=_version(cursor))
    tensor_count, pair_count = cursor.number("Q", "the counts"), cursor.number("Q", "the counts")
    for count, what, least in ((pair_count, "metadata entries", 13), (tensor_count, "tensors", 32)):
        if count * least > cursor.end:
            raise cursor.fail(f"the header claims {count} {what}")
    for _ in range(pair_count):
        key = cursor.text("a metadata key")
        if key in header.metadata:
            raise cursor.fail(f"metadata key {key[:80]!r} appears twice")
        header.metadata[key] = cursor.value(cursor.number("I", key), key[:80])
    infos = [_tensor(cursor) for _ in range(tensor_count)]
    header.digest = hashlib.sha256(memoryview(cursor.view)[: cursor.position]).digest()
    _check_data(cursor, header.metadata, infos)
    header.tensors = [tensor for tensor, _ in infos]
    return header


def _version(cursor: _Cursor) -> int:
    """Find the byte order from the version: a swapped small number is a huge one."""
    version = int(cursor.number("I", "the version"))
    if version & 0xFFFF == 0:
        cursor.order, cursor.position = ">", 4
        version = int(cursor.number("I", "the version"))
    if version not in (2, 3):
        raise cursor.fail(f"GGUF version {version} is not supported (2 and 3 are)")
    return version


def _tensor(cursor: _Cursor) -> tuple[Tensor, int]:
    """Read one tensor's entry; return it with the offset of its data."""
    name = cursor.text("a tensor name")
    dims = cursor.number("I", name)
    if dims > MAX_DIMS:
        raise cursor.fail(f"tensor {name[:80]!r} claims {dims} dimensions")
    shape = [cursor.number("Q", name) for _ in range(dims)]
    type_id = cursor.number("I", name)
    offset = cursor.number("Q", name)
    if type_id not in TENSOR_TYPES:
        raise cursor.fail(f"tensor {name[:80]!r} is of unknown type {type_id}: its size cannot be known")
    type_name, block, block_bytes = TENSOR_TYPES[type_id]
    elements = 1
    for length in shape:
        elements *= length
    if shape and shape[0] % block:
        raise cursor.fail(f"tensor {name[:80]!r}: {shape[0]} columns are no whole blocks of {type_name}")
    size_bytes = elements // block * block_bytes
    return Tensor(name=name, elements=elements, type_name=type_name, size_bytes=size_bytes), offset


def _check_data(cursor: _Cursor, metadata: dict[str, Any], infos: list[tuple[Tensor, int]]) -> None:
    """Make sure that every tensor lies inside the file: half a download is found here, not after minutes."""
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise cursor.fail(f"general.alignment is {alignment!r}")
    data_start = -(-cursor.position // alignment) * alignment
    names: set[str] = set()
    for tensor, offset in infos:
        if tensor.name in names:
            raise cursor.fail(f"tensor {tensor.name[:80]!r} appears twice")
        names.add(tensor.name)
        missing = data_start + offset + tensor.size_bytes - cursor.end
        if missing > 0:
            raise cursor.fail(f"tensor {tensor.name[:80]!r} ends {missing} bytes after the file: truncated")
    if sum(tensor.size_bytes for tensor, _ in infos) > max(cursor.end - data_start, 0):
        raise cursor.fail("the tensors overlap")


# ---------------------------------------------------------------- from headers to a model


def read_gguf(path: str | Path) -> ModelMeta:
    """Read one model: a single file, or any shard of a split one. Raises: ModelError."""
    paths = _shards(Path(path))
    headers = [read_header(p) for p in paths]
    first = headers[0].metadata
    claimed = first.get("split.count", 1)
    if claimed not in (0, len(paths)):
        raise ModelError(f"{paths[0]}: says it is split into {claimed} files, the name says {len(paths)}")
    tensors = [tensor for header in headers for tensor in header.tensors]
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ModelError(f"{paths[0]}: a tensor appears in two shards")
    architecture = _required(first, "general.architecture", str, paths[0])
    hparams = _hparams(first, architecture)
    n_layer_all = _count(hparams.get("block_count", 0))
    nextn = min(_count(hparams.get("nextn_predict_layers", 0)), n_layer_all)
    weights = weigh(tensors, n_layer=n_layer_all - nextn)
    types = _bytes_by_type(tensors)
    tokens = first.get("tokenizer.ggml.tokens")
    merges = first.get("tokenizer.ggml.merges")
    return ModelMeta(
        name=str(first.get("general.name") or paths[0].stem),
        form="gguf",
        path=str(paths[0]),
        architecture=architecture,
        parameters=sum(tensor.elements for tensor in tensors),
        weights=weights,
        n_ctx_train=_count(hparams.get("context_length", 0)),
        n_vocab=tokens.length if isinstance(tokens, Counted) else _count(hparams.get("vocab_size", 0)),
        n_layer=n_layer_all,
        n_embd=_count(hparams.get("embedding_length", 0)),
        hparams=hparams,
        files=tuple(ModelFile(path=str(p), size_bytes=p.stat().st_size) for p in paths),
        header_hash=hashlib.sha256(b"".join(header.digest for header in headers)).hexdigest(),
        quant=FILE_TYPES.get(first.get("general.file_type", -1)) or (types[0][0] if types else ""),
        tensor_types=types,
        chat_template=_text(first.get("tokenizer.chat_template")),
        add_bos=first.get("tokenizer.ggml.add_bos_token"),
        token_text_bytes=tokens.text_bytes if isinstance(tokens, Counted) else 0,
        merges=merges.length if isinstance(merges, Counted) else 0,
        is_embedding="pooling_type" in hparams and hparams["pooling_type"] not in (0, 4),
    )


def read_variants(folder: str | Path) -> list[ModelMeta]:
    """Read every model under a directory, one a variant, the largest first; projectors are no variants.

    Raises: ModelError when there is none, or when one cannot be read.
    """
    folder = Path(folder)
    found = []
    for path in sorted(folder.glob("*.gguf")):
        shard = _SHARD.match(path.name)
        if (shard is None or int(shard["number"]) == 1) and not path.name.lower().startswith("mmproj"):
            found.append(read_gguf(path))
    models = [meta for meta in found if meta.architecture not in ("clip", "imatrix")]
    if not models:
        raise ModelError(f"{folder}: no GGUF model in this directory")
    return sorted(models, key=lambda meta: -meta.weights.total_bytes)


def projector_bytes(path: str | Path) -> int:
    """Bytes of the weights of a multimodal projector (`mmproj`), which llama.cpp puts on the card."""
    return sum(tensor.size_bytes for tensor in read_header(Path(path)).tensors)


def weigh(tensors: Iterator[Tensor] | list[Tensor], *, n_layer: int) -> Weights:
    """Sort tensors into the places that llama.cpp gives them (src/llama-arch.cpp, LLM_TENSOR_INFOS).

    Layers from `n_layer` on predict several tokens at once; the server skips them unless it is told to draft.
    """
    layers, experts = [0] * n_layer, [0] * n_layer
    input_bytes = output_bytes = skipped_bytes = embedding_bytes = 0
    tied = True
    for tensor in tensors:
        in_layer = _LAYER.match(tensor.name)
        if in_layer:
            index = int(in_layer[1])
            if index >= n_layer:
                skipped_bytes += tensor.size_bytes
                continue
            layers[index] += tensor.size_bytes
            if _EXPERT.search(in_layer[2]):
                experts[index] += tensor.size_bytes
        elif tensor.name.startswith(_INPUT_TENSORS):
            input_bytes += tensor.size_bytes
            if tensor.name == "token_embd.weight":
                embedding_bytes = tensor.size_bytes
        elif tensor.name.startswith(_FIRST_LAYER_TENSORS) and layers:
            layers[0] += tensor.size_bytes
        else:
            output_bytes += tensor.size_bytes
            tied = tied and tensor.name != "output.weight"
    return Weights(
        input_bytes=input_bytes,
        layer_bytes=tuple(layers),
        expert_bytes=tuple(experts),
        output_bytes=output_bytes,
        tied_bytes=embedding_bytes if tied else 0,
        skipped_bytes=skipped_bytes,
    )


def _shards(path: Path) -> list[Path]:
    """All files of a split model, in order, from any one of them."""
    if path.is_dir():
        raise ModelError(f"{path}: is a directory; name one GGUF file in it")
    shard = _SHARD.match(path.name)
    if shard is None:
        return [path]
    count = int(shard["count"])
    if not 0 < count <= MAX_SHARDS:
        raise ModelError(f"{path}: a model of {count} shards")
    paths = [path.with_name(f"{shard['stem']}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        raise ModelError(f"{path}: {len(missing)} of {count} shards are missing, first {missing[0]}")
    return paths


def _hparams(metadata: dict[str, Any], architecture: str) -> dict[str, Any]:
    prefix = architecture + "."
    return {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}


def _required(metadata: dict[str, Any], key: str, kind: Callable[..., Any], path: Path) -> Any:
    value = metadata.get(key)
    if not isinstance(value, kind):  # type: ignore[arg-type]
        raise ModelError(f"{path}: no {key} in its metadata: not a model that can be served")
    return value


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _bytes_by_type(tensors: list[Tensor]) -> tuple[tuple[str, int], ...]:
    sums: dict[str, int] = {}
    for tensor in tensors:
        sums[tensor.type_name] = sums.get(tensor.type_name, 0) + tensor.size_bytes
    return tuple(sorted(sums.items(), key=lambda item: -item[1]))
