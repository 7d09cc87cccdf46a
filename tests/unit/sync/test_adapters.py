"""Refits that bring an adapter: nobody pauses, no cache is reset, the base stays; and what they need of every engine."""

from dataclasses import replace
from typing import Any

import pytest

from fakes.engine import ADAPTER_SECONDS
from fakes.simulation import DEADLINES, MANIFEST, Simulation
from rolloutfleet.contract.adapter import AdapterSpec, manifest_key
from rolloutfleet.contract.policy import CachePolicy, PauseMode, RefitPolicy, Staging, Transport, Wire
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.trainer import Phase
from rolloutfleet_sync.protocol.view import view_fleet

STYLE = AdapterSpec(name="style", rank=8, alpha=16)


def fleet(pause: PauseMode = PauseMode.WAIT, **policy: Any) -> Simulation:
    """A fleet at version 1."""
    wanted = {"transport": Transport.AUTO, "pause": pause, "deadlines": DEADLINES} | policy
    sim = Simulation(engines=2, policy=RefitPolicy.model_validate(wanted))
    sim.start()
    sim.settle()
    sim.open_session()
    assert sim.run_refit(1, "r0").phase is Phase.COMPLETE
    return sim


@pytest.mark.parametrize("pause", PauseMode)
@pytest.mark.parametrize("cache", CachePolicy)
def test_an_adapter_arrives_and_is_served_without_a_pause_or_a_reset_whatever_the_policy(pause, cache):
    sim = fleet(pause, cache=cache, staging=Staging.NEVER)
    before = len(sim.verbs())
    result = sim.run_refit(2, adapter=STYLE).result
    assert result is not None
    assert sim.verbs()[before:] == [verb for verb in ("check", "prepare", "receive", "commit") for _ in sim.workers]
    assert (result.version, result.staged, result.pause_seconds) == (2, True, ADAPTER_SECONDS)
    sim.advance(10.0)
    sim.settle()
    assert [member.adapters for member in view_fleet(sim.state).members] == [{"style": 2}] * 2


def test_versions_count_on_over_adapters_and_weights():
    sim = fleet()
    for version, adapter in enumerate((None, STYLE, None, STYLE), start=2):
        assert sim.run_refit(version, f"r{version}", adapter=adapter).phase is Phase.COMPLETE
        assert sim.state.version == version
    assert all(engine.adapters == {"style": 5} for engine in sim.workers.values())


def test_another_adapter_of_the_same_shapes_is_checked_anew_and_the_same_one_is_not():
    sim = fleet()
    other = STYLE.model_copy(update={"alpha": 32.0})
    checks = []
    for version, adapter in ((2, STYLE), (3, STYLE), (4, other)):
        before = sim.verbs().count("check")
        assert sim.run_refit(version, f"r{version}", adapter=adapter).phase is Phase.COMPLETE
        checks.append(sim.verbs().count("check") - before)
    assert checks == [2, 0, 2]
    assert len({manifest_key(MANIFEST.digest(), adapter) for adapter in (None, STYLE, other)}) == 3


def test_an_adapter_waits_for_engines_that_lack_the_base():
    sim = fleet()
    late = sim.workers[1]
    late.fence = replace(late.fence, version=0)
    problem = sim.run_refit(2, adapter=STYLE).problem
    assert problem is not None
    assert (problem.code, problem.member) == (ProblemCode.WRONG_STATE, late.name)
    assert f"adapter style goes on top of version 1, which {late.name} does not hold" in problem.message


def test_an_adapter_cannot_have_the_models_own_name():
    sim = fleet()
    with pytest.raises(ProblemError, match="has the name under which engines serve the model itself"):
        sim.request(2, adapter=STYLE.model_copy(update={"name": sim.state.identity.model}))


def test_a_fleet_that_broadcasts_sends_adapters_by_layout():
    sim = fleet(transport=Transport.GLOO)
    result = sim.run_refit(2, adapter=STYLE).result
    assert result is not None
    assert result.transport is Transport.LAYOUT
    assert result.reason == "Layout over Gloo: an adapter is no broadcast (Gloo)"
    assert sim.state.group is not None
    assert sim.state.group.wire is Wire.GLOO
