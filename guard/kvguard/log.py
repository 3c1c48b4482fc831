"""Logging set up once: readable lines on the terminal, JSON lines in the state directory.

Below the chosen level a call costs next to nothing: the request path logs each decision at debug. What the
engine prints goes to the file alone, unless the terminal's level is debug. Prompt text and keys are never
passed to a logger; the tests read every file that a run wrote.
"""

from __future__ import annotations

import logging
import logging.handlers
import sys
from pathlib import Path

import structlog

LOG_BYTES = 20 << 20
LOG_FILES = 5
ENGINE_LOGGER = "kvguard.engine"


def configure(level: str, directory: Path | None) -> Path | None:
    """Send events of `level` and above to stderr and, with the engine's output, to a rotated file.

    Returns the file's path.
    """
    lowest = min(logging.getLevelNamesMapping()[level.upper()], logging.INFO)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(lowest),
        cache_logger_on_first_use=True,
    )
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setLevel(level.upper())
    if level != "debug":
        terminal.addFilter(lambda record: record.name != ENGINE_LOGGER)
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
    logging.basicConfig(level=lowest, handlers=handlers, force=True)
    for noisy in ("asyncio", "uvicorn.access", "uvicorn.error", "aiohttp", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return path
