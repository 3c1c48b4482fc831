"""Which files beside a model are the same model in fewer bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvguard.model import ModelError, ModelMeta
from kvguard_adapters.models.gguf import read_gguf
from kvguard_adapters.models.variants import smaller_variants
from tiny_gguf import write_tiny_llama


@pytest.fixture
def model(tmp_path: Path) -> ModelMeta:
    write_tiny_llama(tmp_path / "q4.gguf", kind="Q4_0")
    write_tiny_llama(tmp_path / "any-name.gguf", kind="Q8_0")
    return read_gguf(write_tiny_llama(tmp_path / "full.gguf", kind="F16"))


def names(found: list[ModelMeta]) -> list[str]:
    return [Path(meta.path).name for meta in found]


def test_smaller_files_of_the_same_model_are_its_variants_the_largest_first(model: ModelMeta) -> None:
    found = smaller_variants(model)
    assert names(found) == ["any-name.gguf", "q4.gguf"]
    q8, q4 = (meta.variant() for meta in found)
    assert model.variant().bits > q8.bits > q4.bits
    assert names(smaller_variants(found[0])) == ["q4.gguf"]
    assert smaller_variants(found[1]) == []


@pytest.mark.parametrize("change", [{"name": "another-tune"}, {"layers": 1}, {"ff": 64}, {"vocab": 300}])
def test_another_model_is_no_variant_whatever_its_file_is_called(
    model: ModelMeta, change: dict[str, object]
) -> None:
    write_tiny_llama(Path(model.path).parent / "full-q2.gguf", kind="Q4_0", **change)  # type: ignore[arg-type]
    assert names(smaller_variants(model)) == ["any-name.gguf", "q4.gguf"]


def test_a_broken_neighbour_is_passed_over(model: ModelMeta) -> None:
    folder = Path(model.path).parent
    (folder / "half.gguf").write_bytes((folder / "q4.gguf").read_bytes()[:-500])
    (folder / "empty.gguf").touch()
    assert names(smaller_variants(model)) == ["any-name.gguf", "q4.gguf"]


def test_a_split_neighbour_counts_once(model: ModelMeta, tmp_path: Path) -> None:
    for name in ("q4.gguf", "any-name.gguf"):
        (tmp_path / name).unlink()
    write_tiny_llama(tmp_path / "shards.gguf", kind="Q8_0", split_max_tensors=10)
    assert len(list(tmp_path.glob("shards-*.gguf"))) > 1
    assert len(smaller_variants(model)) == 1


def test_a_listed_file_may_lie_elsewhere_and_have_another_name_inside(
    model: ModelMeta, tmp_path: Path
) -> None:
    elsewhere = write_tiny_llama(tmp_path / "far" / "v.gguf", kind="Q5_0", name="renamed by its uploader")
    beside = str(Path(model.path).parent / "q4.gguf")
    found = smaller_variants(model, [str(elsewhere), beside])
    assert names(found) == ["any-name.gguf", "v.gguf", "q4.gguf"]


def test_a_listed_file_that_is_another_model_is_refused_with_the_difference(
    model: ModelMeta, tmp_path: Path
) -> None:
    other = write_tiny_llama(tmp_path / "far" / "v.gguf", layers=1)
    with pytest.raises(ModelError, match=r"v\.gguf is no variant of tiny-llama: its hyperparameters differ"):
        smaller_variants(model, [str(other)])
    with pytest.raises(ModelError, match="No such file"):
        smaller_variants(model, [str(tmp_path / "none.gguf")])
