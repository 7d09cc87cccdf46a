"""What goes wrong, in one family: every text says what failed and what to do next."""

from typing import Final

from rolloutfleet.contract.problems import Problem, ProblemCode


class RolloutFleetError(Exception):
    """Anything that a fleet or this client refuses or fails to do.

    ``problem`` is the fleet's own word, where the error came from there: its code, phase and member.
    """

    hint: str = ""

    def __init__(self, message: str, *, problem: Problem | None = None) -> None:
        self.problem = problem
        super().__init__(f"{message.rstrip('.')}. {self.hint}" if self.hint else message)

    @property
    def phase(self) -> str:
        """Phase of the refit in which it failed, or an empty string."""
        return self.problem.phase if self.problem else ""

    @property
    def member(self) -> str:
        """Pod name of the member to blame, or an empty string."""
        return self.problem.member if self.problem else ""


class FleetUnreachable(RolloutFleetError):  # noqa: N818 - reads as what happened
    """Nothing answers at the fleet's address."""


class Unauthorized(RolloutFleetError):  # noqa: N818
    """The token is missing, or is not this fleet's."""


class ContractMismatch(RolloutFleetError):  # noqa: N818
    """The fleet speaks another version of the wire contract than this client."""


class InvalidRequest(RolloutFleetError):  # noqa: N818
    """The fleet refuses a request as malformed or out of place, such as a version that is not above the current one."""


class SessionHeld(RolloutFleetError):  # noqa: N818
    """Another trainer holds the fleet."""

    hint = "Wait until its lease ends, close it there, or connect with take_over=True to replace it."


class SessionLost(RolloutFleetError):  # noqa: N818
    """The fleet no longer knows this trainer's session, because its lease ended or the sync job restarted."""

    hint = "Call refit() again with the same version: it opens a new session."


class ManifestMismatch(RolloutFleetError):  # noqa: N818
    """The model in the engines cannot load these tensors; nothing was changed."""

    hint = "Send the tensors that the engines' model expects, with the names and shapes of its checkpoint."


class DeadlineExceeded(RolloutFleetError):  # noqa: N818
    """Something took longer than it was given."""


class RefitFailed(RolloutFleetError):  # noqa: N818
    """A refit failed, and the version before is served on, except by engines that it has left with a part of the new one.

    Those are fenced until a refit completes, or until they have taken the fleet's version over from a peer. A staged version leaves none
    before it is committed; one that is received in place may leave all. ``committed`` says that the version is published all the same,
    and only the named engines did not follow.
    """

    hint = "Call refit() again with the same version once the cause is gone: the next one forms a new group."

    def __init__(self, message: str, *, problem: Problem | None = None, committed: bool = False) -> None:
        self.committed = committed
        if committed:
            self.hint = "Call refit() with a higher version, which brings every engine along."
        super().__init__(message, problem=problem)


class TeamLost(RolloutFleetError):  # noqa: N818
    """A process of the trainer's team is gone or does not answer, so that the team cannot refit any more."""

    hint = "Start the trainer's processes again, make a new process group, and connect() with it."


class GenerationFailed(RolloutFleetError):  # noqa: N818
    """An engine did not generate; the text names it."""


class CacheNotReset(RolloutFleetError):  # noqa: N818
    """Not every engine confirmed that its prefix cache is empty."""

    hint = "Call reset_prefix_cache() again; until it returns, engines may reuse what older weights computed."


_BY_CODE: Final[dict[ProblemCode, type[RolloutFleetError]]] = {
    ProblemCode.UNAUTHORIZED: Unauthorized,
    ProblemCode.CONTRACT_MISMATCH: ContractMismatch,
    ProblemCode.INVALID_REQUEST: InvalidRequest,
    ProblemCode.NOT_FOUND: InvalidRequest,
    ProblemCode.STALE_VERSION: InvalidRequest,
    ProblemCode.WRONG_STATE: InvalidRequest,
    ProblemCode.WORLD_SIZE_MISMATCH: InvalidRequest,
    ProblemCode.SESSION_HELD: SessionHeld,
    ProblemCode.SESSION_LOST: SessionLost,
    ProblemCode.MANIFEST_MISMATCH: ManifestMismatch,
    ProblemCode.CACHE_NOT_RESET: CacheNotReset,
}

_DURING_REFIT: Final = {
    ProblemCode.UNAUTHORIZED: Unauthorized,
    ProblemCode.SESSION_LOST: SessionLost,
    ProblemCode.MANIFEST_MISMATCH: ManifestMismatch,
}


def error_of(problem: Problem) -> RolloutFleetError:
    """The exception for a request that the fleet refused."""
    kind = _BY_CODE.get(
        problem.code, DeadlineExceeded if problem.code is ProblemCode.DEADLINE_EXCEEDED else RolloutFleetError
    )
    return kind(_sentence(problem), problem=problem)


def refit_error_of(problem: Problem, version: int, *, committed: bool) -> RolloutFleetError:
    """The exception for a refit that was accepted and then failed, ``committed`` when its version is published nevertheless."""
    message = f"refit to version {version} failed {_sentence(problem)}"
    kind = _DURING_REFIT.get(problem.code)
    if kind is None or committed:
        return RefitFailed(message, problem=problem, committed=committed)
    return kind(message, problem=problem)


def _sentence(problem: Problem) -> str:
    where = f"in phase {problem.phase} " if problem.phase else ""
    who = f"at {problem.member}" if problem.member and problem.member not in problem.message else ""
    place = f"{where}{who}".strip()
    return f"{place} ({problem.code}): {problem.message}" if place else f"({problem.code}): {problem.message}"
