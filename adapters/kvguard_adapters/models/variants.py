"""Find other quantisations of a model: files beside it, or files that the user listed.

A name proves nothing: `chat-q4.gguf` may be another fine-tune. The metadata has to agree: architecture,
hyperparameters, vocabulary, chat template, and (for files that nobody vouched for) the model's own name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvguard.model import ModelError, ModelMeta
from kvguard_adapters.models.gguf import read_gguf

MAX_NEIGHBOURS = 64
"""A folder may hold hundreds of models; the largest ones below the model's size are looked at."""

Read = Callable[[Path], ModelMeta]


def smaller_variants(
    model: ModelMeta, listed: Sequence[str] = (), *, read: Read = read_gguf
) -> list[ModelMeta]:
    """Variants of a GGUF model that are smaller than it, the largest first; `.variant()` of each is a quant.

    Raises ModelError for a listed file that cannot be read or is another model.
    """
    vouched = [_vouched(model, Path(path), read) for path in listed]
    known = {Path(meta.path).resolve() for meta in vouched}
    found = vouched + [meta for meta in _neighbours(model, read) if Path(meta.path).resolve() not in known]
    smaller = [meta for meta in found if meta.weights.total_bytes < model.weights.total_bytes]
    return sorted(smaller, key=lambda meta: meta.weights.total_bytes, reverse=True)


def _vouched(model: ModelMeta, path: Path, read: Read) -> ModelMeta:
    meta = read(path)
    different = [what for what, ours, theirs in _identity(model, meta) if ours != theirs]
    if different:
        raise ModelError(f"{path} is no variant of {model.name}: its {', '.join(different)} differ")
    return meta


def _neighbours(model: ModelMeta, read: Read) -> Iterable[ModelMeta]:
    own = {Path(file.path).resolve() for file in model.files}
    files = [path for path in Path(model.path).resolve().parent.glob("*.gguf") if path.resolve() not in own]
    below = sorted((p for p in files if p.stat().st_size < model.size_bytes), key=lambda p: -p.stat().st_size)
    seen: set[str] = set()
    for path in below[:MAX_NEIGHBOURS]:
        try:
            meta = read(path)
        except ModelError:
            continue  # a half download, a projector: not ours to complain about
        alike = all(ours == theirs for _, ours, theirs in _identity(model, meta))
        if alike and meta.name == model.name and meta.path not in seen:
            seen.add(meta.path)  # each shard of a split file reads as the same whole
            yield meta


def _identity(ours: ModelMeta, theirs: ModelMeta) -> list[tuple[str, object, object]]:
    return [
        ("architecture", ours.architecture, theirs.architecture),
        ("hyperparameters", dict(ours.hparams), dict(theirs.hparams)),
        ("vocabulary", _vocabulary(ours), _vocabulary(theirs)),
        ("chat template", ours.chat_template, theirs.chat_template),
    ]


def _vocabulary(meta: ModelMeta) -> tuple[int, int, int]:
    return meta.n_vocab, meta.token_text_bytes, meta.merges
