"""Each problem of the wire becomes one exception of one family, whose text says what to do next."""

import pytest

from rolloutfleet import errors
from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.errors import RolloutFleetError, error_of, refit_error_of


@pytest.mark.parametrize("code", list(ProblemCode))
def test_every_problem_has_an_exception_that_keeps_code_and_words(code: ProblemCode) -> None:
    problem = Problem(code=code, message="pod f-1-0-0 said no", phase="Forming", member="f-1-0-0")
    for error in (error_of(problem), refit_error_of(problem, 7, committed=False)):
        assert isinstance(error, RolloutFleetError)
        assert error.problem == problem
        assert "pod f-1-0-0 said no" in str(error)
        assert code in str(error)


@pytest.mark.parametrize(
    ("code", "kind", "advice"),
    [
        (ProblemCode.SESSION_HELD, errors.SessionHeld, "take_over=True"),
        (ProblemCode.SESSION_LOST, errors.SessionLost, "opens a new session"),
        (ProblemCode.MANIFEST_MISMATCH, errors.ManifestMismatch, "names and shapes of its checkpoint"),
        (ProblemCode.CACHE_NOT_RESET, errors.CacheNotReset, "reset_prefix_cache() again"),
        (ProblemCode.UNAUTHORIZED, errors.Unauthorized, ""),
        (ProblemCode.STALE_VERSION, errors.InvalidRequest, ""),
        (ProblemCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded, ""),
        (ProblemCode.CONTRACT_MISMATCH, errors.ContractMismatch, ""),
    ],
)
def test_a_refused_request_is_told_by_kind(code: ProblemCode, kind: type[RolloutFleetError], advice: str) -> None:
    error = error_of(Problem(code=code, message="because"))
    assert type(error) is kind
    assert advice in str(error)


def test_a_failed_refit_names_version_phase_and_member() -> None:
    problem = Problem(
        code=ProblemCode.MEMBER_ABSENT, message="no answer for 10 s", phase="Transferring", member="f-1-0-0"
    )
    error = refit_error_of(problem, 7, committed=False)
    assert isinstance(error, errors.RefitFailed)
    assert (error.phase, error.member) == ("Transferring", "f-1-0-0")
    assert "refit to version 7 failed in phase Transferring at f-1-0-0 (MemberAbsent): no answer for 10 s" in str(error)
    assert "Call refit() again" in str(error)


def test_a_refit_that_left_members_behind_says_that_its_version_is_taken() -> None:
    problem = Problem(code=ProblemCode.CACHE_NOT_RESET, message="version 7 is committed, but", phase="Committing")
    error = refit_error_of(problem, 7, committed=True)
    assert isinstance(error, errors.RefitFailed)
    assert error.committed
    assert "with a higher version" in str(error)
    assert "same version" not in str(error)
