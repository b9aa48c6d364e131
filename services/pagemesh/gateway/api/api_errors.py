"""What a client is told when something is wrong, in OpenAI's form.

{"error": {"message", "type", "param", "code"}}

    400 the request is at fault (param names what)    401 no valid API key
    403 the mesh denied it to the gateway             404 no such path or model
    405 the path takes another method                 408 the body did not arrive in time
    409 the idempotency key is in use                 413 the body is too large
    415 the body is compressed                        429 too many requests, here or of the tenant
    500 a bug                                         503 the mesh is overloaded or not ready
    504 the deadline passed
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pagemesh.gateway.calls.events import WhyCancelled
from pagemesh.wire.errors import (
    Busy,
    DeadlineExceeded,
    Denied,
    Disconnected,
    Fault,
    GrammarRefused,
    Malformed,
    NoCapacity,
    NotReady,
    NotServed,
    OverQuota,
    Superseded,
)

_TOO_LATE = "deadline_exceeded"
_CANCELLED: dict[WhyCancelled, tuple[str, str]] = {
    "left": ("cancelled", "the request was cancelled"),
    "slow": ("slow_reader", "the client read the answer too slowly; too much of it was buffered"),
    "stopped": ("stopped", "the gateway was stopped before the answer was complete; ask again"),
}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(slots=True, eq=False)
class ApiError(Exception):
    """Raised anywhere between a front door and the mesh; ``param`` and ``code`` may be empty.

    ``retry_after_ms`` above 0 becomes a ``Retry-After`` header in whole seconds. OpenAI's SDKs do
    not repeat a request that missed its deadline (``x-should-retry``).
    """

    status: int
    message: str
    param: str = ""
    code: str = ""
    retry_after_ms: int = 0

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error")

    @property
    def headers(self) -> dict[str, str]:
        if self.code == _TOO_LATE:  # SDKs repeat what gets a 5xx; this would most likely fail again
            return {"x-should-retry": "false"}
        if not self.retry_after_ms:
            return {}
        return {"retry-after": str(max(1, -(-self.retry_after_ms // 1_000)))}

    def body(self) -> bytes:
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param or None,
                    "code": self.code or None,
                }
            }
        )


class ClientLeft(Exception):
    """The client has disconnected: nobody is left to answer."""


def missing(param: str) -> ApiError:
    """The error for a required parameter that is missing."""
    return ApiError(400, f"missing parameter: {param}", param, "missing_required_parameter")


def bad(param: str, message: str, *, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param, code)


def unsupported(param: str, what: str = "") -> ApiError:
    name = what or param
    return ApiError(400, f"not supported yet: {name}", param, "unsupported_parameter")


def cancelled(why: WhyCancelled) -> ApiError:
    """What a client, if it is still there, is told about an answer that was cancelled."""
    code, text = _CANCELLED[why]
    return ApiError(503, text, code=code)


def from_fault(fault: Fault) -> ApiError:
    """A fault of the mesh as clients see it. Messages that tell of a bug, or of our inner workings,
    are not quoted."""
    if isinstance(fault, OverQuota) and not fault.retry_after_ms:
        return ApiError(400, fault.message, code="quota_exceeded")
    if isinstance(fault, NoCapacity) and not fault.retry_after_ms:
        return ApiError(400, fault.message, code="context_length_exceeded")
    if isinstance(fault, GrammarRefused):
        return ApiError(400, fault.message, code="invalid_grammar")
    after_ms = fault.retry_after_ms or 1_000
    if isinstance(fault, NotServed):
        return ApiError(503, fault.message, code="not_ready", retry_after_ms=after_ms)
    if isinstance(fault, NotReady):
        text = (
            "no worker is ready yet: workers are still loading, restarting, or without a pager; "
            "retry soon"
        )
        return ApiError(503, text, code="not_ready", retry_after_ms=after_ms)
    if isinstance(fault, Superseded):
        text = (
            "the model was replaced by another version while this answer was generated; ask "
            "again to get an answer from the new version"
        )
        return ApiError(503, text, code="model_replaced", retry_after_ms=after_ms)
    if isinstance(fault, Disconnected):
        text = "the gateway cannot reach its workers; retry soon"
        return ApiError(503, text, code="not_ready", retry_after_ms=after_ms)
    if isinstance(fault, Busy | NoCapacity):
        return ApiError(
            503, "the mesh is overloaded; retry later", code="overloaded", retry_after_ms=after_ms
        )
    if isinstance(fault, DeadlineExceeded):
        return ApiError(504, "the request's deadline passed", code=_TOO_LATE)
    if isinstance(fault, Denied):
        return ApiError(403, "not allowed", code="denied")
    if isinstance(fault, Malformed):
        return ApiError(500, "a worker rejected the request as malformed", code="malformed")
    return ApiError(500, "internal error in the mesh", code=fault.code.lower())
