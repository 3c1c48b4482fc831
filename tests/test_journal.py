"""The journal: nothing lost, nothing half, read back as far as it is known, quick at 100,000 records."""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
import time
from dataclasses import replace
from pathlib import Path

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from journal_writer import append_many
from kvguard.domain import (
    MIB,
    Basis,
    CardInfo,
    Entry,
    Knobs,
    Phase,
    PhasePeak,
    PoolKind,
    Rung,
    Stage,
    Variant,
)
from kvguard.journal import (
    BackendRecord,
    CardRecord,
    FailureRecord,
    FileRecord,
    Fingerprint,
    Journal,
    ModelRecord,
    Present,
    Record,
    RequestRecord,
    WhyRecord,
    card_record,
    journal_of,
    new_id,
    now_iso,
    read_all,
)
from kvguard.record import schema_text

SCHEMA_FILE = Path(__file__).parent.parent / "docs" / "journal.schema.json"
CARD = CardInfo(kind="cgroup", name="kvguard/a", total_bytes=600 * MIB)
QUANT = Variant(kind="gguf", source="/models/m-q4.gguf", bits=4.9, label="Q4_K_M", size_bytes=253_113_024)
KNOBS = Knobs(batch=4, ctx_tokens=2048, pool_tokens=8192, pool_kind=PoolKind.UNIFIED, quant=QUANT)
FAILURE = FailureRecord(
    stage=Stage.LOAD, causes=("kv_dont_fit",), confidence=0.9, evidence=("failed to allocate",)
)
PEAKS = tuple(
    PhasePeak(
        phase=phase,
        peak_bytes=300 * MIB,
        last_bytes=299 * MIB,
        source="cgroup v1",
        interval_s=0.05,
        samples=40,
        started_at=1.0,
        ended_at=2.0,
    )
    for phase in (Phase.BASELINE, Phase.LOADING, Phase.LOADED_IDLE)
)
ENTRIES = (
    Entry(account="weights", name="tensors", size_bytes=222 * MIB, basis=Basis.EXACT),
    Entry(account="kv", name="cells", size_bytes=84 * MIB, basis=Basis.EXACT),
)


def record(worked: bool = True, *, at: int = 0, knobs: Knobs = KNOBS, **more: object) -> Record:
    fields: dict[str, object] = {
        "id": new_id(),
        "time": f"2026-12-01T00:00:{at:02d}.000+00:00",
        "event": "config_provisional" if worked else "config_failed",
        "card": card_record(CARD),
        "backend": BackendRecord(name="llama-server", version="b1"),
        "model": ModelRecord(name="m", header_hash="ab", files=(FileRecord(name="m.gguf", size_bytes=9),)),
        "knobs": knobs,
        "failure": None if worked else FAILURE,
    }
    return Record(**{**fields, **more})  # type: ignore[arg-type]


HERE = Fingerprint(card=record().card, backend=record().backend, model=record().model)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return journal_of(tmp_path / "state", CARD)


# ---------------------------------------------------------------- written and read back


def test_a_record_comes_back_as_it_was_written_with_its_load_lines(journal: Journal) -> None:
    full = record(
        command=("llama-server", "-m", "m.gguf"),
        memory=PEAKS,
        predicted=ENTRIES,
        measured=ENTRIES,
        requests=(RequestRecord(prompt_tokens=8, max_new_tokens=4, new_tokens=4, seconds=0.1),),
        libraries={"torch": None, "llama.cpp": "b1"},
        why=WhyRecord(kind="degraded", from_id="x", rung=Rung.BATCH),
    )
    journal.append(full, ["load_tensors: CPU model buffer size = 222.00 MiB"])
    assert journal.records() == [full]
    assert journal.load_lines(full.id) == ["load_tensors: CPU model buffer size = 222.00 MiB"]
    assert journal.load_lines("none") == []
    assert journal.find(full.id) == full
    assert journal.find("none") is None


def test_an_empty_state_directory_has_no_records(journal: Journal, tmp_path: Path) -> None:
    assert journal.records() == []
    assert journal.usable(HERE) == []
    assert read_all(tmp_path) == ([], 0)


