"""Errors that a client sees, in the shape its SDK expects."""

from __future__ import annotations

from collections.abc import Mapping

from seamless_verl.errors import SeamlessError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    502: "engine_error",
    503: "overloaded_error",
    504: "timeout_error",
}


_ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
_ANTHROPIC_TYPES = {
    408: "timeout_error",
    409: "invalid_request_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(SeamlessError):
    """A refusal with an HTTP status.

    Args:
        status: HTTP status code.
        code: short machine-readable name, e.g. ``session_closed``.
        message: what is wrong and what to do instead, for people.
        param: the request's field at fault, if one is.
        retry_after_s: when trying again may help; None means that it will not, and SDKs are told so.
    """

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self, path: str = "") -> dict[str, object]:
        """The error as the dialect spoken at ``path`` writes it."""
        if path.endswith(_ANTHROPIC_PATHS):
            message = f"{self.param}: {self.message}" if self.param else self.message
            kind = _ANTHROPIC_TYPES.get(self.status, _TYPES.get(self.status, "api_error"))
            return {"type": "error", "error": {"type": kind, "message": message, "code": self.code}}
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "api_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> Mapping[str, str]:
        # SDKs repeat 409, 429 and 5xx by themselves unless told otherwise.
        if self.retry_after_s is None:
            return {"x-should-retry": "false"}
        return {"retry-after": f"{max(1, round(self.retry_after_s))}", "x-should-retry": "true"}


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, code, message, param=param)
