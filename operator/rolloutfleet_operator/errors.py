"""The error taxonomy. Each class says who must act; ``reconcile.taxonomy`` says what the operator does about it."""

from typing import ClassVar


class OperatorError(Exception):
    """Base of everything that the operator raises on purpose; ``reason`` becomes a condition's reason."""

    reason: ClassVar[str] = "InternalError"

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(message)


class InvalidSpecError(OperatorError):
    """The user must change the object; nothing is retried until its generation changes."""

    reason = "InvalidSpec"


class OwnershipConflictError(OperatorError):
    """An object that the fleet needs belongs to someone else; it is neither adopted nor deleted."""

    reason = "OwnershipConflict"


class BlockedError(OperatorError):
    """Another party must act first, such as the garbage collector or a quota."""

    reason = "Blocked"


class RefusedError(OperatorError):
    """The cluster's own policy refuses an object: pod security, limits, a service account or priority class that is missing."""

    reason = "Refused"


class ConflictError(OperatorError):
    """The object changed under our hands; the next pass sees the change."""

    reason = "Conflict"


class TransientError(OperatorError):
    """The API server did not answer, or asked to come back later."""

    reason = "ApiUnavailable"

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class AccessDeniedError(OperatorError):
    """The operator's service account may not do what it must."""

    reason = "AccessDenied"


class NotFoundError(OperatorError):
    """The object is not there; callers that can do without it catch this."""

    reason = "NotFound"


class AlreadyExistsError(OperatorError):
    """A create met an object of the same name."""

    reason = "AlreadyExists"


class LeaseLostError(OperatorError):
    """This process may no longer act; it must end."""

    reason = "LeaseLost"


class SetupError(OperatorError):
    """The cluster is not prepared for the operator: a CRD or a permission is missing."""

    reason = "SetupIncomplete"