def test_only_the_owner_may_read_a_journal(journal: Journal) -> None:
    journal.append(record(), ["line"])
    paths = [journal.path, journal.path.parent, journal.load_lines_dir]
    assert [path.stat().st_mode & 0o077 for path in paths] == [0, 0, 0]


def test_each_card_has_its_own_file_and_all_are_read_together(tmp_path: Path) -> None:
    other = replace(CARD, total_bytes=400 * MIB)
    late, early = record(at=2), record(at=1, card=card_record(other))
    journal_of(tmp_path, CARD).append(late)
    journal_of(tmp_path, other).append(early)
    (tmp_path / "kvguard.jsonl").write_text('{"event": "a log line, not a record"}\n')
    assert len(list(tmp_path.glob("journal-*.jsonl"))) == 2
    assert read_all(tmp_path) == ([early, late], 0)


def test_a_load_line_file_is_never_outside_the_state_directory(journal: Journal) -> None:
    journal.append(record(id="../../escape"), ["line"])
    assert journal.load_lines("../../escape") == ["line"]
    assert not list(journal.path.parent.parent.glob("escape*"))


# ---------------------------------------------------------------- damage


@given(cut=st.integers(0, 400))
@settings(max_examples=60, deadline=None)
def test_a_torn_last_line_costs_nothing_but_itself(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    journal = Journal(tmp_path_factory.mktemp("torn") / "journal-x.jsonl")
    first, torn, later = record(at=1), record(at=2), record(at=3)
    journal.append(first)
    journal.append(torn)
    data = journal.path.read_bytes()
    whole = len(msgspec.json.encode(torn))
    keep = min(cut, whole)
    journal.path.write_bytes(data[: data.index(b"\n") + 1 + keep])
    survivors = [first, torn] if keep == whole else [first]
    assert journal.records() == survivors
    assert journal.skipped_lines == (0 if keep in (0, whole) else 1)
    journal.append(later)
    assert journal.records() == [*survivors, later]
    assert journal.skipped_lines == 0


def test_corrupt_lines_are_skipped_and_counted(journal: Journal, tmp_path: Path) -> None:
    good = journal.append(record())
    bad_range = msgspec.json.encode(record()).replace(b'"batch":4', b'"batch":-4')
    with journal.path.open("ab") as file:
        file.write(b"\x00\xff\x00\n\n{}\n[1,2]\n" + bad_range + b"\n" + b'{"event":"config_confirmed"}\n')
    assert journal.records() == [good]
    assert journal.skipped_lines == 5  # the empty line is none
    assert read_all(journal.path.parent) == ([good], 5)
    assert [r.id for r in journal.usable(HERE)] == [good.id]


def test_a_newer_schema_is_read_as_far_as_it_is_known(journal: Journal) -> None:
    plain = json.loads(msgspec.json.encode(record(memory=PEAKS)))
    newer_fields = {**plain, "schema": 2, "colour": "blue", "card": {**plain["card"], "numa": 1}}
    newer_words = {**plain, "schema": 2, "memory": [{"phase": "orbit"}], "others_bytes": 7}
    newer_event = {**plain, "schema": 2, "event": "config_dreamt"}
    unknown_event = {**plain, "event": "config_dreamt"}
    journal.path.parent.mkdir()
    journal.path.write_text(
        "".join(json.dumps(r) + "\n" for r in (newer_fields, newer_words, newer_event, unknown_event))
    )
    first, second = journal.records()
    assert (first.schema, first.memory) == (2, PEAKS)
    assert (second.memory, second.others_bytes, second.knobs) == ((), 7, KNOBS)
    assert (journal.newer_lines, journal.skipped_lines) == (1, 1)


def test_a_disk_that_refuses_leaves_the_journal_as_it_was(journal: Journal) -> None:
    first = journal.append(record())
    size = journal.path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            journal.append(record())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert journal.path.stat().st_size == size
    second = journal.append(record())
    assert journal.records() == [first, second]
    assert journal.skipped_lines == 0


# ---------------------------------------------------------------- several processes, and kill -9

fork = multiprocessing.get_context("forkserver")
fork.set_forkserver_preload(["journal_writer"])


def test_processes_that_append_at_once_lose_and_mix_nothing(journal: Journal) -> None:
    writers = [fork.Process(target=append_many, args=(journal.path, record(), f"w{n}", 50)) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    ids = [r.id for r in journal.records()]
    assert journal.skipped_lines == 0
    assert sorted(ids) == sorted(f"w{n}-{i}" for n in range(4) for i in range(50))
    for n in range(4):  # each writer's own order is kept
        assert [i for i in ids if i.startswith(f"w{n}-")] == [f"w{n}-{i}" for i in range(50)]


def test_kill_9_at_random_instants_loses_no_acknowledged_record_and_leaves_none_half(
    journal: Journal,
) -> None:
    rng = random.Random(20261201)
    acknowledged: list[str] = []
    for life in range(40):
        ours, theirs = fork.Pipe(duplex=False)
        writer = fork.Process(
            target=append_many, args=(journal.path, record(), f"life{life}", 10_000, theirs)
        )
        writer.start()
        theirs.close()
        acknowledged += [ours.recv() for _ in range(rng.randint(1, 5))]
        spin_until = time.perf_counter() + rng.uniform(0, 0.004)
        while time.perf_counter() < spin_until:
            pass
        writer.kill()
        writer.join()
        while True:  # what it had acknowledged before it died
            try:
                acknowledged.append(ours.recv())
            except EOFError:
                break
    acknowledged.append(journal.append(record(), ["load line"]).id)  # a next start writes, too
    ids = [r.id for r in journal.records()]
    assert journal.skipped_lines == 0
    assert len(ids) == len(set(ids))
    assert set(acknowledged) <= set(ids)
    assert len(ids) - len(acknowledged) <= 40  # at most the one that was being acknowledged
    assert all(journal.load_lines(record_id) == ["load line"] for record_id in ids)


# ---------------------------------------------------------------- what a later start asks


def test_usable_gives_working_configurations_newest_first(journal: Journal) -> None:
    small = replace(KNOBS, batch=1)
    for r in (
        record(at=1),
        record(at=2, knobs=small),
        record(at=3),
        record(worked=False, at=4, knobs=replace(KNOBS, batch=8)),
    ):
        journal.append(r)
    assert [(r.knobs.batch, r.time[17:19]) for r in journal.usable(HERE)] == [(4, "03"), (1, "02")]
    assert [r.knobs.batch for r in journal.usable(HERE, limit=1)] == [4]


@pytest.mark.parametrize(
    ("story", "usable", "refuted"),
    [
        # (worked, bytes held by others) in order of time; asked with 10 bytes held by others
        ([(True, 0)], True, False),
        ([(False, 0)], False, True),
        ([(True, 0), (False, 0)], False, True),
        ([(False, 0), (True, 0)], True, False),
        ([(True, 0), (False, 10)], True, True),  # others held more at the failure, and as much as now
        ([(True, 0), (False, 11)], True, False),
        ([(False, 11)], False, False),  # it failed while others held more than now: it may be tried
        ([(True, 11), (False, 0)], False, True),
    ],
)
def test_the_newest_word_on_a_configuration_counts(
    journal: Journal, story: list[tuple[bool, int]], usable: bool, refuted: bool
) -> None:
    for at, (worked, others_bytes) in enumerate(story):
        journal.append(record(worked, at=at, others_bytes=others_bytes))
    assert bool(journal.usable(HERE)) is usable
    assert journal.refuted(HERE, others_bytes=10) == ([KNOBS] if refuted else [])


def test_latest_is_the_newest_word_on_one_configuration(journal: Journal) -> None:
    journal.append(record(at=1))
    newest = journal.append(record(worked=False, at=2))
    journal.append(record(at=3, knobs=replace(KNOBS, batch=1)))
    assert journal.latest(HERE, KNOBS) == newest
    assert journal.latest(HERE, replace(KNOBS, batch=2)) is None


def test_knobs_that_an_older_version_wrote_with_fewer_fields_are_the_same_configuration(
    journal: Journal,
) -> None:
    older = json.loads(msgspec.json.encode(record(worked=False)))
    del older["knobs"]["host_cache_bytes"]
    journal.path.parent.mkdir()
    journal.path.write_text(json.dumps(older) + "\n")
    assert journal.refuted(HERE, 0) == [KNOBS]
    journal.append(record())
    assert journal.refuted(HERE, 0) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"card": CardRecord(kind="cgroup", name="kvguard/a", total_bytes=1)}, "card memory: 629145600 -> 1"),
        (
            {"card": CardRecord(kind="nvml", name="kvguard/a", total_bytes=600 * MIB)},
            "card kind: cgroup -> nvml",
        ),
        (
            {"card": CardRecord(kind="cgroup", name="kvguard/a", total_bytes=600 * MIB, driver="560")},
            "driver:  -> 560",
        ),
        ({"backend": BackendRecord(name="llama-server", version="b2")}, "backend version: b1 -> b2"),
        ({"backend": BackendRecord(name="vllm", version="b1")}, "backend: llama-server -> vllm"),
        ({"model": ModelRecord(name="n", header_hash="ab")}, "model: m -> n"),
        ({"model": ModelRecord(name="m", header_hash="cd")}, "model file: ab -> cd"),
    ],
)
def test_a_change_of_the_machine_unverifies_and_is_named(
    journal: Journal, change: dict[str, object], says: str
) -> None:
    written = journal.append(record())
    journal.append(record(worked=False, knobs=replace(KNOBS, batch=8)))
    now = msgspec.structs.replace(HERE, **change)
    assert now.changes_from(written) == (says,)
    assert journal.usable(now) == []
    assert journal.refuted(now, 0) == []
    assert HERE.changes_from(written) == ()


