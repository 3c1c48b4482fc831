"""The documents tell the truth: the module table is current, commands and links exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_module_table_is_current() -> None:
    result = subprocess.run([sys.executable, "scripts/modules.py", "--check"], cwd=ROOT, check=False)
    assert result.returncode == 0, "run: python scripts/modules.py"


@pytest.mark.parametrize("document", ["README.md", "docs/architecture.md", "CHANGELOG.md"])
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+?)\)", path.read_text()):
        assert "://" in target or (path.parent / target).exists(), target


def test_commands_of_the_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z-]+)", readme)) <= targets
    shown = subprocess.run(
        [sys.executable, "-m", "kvguard.cli", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for command in set(re.findall(r"(?:\$|`)\s?kvguard ([a-z]+)", readme)):
        assert command in shown, command
