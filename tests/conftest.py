"""What holds for all tests."""

from __future__ import annotations

import os

# One thread an engine: several run at once here, and llama.cpp's threads spin while they wait for each other.
os.environ.setdefault("LLAMA_ARG_THREADS", "1")
