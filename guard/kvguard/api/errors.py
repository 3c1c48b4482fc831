"""The one builder of errors: OpenAI's shape, status, and what tells a client's retry logic what to do."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from kvguard.api.asgi import Headers
from kvguard.domain import ErrorCode, Refusal

_STATUS: dict[ErrorCode, int] = {
    "context_length_exceeded": 400,
    "invalid_request": 400,
    "request_poisonous": 400,
    "unauthorized": 401,
    "rate_limited": 429,
    "backend_restarted": 502,
    "overloaded": 503,
    "backend_starting": 503,
    "backend_failed": 503,
}
_TYPE: dict[int, str] = {
    401: "authentication_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    502: "server_error",
    503: "server_error",
}
_RETRY_AFTER_S: dict[ErrorCode, float] = {"overloaded": 1.0, "rate_limited": 1.0, "backend_starting": 2.0}
_POINTLESS_TO_RETRY: frozenset[ErrorCode] = frozenset({"backend_failed", "request_poisonous"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """An error as HTTP. `status` differs from the code's own only for a body that is too large (413)."""

    code: ErrorCode
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    status: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", self.status or _STATUS[self.code])
        if self.retry_after_s is None:
            object.__setattr__(self, "retry_after_s", _RETRY_AFTER_S.get(self.code))

    @classmethod
    def of(cls, refusal: Refusal) -> ErrorReply:
        return cls(
            code=refusal.code,
            message=refusal.message,
            param=refusal.param,
            retry_after_s=refusal.retry_after_s,
        )

    def body(self) -> bytes:
        error = {
            "message": self.message,
            "type": _TYPE.get(self.status, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def headers(self) -> Headers:
        """Content type, and the three headers that the openai clients obey when they retry."""
        headers: Headers = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode()))
            headers.append((b"retry-after-ms", str(math.ceil(self.retry_after_s * 1000)).encode()))
        if self.code in _POINTLESS_TO_RETRY:
            headers.append((b"x-should-retry", b"false"))
        if self.status == 413:  # the rest of the body was not read
            headers.append((b"connection", b"close"))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers

    def event(self) -> bytes:
        """The same error inside a stream whose status was already sent."""
        return b"data: " + self.body() + b"\n\n"
