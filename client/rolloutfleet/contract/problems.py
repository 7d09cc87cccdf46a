"""Errors as they cross the wire, and the exceptions that a caller sees."""

from enum import StrEnum
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class ProblemCode(StrEnum):
    """A stable name for each way in which a call can fail."""

    UNAUTHORIZED = "Unauthorized"
    INVALID_REQUEST = "InvalidRequest"
    NOT_FOUND = "NotFound"
    WRONG_FLEET = "WrongFleet"
    WRONG_POD = "WrongPod"
    STALE_EPOCH = "StaleEpoch"
    STALE_VERSION = "StaleVersion"
    WRONG_STATE = "WrongState"
    CONTRACT_MISMATCH = "ContractMismatch"
    SESSION_HELD = "SessionHeld"
    SESSION_LOST = "SessionLost"
    MANIFEST_MISMATCH = "ManifestMismatch"
    ENVIRONMENT_MISMATCH = "EnvironmentMismatch"
    WORLD_SIZE_MISMATCH = "WorldSizeMismatch"
    TRANSPORT_UNAVAILABLE = "TransportUnavailable"
    MEMBER_ABSENT = "MemberAbsent"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    TRANSFER_FAILED = "TransferFailed"
    PEER_LOST = "PeerLost"
    """Whoever says so was cut off by another party: its own part was sound."""
    DIGEST_MISMATCH = "DigestMismatch"
    CACHE_NOT_RESET = "CacheNotReset"
    ENGINE_FAILED = "EngineFailed"
    DIRTY = "Dirty"
    NO_ROOM = "NoRoom"


class Problem(BaseModel):
    """The body of every answer that is not a success."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    code: ProblemCode
    message: str
    """One or two sentences: what failed, with names and values, and what to do next."""
    phase: str = ""
    member: str = ""
    """Pod name, when one member is to blame."""


class ProblemError(Exception):
    """A call was refused or failed; carries the :class:`Problem` that says why."""

    statuses: ClassVar[dict[ProblemCode, int]] = {
        ProblemCode.UNAUTHORIZED: 401,
        ProblemCode.INVALID_REQUEST: 422,
        ProblemCode.MANIFEST_MISMATCH: 422,
        ProblemCode.NOT_FOUND: 404,
        ProblemCode.DEADLINE_EXCEEDED: 504,
        ProblemCode.ENGINE_FAILED: 500,
        ProblemCode.TRANSFER_FAILED: 500,
        ProblemCode.PEER_LOST: 500,
    }

    def __init__(self, code: ProblemCode, message: str, *, phase: str = "", member: str = "") -> None:
        self.problem = Problem(code=code, message=message, phase=phase, member=member)
        super().__init__(message)

    @classmethod
    def of(cls, problem: Problem) -> "ProblemError":
        return cls(problem.code, problem.message, phase=problem.phase, member=problem.member)

    @property
    def code(self) -> ProblemCode:
        return self.problem.code

    @property
    def http_status(self) -> int:
        return self.statuses.get(self.code, 409)
