"""Three engines of which one after another is killed in the middle of a transfer: the call that sends goes on with those that are left."""

import pytest
import torch
from tests.engines.hostfleet import SOON_SECONDS, HostFleet, Launched, await_that
from tests.engines.refitting import PROMPTS, TOKENS, told_of
from tests.engines.tinymodels import greedy_tokens, make_model, named_tensors

import rolloutfleet
from rolloutfleet.contract.policy import RefitDeadlines, Staging, Transport
from rolloutfleet.contract.trainer import Phase, RefitResult, RefitView


def refit_and_kill(fleet: HostFleet, trainer: rolloutfleet.Fleet, seed: int, killed: Launched) -> RefitResult:
    """The result of the one call in which this engine's pod is killed while the bytes travel."""
    tensors: dict[str, torch.Tensor] = named_tensors(make_model(fleet.model, seed))
    calls: list[RefitView] = []

    def kill(view: RefitView) -> None:
        if view.phase is Phase.TRANSFERRING and view.attempt == 1 and killed.process.poll() is None:
            killed.process.kill()
        calls.append(view)

    result = trainer.refit(tensors, version=fleet.next_version(), timeout=120, progress=kill)
    assert {view.attempt for view in calls} == {1, 2}
    return result


@pytest.mark.scenario("F60")
@pytest.mark.parametrize(("victim", "staging"), [(2, Staging.AUTO), (1, Staging.NEVER)], ids=["staged", "in place"])
def test_the_same_call_brings_the_version_to_the_survivors_of_an_engine_that_is_killed(
    fleet: HostFleet, victim: int, staging: Staging
):
    killed = fleet.engines[victim]
    survivors = fleet.engines[:victim]
    deadlines = RefitDeadlines(absent_seconds=1)
    fleet.start_sync(transport=Transport.LAYOUT, staging=staging, deadlines=deadlines)
    with fleet.connect() as trainer:
        # The first refit of a manifest is never staged.
        before = trainer.refit(named_tensors(make_model(fleet.model, 7)), version=fleet.next_version(), timeout=120)
        assert len(before.members) == victim + 1
        result = refit_and_kill(fleet, trainer, 70 + victim, killed)
    assert result.members == tuple(engine.name for engine in survivors)
    assert result.staged is (staging is Staging.AUTO)
    (attempt,) = result.attempts
    assert [(lost.pod_name, lost.phase) for lost in attempt.lost] == [(killed.name, "Transferring")]
    assert result.epoch > attempt.epoch
    model = make_model(fleet.model, 70 + victim)
    for prompt in PROMPTS:
        expected = greedy_tokens(model, fleet.model, prompt, TOKENS)
        for engine in survivors:
            assert engine.generate(prompt, TOKENS) == (expected, fleet.version)
    told = told_of(fleet, result)["attempts"]
    assert told[0]["lost"] == [killed.name]
    await_that("nothing of the killed engine is left", lambda: not killed.vllm_processes(), SOON_SECONDS)
