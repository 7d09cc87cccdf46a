"""``rolloutfleet refit``: its arguments, and which exit status each outcome gets."""

from pathlib import Path
from typing import Any, Self

import pytest

from fakes.checkpoints import write_file
from rolloutfleet.cli import main, refitting
from rolloutfleet.contract.policy import Transport
from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.trainer import Attempt, LostMember, RefitResult
from rolloutfleet.errors import FleetUnreachable, InvalidRequest, ManifestMismatch, RefitFailed, SessionHeld

RESULT = RefitResult(
    version=7,
    epoch=3,
    members=("f-0-0-0",),
    tensors=1,
    nbytes=2_000_000_000,
    digest="d",
    live_digest="l",
    seconds={"Forming": 1.0, "Transferring": 2.0},
    pause_seconds=0.5,
    gigabytes_per_second=1.0,
    transport=Transport.LAYOUT,
    reason="Layout over Gloo: the policy says so",
    attempts=(
        Attempt(
            attempt=1,
            epoch=2,
            lost=(LostMember(pod_name="f-1-0-0", phase="Joining", code=ProblemCode.MEMBER_ABSENT, message="gone"),),
            seconds={},
        ),
    ),
)


class FakeFleet:
    """Answers refits with what the test has laid out, one after another."""

    def __init__(self, outcomes: list[Any]) -> None:
        self.outcomes = outcomes
        self.asked: list[dict[str, Any]] = []

    def connect(self, address: str, **options: Any) -> "FakeFleet":
        self.options = {"address": address, **options}
        return self._next() if isinstance(self.outcomes[0], FleetUnreachable) else self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def refit(self, source: Any, version: int, **options: Any) -> Any:
        self.asked.append({"tensors": source.tensors, "version": version, **options})
        return self._next()

    def _next(self) -> Any:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    write_file(tmp_path / "model.safetensors", {"a": ("F32", (1,), bytes(4))})
    monkeypatch.setattr(refitting, "_RETRY_SECONDS", 0.01)

    def go(*outcomes: Any, options: tuple[str, ...] = ()) -> tuple[int, FakeFleet]:
        fleet = FakeFleet(list(outcomes))
        monkeypatch.setattr(refitting, "connect", fleet.connect)
        command = ["refit", "f", "--checkpoint", str(tmp_path), "--version", "7", "--wait", "2", *options]
        return main(command), fleet

    return go


def test_a_refit_that_completes_prints_a_table(run, capsys: pytest.CaptureFixture[str]) -> None:
    status, fleet = run(RESULT, options=("--name", "job-7", "-n", "rl", "--take-over"))
    assert status == 0
    assert (fleet.options["address"], fleet.options["namespace"], fleet.options["trainer"]) == ("f", "rl", "job-7")
    assert fleet.options["take_over"] is True
    (asked,) = fleet.asked
    assert (asked["tensors"], asked["version"], asked["repair"]) == (1, 7, False)
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert printed["engines"] == "1: f-0-0-0"
    assert printed["tensors"] == "1, 2.000 GB, 1.000 GB/s"
    assert printed["lost"] == "f-1-0-0 in attempt 1, Joining: gone"
    assert printed["seconds"] == "3.000 s"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ManifestMismatch("missing: b"), 4),
        (RefitFailed("a pod was lost"), 1),
        (RefitFailed("one did not follow", committed=True), 3),
        (InvalidRequest("version 7 is not above 9"), 1),
    ],
)
def test_each_failure_has_a_status_and_leaves_its_reason(run, tmp_path: Path, error: Exception, status: int) -> None:
    log = tmp_path / "log"
    assert run(error, options=("--termination-log", str(log)))[0] == status
    assert log.read_text() == str(error)


def test_it_waits_for_the_sync_job_and_for_another_trainer(run, capsys: pytest.CaptureFixture[str]) -> None:
    held = SessionHeld("trainer ppo holds the fleet", problem=Problem(code=ProblemCode.SESSION_HELD, message="held"))
    status, fleet = run(FleetUnreachable("nobody answers"), held, held, RESULT, options=("--repair",))
    assert status == 0
    assert [asked["repair"] for asked in fleet.asked] == [True] * 3
    assert capsys.readouterr().err.count("waiting: ") == 2


def test_it_waits_no_longer_than_it_is_told(run) -> None:
    held = SessionHeld("trainer ppo holds the fleet")
    assert run(*[held] * 1000, options=("--wait", "0.05"))[0] == 1


def test_a_checkpoint_that_cannot_be_read_ends_before_anybody_is_asked(tmp_path: Path) -> None:
    assert main(["refit", "f", "--checkpoint", str(tmp_path / "nowhere"), "--version", "7"]) == 4


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--version", "7"], "the following arguments are required: --checkpoint"),
        (["--checkpoint", "x", "--version", "0"], "'0' is no weight version"),
        (["--checkpoint", "x", "--version", "1", "--timeout", "-1"], "'-1' is no time"),
    ],
)
def test_wrong_arguments_are_told(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["refit", "f", *options])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
