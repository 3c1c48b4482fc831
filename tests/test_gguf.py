"""Reading GGUF headers: what they say, and what broken or hostile ones get."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFEndian, GGUFReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvguard.model import ModelError
from kvguard_adapters.models.gguf import (
    TENSOR_TYPES,
    Tensor,
    projector_bytes,
    read_gguf,
    read_header,
    read_variants,
    weigh,
)
from tiny_gguf import add_value, architectures, vocabulary, write_tiny, write_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tied=True)


def test_a_small_llama_is_read_whole(tiny: Path) -> None:
    meta = read_gguf(tiny)
    assert (meta.architecture, meta.n_layer, meta.n_vocab, meta.n_ctx_train) == ("llama", 2, 320, 4096)
    assert meta.chat_template is not None
    assert "im_start" in meta.chat_template
    assert meta.add_bos is True
    assert not meta.is_embedding
    assert meta.size_bytes == tiny.stat().st_size
    assert meta.token_text_bytes == sum(len(token.encode()) for token in vocabulary(320))
    assert meta.merges == 13


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "MXFP4"])
def test_tensors_agree_with_the_reference_reader(tmp_path: Path, kind: str) -> None:
    path = write_tiny_llama(tmp_path / "t.gguf", kind=kind)
    expected = {t.name: (t.tensor_type.name, t.n_bytes, t.n_elements) for t in GGUFReader(path).tensors}
    read = {t.name: (t.type_name, t.size_bytes, t.elements) for t in read_header(path).tensors}
    assert read == {name: (kind_, int(size), int(count)) for name, (kind_, size, count) in expected.items()}


def test_block_sizes_agree_with_the_reference_table() -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    for type_id, (name, block, size) in TENSOR_TYPES.items():
        # Q8_1 is never stored; the reference still has the size that it had before ggml's blocks shrank
        if name in GGMLQuantizationType.__members__ and name != "Q8_1":
            assert GGMLQuantizationType[name] == type_id
            assert GGML_QUANT_SIZES[GGMLQuantizationType[name]] == (block, size)


def test_both_byte_orders_say_the_same(tmp_path: Path, tiny: Path) -> None:
    big = read_gguf(write_tiny_llama(tmp_path / "big.gguf", tied=True, endian=GGUFEndian.BIG))
    little = read_gguf(tiny)
    assert (big.hparams, big.weights, big.parameters) == (little.hparams, little.weights, little.parameters)


def test_any_shard_stands_for_the_whole(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "s.gguf", split_max_tensors=7)
    whole = read_gguf(write_tiny_llama(tmp_path / "whole" / "s.gguf"))
    shards = sorted(tmp_path.glob("s-*.gguf"))
    assert len(shards) > 2
    for shard in shards:
        meta = read_gguf(shard)
        assert meta.weights == whole.weights
        assert len(meta.files) == len(shards)
        assert meta.chat_template == whole.chat_template


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "s.gguf", split_max_tensors=7)
    first, second, *_ = sorted(tmp_path.glob("s-*.gguf"))
    second.unlink()
    with pytest.raises(ModelError, match=second.name):
        read_gguf(first)


def test_a_header_changes_its_hash_and_data_does_not(tmp_path: Path, tiny: Path) -> None:
    other = write_tiny_llama(tmp_path / "other.gguf", tied=True, seed=1)
    renamed = write_tiny_llama(tmp_path / "renamed.gguf", tied=True, name="another")
    assert read_gguf(other).header_hash == read_gguf(tiny).header_hash
    assert read_gguf(renamed).header_hash != read_gguf(tiny).header_hash


def test_tensors_go_to_their_places() -> None:
    def tensor(name: str, size: int) -> Tensor:
        return Tensor(name=name, elements=size, type_name="I8", size_bytes=size)

    weights = weigh(
        [
            tensor("token_embd.weight", 1),
            tensor("blk.0.attn_q.weight", 10),
            tensor("blk.1.ffn_gate_exps.weight", 100),
            tensor("blk.2.nextn.eh_proj.weight", 1000),
            tensor("output_norm.weight", 10_000),
            tensor("token_embd_norm.weight", 100_000),
        ],
        n_layer=2,
    )
    assert weights.input_bytes == 1
    assert weights.layer_bytes == (100_010, 100)
    assert weights.expert_bytes == (0, 100)
    assert weights.skipped_bytes == 1000
    assert weights.output_bytes == 10_000
    assert weights.tied_bytes == 1
    assert weights.total_bytes == 110_111


def test_a_directory_is_its_variants_without_projectors(tmp_path: Path) -> None:
    for kind in ("Q4_0", "F16", "Q8_0"):
        write_tiny_llama(tmp_path / f"m-{kind}.gguf", kind=kind)
    write_tiny_llama(tmp_path / "mmproj-m.gguf")
    assert [Path(meta.path).name for meta in read_variants(tmp_path)] == [
        "m-F16.gguf",
        "m-Q8_0.gguf",
        "m-Q4_0.gguf",
    ]
    with pytest.raises(ModelError, match="no GGUF model"):
        read_variants(tmp_path / "empty")


def test_a_projector_is_all_weights(tiny: Path) -> None:
    assert projector_bytes(tiny) == read_gguf(tiny).weights.total_bytes


@pytest.mark.parametrize("architecture", sorted(architectures()))
def test_every_known_architecture_is_read(tmp_path: Path, architecture: str) -> None:
    meta = read_gguf(write_tiny(tmp_path / "a.gguf", architecture))
    assert meta.architecture == architecture
    assert meta.weights.total_bytes == sum(size for _, size in meta.tensor_types)
    assert len(meta.weights.layer_bytes) == meta.n_layer


# ---------------------------------------------------------------- hostile headers


def header(tensors: int = 0, pairs: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + body


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor_entry(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


ARCHITECTURE = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "not gguf": (b"MZ" + bytes(64), "not a GGUF"),
    "version 1": (header(version=1, body=bytes(64)), "version 1"),
    "version 9": (header(version=9, body=bytes(64)), "version 9"),
    "2^60 pairs": (header(pairs=1 << 60, body=bytes(64)), "claims"),
    "2^60 tensors": (header(tensors=1 << 60, body=bytes(64)), "claims"),
    "a key beyond the file": (header(pairs=1, body=struct.pack("<Q", 1 << 40)), "claims a text"),
    "a key just beyond the file": (header(pairs=1, body=struct.pack("<Q", 4000) + bytes(64)), "ends inside"),
    "an array of 2^60 strings": (
        header(pairs=1, body=text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 60) + bytes(64)),
        "claims",
    ),
    "an array of 2^60 numbers": (
        header(pairs=1, body=text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 60) + bytes(64)),
        "ends inside",
    ),
    "a string in an array beyond the file": (
        header(
            pairs=1, body=text(b"k") + struct.pack("<IIQ", 9, 8, 2) + struct.pack("<Q", 1 << 62) + bytes(64)
        ),
        "ends inside",
    ),
    "arrays without end": (
        header(pairs=1, body=text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 40),
        "unknown type",
    ),
    "an unknown value type": (
        header(pairs=1, body=text(b"k") + struct.pack("<I", 99) + bytes(64)),
        "unknown type 99",
    ),
    "a key twice": (header(pairs=2, body=ARCHITECTURE * 2 + bytes(64)), "twice"),
    "a tensor twice": (
        header(tensors=2, pairs=1, body=ARCHITECTURE + tensor_entry(b"t", (1,)) * 2 + bytes(256)),
        "twice",
    ),
    "a tensor of unknown type": (
        header(tensors=1, pairs=1, body=ARCHITECTURE + tensor_entry(b"t", (1,), kind=999) + bytes(64)),
        "unknown type 999",
    ),
    "a tensor of 2^60 columns": (
        header(tensors=1, pairs=1, body=ARCHITECTURE + tensor_entry(b"t", (1 << 60, 1 << 60)) + bytes(64)),
        "truncated",
    ),
    "a tensor far beyond the file": (
        header(tensors=1, pairs=1, body=ARCHITECTURE + tensor_entry(b"t", (1,), offset=1 << 60) + bytes(64)),
        "truncated",
    ),
    "a tensor of many dimensions": (
        header(tensors=1, pairs=1, body=ARCHITECTURE + text(b"t") + struct.pack("<I", 1 << 30) + bytes(64)),
        "dimensions",
    ),
    "half a block": (
        header(tensors=1, pairs=1, body=ARCHITECTURE + tensor_entry(b"t", (33,), kind=8) + bytes(99)),
        "whole blocks",
    ),
    "tensors on one another": (
        header(
            tensors=2,
            pairs=1,
            body=ARCHITECTURE + tensor_entry(b"t", (16,)) + tensor_entry(b"u", (16,)) + bytes(96),
        ),
        "overlap",
    ),
    "no architecture": (header(body=bytes(64)), "general.architecture"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_gets_a_clear_error_in_bounded_memory(tmp_path: Path, case: str) -> None:
    data, words = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=words):
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_strange_alignment_is_refused(tmp_path: Path) -> None:
    body = ARCHITECTURE + text(b"general.alignment") + struct.pack("<II", 4, 0)
    path = tmp_path / "a.gguf"
    path.write_bytes(header(pairs=2, body=body + bytes(64)))
    with pytest.raises(ModelError, match="alignment"):
        read_gguf(path)


def test_what_is_no_file_gets_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        read_gguf(tmp_path / "nothing.gguf")
    with pytest.raises(ModelError, match="directory"):
        read_gguf(tmp_path)
    with pytest.raises(ModelError, match="shards"):
        read_gguf(tmp_path / "m-00001-of-99999.gguf")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_and_never_crashes(tiny: Path, data: st.DataObject) -> None:
    whole = bytearray(tiny.read_bytes())
    header_end = len(whole) - read_gguf(tiny).weights.total_bytes
    if data.draw(st.booleans()):
        damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        damaged = whole
        for _ in range(data.draw(st.integers(1, 4))):
            damaged[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    path = tiny.with_name("damaged.gguf")
    path.write_bytes(damaged)
    try:
        meta = read_gguf(path)
    except ModelError as exc:
        assert str(path) in str(exc)  # noqa: PT017 - either outcome is right
    else:
        assert meta.weights.total_bytes <= len(damaged)


@pytest.mark.parametrize("cut", [1, 1000, 100_000])
def test_half_a_download_is_found(tmp_path: Path, tiny: Path, cut: int) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes(tiny.read_bytes()[:-cut])
    with pytest.raises(ModelError, match="truncated"):
        read_gguf(path)


def test_metadata_of_every_type_is_kept(tmp_path: Path) -> None:
    values: dict[str, object] = {"a": True, "b": 7, "c": 0.5, "d": "text", "e": [1, 0, 2], "f": [True, False]}
    path = write_tiny_llama(tmp_path / "v.gguf")
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    write: Callable[[str, object], None] = lambda key, value: add_value(writer, f"llama.{key}", value)  # noqa: E731
    for key, value in values.items():
        write(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = read_gguf(path).hparams
    assert {key: list(v) if isinstance(v, tuple) else v for key, v in read.items()} == values
