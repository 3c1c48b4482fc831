"""Write the module table of docs/architecture.md from the first line of each module's docstring.

python scripts/modules.py          rewrite the table
python scripts/modules.py --check  exit 1 if it is out of date
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- modules -->", "<!-- /modules -->"
PACKAGES = ("guard/kvguard", "adapters/kvguard_adapters", "policies/kvguard_policies")


def rows() -> Iterator[str]:
    """One table row a module, in the order of the packages."""
    for package in PACKAGES:
        yield f"| **{package}** | |"
        for path in sorted((ROOT / package).rglob("*.py")):
            docstring = ast.get_docstring(ast.parse(path.read_text()))
            name = path.relative_to(ROOT / package).as_posix()
            if docstring and name != "__init__.py":
                first = docstring.splitlines()[0].rstrip(".").replace("|", "\\|")
                yield f"| `{name}` | {first} |"


def rendered() -> str:
    text = DOCUMENT.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    table = "\n".join(["| module | what it is |", "|---|---|", *rows()])
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def main() -> int:
    text = rendered()
    if "--check" in sys.argv[1:]:
        return int(text != DOCUMENT.read_text())
    DOCUMENT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
