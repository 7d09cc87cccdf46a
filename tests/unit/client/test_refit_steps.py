"""A word to the sync job that is lost on the way is said again, and costs no refit."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from fakes.team import FakeSource, ThreadTeam
from rolloutfleet.contract.trainer import RefitResult
from rolloutfleet.errors import FleetUnreachable, RefitFailed


class LossyLine:
    """Tells a fleet's steps, and loses words: before they arrive, or the answer to them."""

    def __init__(self, team: ThreadTeam, *, heard: bool, losses: dict[str, int]) -> None:
        self._tell = team.fleet.tell
        self._heard = heard
        self._losses = Counter(losses)
        self.said: Counter[str] = Counter()
        team.fleet.tell = self.tell

    def tell(self, path: str, body: Any) -> None:
        step = path.rpartition("/")[2]
        self.said[step] += 1
        if self._losses[step] <= 0:
            if not self._heard or self.said[step] == 1 or step == "failed":
                self._tell(path, body)
            return
        self._losses[step] -= 1
        if self._heard:
            self._tell(path, body)
        raise FleetUnreachable(f"connection reset while telling {step}")


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadTeam]:
    monkeypatch.setattr("rolloutfleet.refit._RETRY_SECONDS", 0.01)
    made = ThreadTeam(monkeypatch)
    yield made
    made.close()


@pytest.mark.parametrize("heard", [True, False], ids=["the answer is lost", "the word is lost"])
def test_each_step_is_told_again_when_its_word_or_the_answer_is_lost(team: ThreadTeam, heard: bool) -> None:
    line = LossyLine(team, heard=heard, losses={"joined": 1, "prepared": 1, "sent": 1})
    results = team.refit()
    assert all(isinstance(result, RefitResult) for result in results)
    assert line.said == {"joined": 2, "prepared": 2, "sent": 2}


def test_a_sync_job_that_stays_away_is_told_until_the_step_is_over(team: ThreadTeam) -> None:
    team.fleet.seconds = 0.2
    line = LossyLine(team, heard=False, losses={"sent": 1000})
    errors = team.refit(FakeSource("a"), FakeSource("a"), FakeSource("a"))
    assert [type(error) for error in errors] == [RefitFailed] * 3
    assert "FleetUnreachable: connection reset while telling sent" in str(errors[0])
    assert line.said["sent"] > 2
