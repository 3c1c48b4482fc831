"""File, environment and flags become one frozen object; the example documents every key truthfully."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvguard.settings import Section, Settings, SettingsError, format_size, load, parse_size

EXAMPLE = Path(__file__).parents[1] / "kvguard.example.toml"


def test_example_has_every_key_at_its_default() -> None:
    loaded = load(EXAMPLE)
    assert loaded == Settings()
    documented = re.findall(r"^#? ?(\w+) = ", EXAMPLE.read_text(), re.MULTILINE)
    keys = [key for section in Settings.model_fields.values() for key in _keys(section.annotation)]
    assert sorted(documented) == sorted(keys)


def _keys(section: type | None) -> list[str]:
    assert section is not None
    assert issubclass(section, Section)
    return list(section.model_fields)


def test_flags_beat_environment_beats_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kvguard.toml"
    file.write_text('[server]\nport = 1\nhost = "a"\n[degrade]\nmin_ctx = 512\n')
    monkeypatch.setenv("KVGUARD_SERVER__PORT", "2")
    monkeypatch.setenv("KVGUARD_SERVER__HOST", "b")
    settings = load(file, {"server": {"port": 3}})
    assert (settings.server.port, settings.server.host, settings.degrade.min_ctx) == (3, "b", 512)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("600MiB", 600 << 20), ("1g", 1 << 30), ("2GB", 2_000_000_000), ("1.5KiB", 1536), ("77", 77), (5, 5)],
)
def test_sizes(text: object, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("[memory]\nlimit_bytes = 'lots'", "memory.limit_bytes: 'lots' is not a size"),
        ("[server]\nprot = 1", "server.prot"),
        ("[knobs]\nbatch = 0", "knobs.batch"),
        ("[server", "is not valid TOML"),
    ],
)
def test_a_bad_file_names_the_key(tmp_path: Path, document: str, words: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(document)
    with pytest.raises(SettingsError, match=re.escape(words)):
        load(file)


def test_keys_never_show_in_a_printed_configuration() -> None:
    settings = load(None, {"server": {"api_keys": {"a": "sk-secret"}, "admin_key": "adm-secret"}})
    assert "secret" not in repr(settings)


def test_sizes_read_well() -> None:
    assert [format_size(n) for n in (12, 600 << 20, 2 << 30, 50 << 30)] == [
        "12 B",
        "600.0 MiB",
        "2.00 GiB",
        "50.0 GiB",
    ]
