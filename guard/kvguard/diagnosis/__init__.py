"""Evidence of a backend's end (or seeming end) -> Failure(stage, causes, confidence, evidence lines, remedy).

`diagnose(evidence)` for a log in hand; `diagnose(evidence, scan)` where `scan = Scan()` was fed a long log
line by line.
"""

from kvguard.diagnosis.scan import Scan
from kvguard.diagnosis.verdict import diagnose

__all__ = ["Scan", "diagnose"]
