"""What the API server's refusals mean for us."""

import json
from collections.abc import Mapping
from typing import Any

from rolloutfleet_operator.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    BlockedError,
    ConflictError,
    InvalidSpecError,
    NotFoundError,
    OperatorError,
    OwnershipConflictError,
    RefusedError,
    TransientError,
)


def refusal(status: int, body: bytes, retry_after: str | None, what: str) -> OperatorError:
    """The error to raise for an answer that is not a success; its message names the object and carries the server's words."""
    answer = _parse(body)
    words = str(answer.get("message") or body[:512].decode(errors="replace") or f"HTTP {status}")
    message = f"{what}: {words}"
    if status == 404:
        return NotFoundError(message)
    if status == 409:
        return _conflict(answer, message)
    if status == 403:
        return _forbidden(words, message)
    if status in (400, 413, 422):
        return InvalidSpecError(message)
    if status == 401 or status == 429 or status >= 500:
        return TransientError(message, float(retry_after) if retry_after and retry_after.isdigit() else None)
    return OperatorError(f"{message} (HTTP {status})")


def _forbidden(words: str, message: str) -> OperatorError:
    """Admission answers 403 as authorization does; only the words tell them apart."""
    if "exceeded quota" in words or "because it is being terminated" in words:
        return BlockedError(message)
    return AccessDeniedError(message) if " cannot " in words else RefusedError(message)


def _conflict(answer: Mapping[str, Any], message: str) -> OperatorError:
    if answer.get("reason") == "AlreadyExists":
        return AlreadyExistsError(message)
    causes = (answer.get("details") or {}).get("causes") or ()
    if any(cause.get("reason") == "FieldManagerConflict" for cause in causes):
        return OwnershipConflictError(message)
    return ConflictError(message)


def _parse(body: bytes) -> Mapping[str, Any]:
    try:
        answer = json.loads(body)
    except ValueError:  # a proxy in between may answer in HTML
        return {}
    return answer if isinstance(answer, dict) else {}
