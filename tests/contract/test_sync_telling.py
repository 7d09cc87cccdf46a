"""What a running sync job tells over HTTP of itself and of its refits."""

import aiohttp
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from fakes.syncjob import Fleet
from fakes.trainer import FakeTrainer
from rolloutfleet.contract.history import RefitHistory
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.trainer import Phase

OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


async def scrape(http: aiohttp.ClientSession, fleet: Fleet) -> dict[tuple[str, str], float]:
    """Samples by name and the value of their last label."""
    async with http.get(f"{fleet.url}/metrics", headers=OPENMETRICS) as response:
        assert response.status == 200
        text = await response.text()
    families = text_string_to_metric_families(text)
    return {
        (sample.name, list(sample.labels.values())[-1]): sample.value
        for family in families
        for sample in family.samples
    }


async def test_metrics_need_no_token_and_count_what_happened(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    assert (await trainer.refit(1)).phase is Phase.COMPLETE
    async with aiohttp.ClientSession() as http:
        samples = await scrape(http, fleet)
    assert samples["rolloutfleet_refits_total", "Complete"] == 1
    assert samples["rolloutfleet_weight_version", "f"] == 1
    assert samples["rolloutfleet_engines", "Serving"] == 2
    assert samples["rolloutfleet_refit_seconds_count", "Total"] == 1


async def test_the_history_is_told_to_those_who_hold_the_token(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    await trainer.refit(1)
    await trainer.refit(2)
    history = RefitHistory.model_validate_json(await trainer.call("GET", "history"))
    assert [(entry.version, entry.outcome, entry.members) for entry in history.refits] == [
        (1, "Complete", 2),
        (2, "Complete", 2),
    ]
    assert all(
        entry.started_at and entry.finished_at and entry.started_at <= entry.finished_at for entry in history.refits
    )
    trainer._headers = {}
    with pytest.raises(ProblemError) as refused:
        await trainer.call("GET", "history")
    assert refused.value.code is ProblemCode.UNAUTHORIZED


async def test_a_refit_under_way_is_told_with_its_phase_and_who_is_waited_for(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    begun = await trainer.request(1)
    await trainer.wait_for(begun.refit, Phase.FORMING)
    view = await trainer.follow(begun, until=lambda seen: seen.send is not None)
    seen = (await trainer.fleet()).progress
    assert seen is not None
    assert (seen.version, seen.phase, seen.attempt) == (1, Phase.TRANSFERRING.value, 1)
    assert "trainer" in seen.waiting_for
    assert seen.deadline_seconds > 0
    await trainer.follow(view)
    assert (await trainer.fleet()).progress is None
