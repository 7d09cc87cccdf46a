"""``rolloutfleet refit-history`` and ``--url``: what a person sees of refits."""

import io
import json
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from rolloutfleet.cli import arguments, history, main
from rolloutfleet.cli.live import draw_view
from rolloutfleet.cli.plot import COLORS, draw_plot
from rolloutfleet.cli.refit_arguments import RefitOptions
from rolloutfleet.contract.history import Gap, RefitAttempt, RefitEntry, RefitProgress
from rolloutfleet.contract.policy import Transport
from rolloutfleet.contract.trainer import FleetView, MemberView, Phase
from rolloutfleet.contract.worker import WorkerState

NOW = datetime(2030, 1, 1, 0, 10, 0, tzinfo=UTC)
WHOLE = RefitEntry(
    refit="a",
    version=7,
    epoch=3,
    outcome="Complete",
    finished_at="2030-01-01T00:05:00.000Z",
    members=2,
    engines=3,
    missing=("engine-2",),
    seconds={"Transferring": 1.5, "Forming": 0.25, "Aborting": 0.5},
    pause_seconds=0.125,
    gigabytes_per_second=3.0,
    transport="Layout",
    staged=True,
    slowest="f-1-0-0 rank 3",
    slowest_lag_seconds=0.75,
    attempts=(RefitAttempt(epoch=2, lost=("f-0-0-0",), phase="Transferring", why="connection refused", seconds=2.0),),
)
FAILED = RefitEntry(
    refit="b",
    version=8,
    epoch=4,
    outcome="Failed",
    finished_at="2030-01-01T00:06:00.000Z",
    code="EnvironmentMismatch",
    phase="Forming",
    message="NCCL_ALGO is 'Ring' on trainer but unset on f-0-0-0",
)


def shown(what: object) -> str:
    console = Console(file=io.StringIO(), width=240)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_row_tells_tries_engines_seconds_pause_speed_and_transport():
    text = shown(history.draw_history([WHOLE, FAILED], NOW))
    row = next(line for line in text.splitlines() if line.startswith("7"))
    assert row.split()[:11] == ["7", "3", "Complete", "5m0s", "2", "2/3", "2.250", "0.125", "3.00", "Layout", "staged"]
    assert "forming 0.250, transfer 1.500, aborting 0.500" in row


def test_a_row_names_the_slowest_rank_who_was_missing_and_who_was_lost_and_where():
    lines = history.describe_entry(WHOLE)
    assert "slowest: f-1-0-0 rank 3, 0.750 s after the middle one" in lines
    assert "missing: engine-2" in lines
    assert "attempt 1 (epoch 2) lost f-0-0-0 in Transferring: connection refused" in lines


def test_a_failure_names_the_variable_that_differed():
    (line,) = history.describe_entry(FAILED)
    assert line == "EnvironmentMismatch in Forming: NCCL_ALGO is 'Ring' on trainer but unset on f-0-0-0"


def test_histories_of_several_weightsyncs_are_one_in_the_order_of_their_ends():
    statuses = [
        {"refits": [FAILED.model_dump(mode="json", by_alias=True)]},
        {},
        {"refits": [WHOLE.model_dump(mode="json", by_alias=True)]},
    ]
    assert history.merge_entries(statuses) == [WHOLE, FAILED]


def test_an_empty_history_says_so():
    assert "No refit has ended yet." in shown(history.draw_history([], NOW))


def test_a_plot_has_a_bar_of_phases_for_each_refit_on_one_scale():
    tree = ElementTree.fromstring(draw_plot([WHOLE, FAILED.model_copy(update={"seconds": {"Forming": 4.5}})]))
    bars = [element for element in tree if element.tag.endswith("rect") and len(element)]
    widths = {bar.get("fill"): float(bar.get("width", 0)) for bar in bars[:3]}
    assert widths[COLORS["Transferring"]] == pytest.approx(6 * widths[COLORS["Forming"]], rel=0.01)
    assert float(bars[3].get("width", 0)) == pytest.approx(3 * widths[COLORS["Transferring"]], rel=0.01)
    assert "version 8 failed" in "".join(tree.itertext())


