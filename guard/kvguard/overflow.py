"""Tell that an engine has failed a request for want of KV cells: the fault of its pool, not of the request.

llama.cpp fails every running request when one pool runs out (tools/server, `update_slots`): in the stream, or
with HTTP 500. A request that is too large by itself gets 400 and other words.
"""

from __future__ import annotations

from kvguard.relay import Broken

MOST_OVERFLOWS = 3
"""After so many the engine's own word goes to the client: its pool is not what it says it is."""

_WORDS = b"Context size has been exceeded"


def is_overflow(outcome: Broken) -> bool:
    """Whether what was held back is such a failure. Only errors are held back, so no answer is misread."""
    held = outcome.held
    return held is not None and (held.events or held.status >= 500) and _WORDS in held.body