@pytest.mark.parametrize(
    ("present", "says"),
    [
        (Present(), ()),
        (Present(others_bytes=60 * MIB, source="cgroup v1", longest_prompt_tokens=100), ()),
        (Present(others_bytes=80 * MIB), ("memory held by others: 0 -> 83886080 bytes",)),
        (Present(source="polling"), ("source of readings: cgroup v1 -> polling",)),
        (Present(longest_prompt_tokens=101), ("longer input: 100 -> 101 prompt tokens",)),
    ],
)
def test_drift_is_named(present: Present, says: tuple[str, ...]) -> None:
    assert present.changes_from(record(memory=PEAKS, verified_prompt_tokens=100)) == says


# ---------------------------------------------------------------- size


def test_a_journal_of_100_000_records_is_answered_from_few_full_decodes(journal: Journal) -> None:
    """Counted in work, not in seconds: only what is given back is decoded in full."""
    shapes = [
        record(n % 3 > 0, at=n % 60, knobs=replace(KNOBS, batch=1 + n), memory=PEAKS) for n in range(500)
    ]
    lines = b"".join(msgspec.json.encode(r) + b"\n" for r in shapes)
    journal.path.parent.mkdir()
    with journal.path.open("wb") as file:
        for _ in range(200):
            file.write(lines)
    decoded = []
    decode = journal.decode
    journal.decode = lambda line: decoded.append(line) or decode(line)  # type: ignore[func-returns-value, method-assign]
    began_s = time.process_time()
    usable, refuted = journal.usable(HERE), journal.refuted(HERE, 0)
    spent_s = time.process_time() - began_s
    assert (len(usable), len(refuted), len(decoded)) == (200, 167, 200)
    assert spent_s < 20  # two questions; a bound only against decoding everything again and again


# ---------------------------------------------------------------- schema


def test_the_published_schema_is_that_of_the_code() -> None:
    remedy = (
        "run: python -c \"from kvguard.record import schema_text; print(schema_text(), end='')\" "
        "> docs/journal.schema.json"
    )
    assert SCHEMA_FILE.read_text() == schema_text(), remedy


def test_written_lines_validate_against_the_published_schema(journal: Journal) -> None:
    journal.append(
        record(memory=PEAKS, predicted=ENTRIES, why=WhyRecord(kind="self_tune"), libraries={"a": None})
    )
    journal.append(record(worked=False))
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text()))
    lines = [json.loads(line) for line in journal.path.read_text().splitlines()]
    for line in lines:
        validator.validate(line)
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({**lines[0], "event": "config_dreamt"})


def test_ids_and_times_sort_by_time() -> None:
    assert sorted([now_iso(), "2026-01-01T00:00:00.000+00:00"])[0].startswith("2026-01")
    assert len({new_id() for _ in range(1000)}) == 1000