def test_every_phase_that_takes_time_has_a_colour():
    at_rest = {Phase.PENDING, Phase.READY, Phase.COMPLETE, Phase.FAILED}
    assert {phase.value for phase in Phase} - {phase.value for phase in at_rest} == set(COLORS)


def test_a_history_without_seconds_cannot_be_plotted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(history, "read_history", lambda options: [FAILED])
    assert main(["refit-history", "f", "--plot", str(tmp_path / "x.svg")]) == 1
    assert "no refit in the history has seconds to draw" in capsys.readouterr().err


def test_json_is_the_rows_themselves(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(history, "read_history", lambda options: [WHOLE])
    assert main(["refit-history", "--fleet", "f", "-o", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert RefitEntry.model_validate(row) == WHOLE


@pytest.mark.parametrize("words", [[], ["f", "--url", "http://127.0.0.1:1"]])
def test_a_history_is_of_a_fleet_or_of_a_url_and_of_one_of_them(words: list[str], capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["refit-history", *words])
    assert "name the fleet, or give the --url" in capsys.readouterr().err


def test_a_sync_job_that_does_not_answer_is_named(capsys, tmp_path: Path):
    (tmp_path / "token").write_text("t")
    assert main(["refit-history", "--url", "http://127.0.0.1:1", "--token-file", str(tmp_path / "token")]) == 1
    assert "no answer from fleet" in capsys.readouterr().err


def test_the_address_of_a_sync_job_goes_with_a_table(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["status", "--url", "http://127.0.0.1:1", "-o", "json"])
    assert "--url shows one fleet as a table" in capsys.readouterr().err
    options = arguments.parse(["status", "--url", "http://127.0.0.1:1"])
    assert not isinstance(options, RefitOptions)
    assert options.url == "http://127.0.0.1:1"


def test_a_sync_job_s_own_word_shows_engines_progress_gaps_and_the_last_refit():
    view = FleetView(
        fleet="f",
        namespace="rl",
        fleet_uid="u",
        model="m",
        phase=Phase.FORMING,
        epoch=4,
        version=7,
        transport=Transport.AUTO,
        engines=3,
        members=(
            MemberView(
                engine=0,
                pod_name="f-0-0-0",
                address="",
                ready=True,
                state=WorkerState.SERVING,
                version=7,
                ranks=2,
                epoch=3,
            ),
            MemberView(
                engine=1,
                pod_name="f-1-0-1",
                address="",
                ready=False,
                state=WorkerState.DIRTY,
                version=5,
                ranks=2,
                epoch=2,
                message="part of version 7",
            ),
        ),
        endpoints=(),
        progress=RefitProgress(
            refit="r",
            version=8,
            epoch=4,
            phase="Forming",
            attempt=2,
            started_at="2030-01-01T00:09:50.000Z",
            deadline_seconds=120,
            waiting_for=("engine-2", "trainer"),
        ),
        gaps=(Gap(member="engine-2", what="has no pod"), Gap(what="NCCL_ALGO is 'Ring' on a but unset on b")),
    )
    text = shown(draw_view(view, WHOLE, NOW))
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "f-0-0-0", "Serving", "7", "-", "3", "2", "True"] in rows
    assert ["1", "f-1-0-1", "Dirty", "5", "2", "2", "2", "False", "part", "of", "version", "7"] in rows
    assert "refit   version 8: Forming for 10.0 s of at most 120 s, attempt 2" in text
    assert "waits for engine-2, trainer" in text
    assert "engine-2 has no pod" in text
    assert "NCCL_ALGO is 'Ring' on a but unset on b" in text
    assert "last refit: version 7 Complete" in text
