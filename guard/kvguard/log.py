"""Logging set up once: readable lines on the terminal, JSON lines in the state directory.

Prompt text and keys are never passed to a logger; the tests read every file that a run wrote.
"""

from __future__ import annotations

import logging
import logging.handlers
import sys
from pathlib import Path

import structlog

LOG_BYTES = 20 << 20
LOG_FILES = 5


def configure(level: str, directory: Path | None) -> Path | None:
    """Send events of `level` and above to stderr, and all of them to a rotated file. Returns the file."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setLevel(level.upper())
    terminal.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=28),
            ],
        )
    )
    handlers: list[logging.Handler] = [terminal]
    path = None
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = directory / "kvguard.jsonl"
        file = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=LOG_FILES - 1)
        file.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=shared,
                processors=[
                    structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                    structlog.processors.dict_tracebacks,
                    structlog.processors.JSONRenderer(default=str),
                ],
            )
        )
        handlers.append(file)
    logging.basicConfig(level=logging.DEBUG, handlers=handlers, force=True)
    for noisy in ("asyncio", "uvicorn.access", "aiohttp", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return path
