"""What holds for a fleet as a whole: one version or none, who is told of a loss, and the one way back into service."""

import pytest

from fakes.simulation import DEADLINES, Simulation
from rolloutfleet.contract.policy import RefitPolicy, Staging, Transport
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import WorkerState
from rolloutfleet_sync.protocol import events
from rolloutfleet_sync.protocol.commands import CallWorker
from rolloutfleet_sync.protocol.model import Verb
from rolloutfleet_sync.protocol.view import view_fleet


def fleet(engines: int = 3, *, transport: Transport = Transport.GLOO, staged: bool = False) -> Simulation:
    """A fleet at version 1 with an open session."""
    staging = Staging.AUTO if staged else Staging.NEVER
    sim = Simulation(
        engines=engines, policy=RefitPolicy(transport=transport, staging=staging, min_ready=1, deadlines=DEADLINES)
    )
    for engine in sim.workers.values():
        engine.calibrated = True
    sim.start()
    sim.settle()
    sim.open_session()
    assert sim.run_refit(1, "r0").phase is Phase.COMPLETE
    return sim


def rest(sim: Simulation, seconds: int = 10) -> None:
    for _ in range(seconds):
        sim.advance(1.0)
        sim.settle()
        if sim.state.session is not None:
            sim.apply(events.SessionRenewed(sim.state.session.id))


def versions_served(sim: Simulation) -> set[tuple[int, str]]:
    return {engine.weights for engine in sim.workers.values() if engine.serves and engine.weights is not None}


@pytest.mark.scenario("F69")
@pytest.mark.parametrize("staged", [False, True], ids=["in place", "staged"])
def test_at_no_moment_do_engines_serve_two_versions_and_none_serves_what_is_not_decided(staged: bool):
    sim = fleet(transport=Transport.AUTO, staged=staged)
    sim.request(2)
    seen: list[set[tuple[int, str]]] = []
    for _ in range(400):
        view = sim.view()
        if view.phase is Phase.COMPLETE:
            break
        seen.append(versions_served(sim))
        if sim.stored.version == 1:
            assert all(version == 1 for version, _ in seen[-1])
        if not sim.step() and not sim.obey():
            sim.advance(0.1)
    assert sim.view().phase is Phase.COMPLETE
    assert versions_served(sim) == {(2, sim.published[2])}
    old, new = (1, sim.published[1]), (2, sim.published[2])
    assert {served for versions in seen for served in versions} <= {old, new}
    if not staged:
        assert all(len(versions) <= 1 for versions in seen)


@pytest.mark.scenario("F69")
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_one_engine_that_did_not_receive_all_keeps_every_other_from_committing_that_attempt(lost: int):
    sim = fleet()
    sim.workers[lost].corrupts = True
    sim.begin(2)
    epoch = sim.view().epoch
    sim.send()
    sim.follow(until=Phase.REFORMING)
    commits = [
        command
        for command in sim.commands
        if isinstance(command, CallWorker)
        and command.verb is Verb.COMMIT
        and command.message is not None
        and command.message.epoch == epoch
        and command.message.version == 2
    ]
    assert commits == []
    assert sim.stored.version == 1
    assert sim.follow().phase is Phase.COMPLETE


@pytest.mark.scenario("F47")
def test_a_version_that_one_engine_did_not_take_is_no_ground_for_the_next_one():
    sim = fleet(2)
    for engine in sim.workers.values():
        engine.corrupts = True
    sim.request(2)
    assert sim.follow().phase is Phase.FAILED
    assert (sim.stored.version, sim.state.version) == (1, 1)
    for engine in sim.workers.values():
        engine.corrupts = False
    sim.workers[1].corrupts = True
    view = sim.run_refit(2, "r2")
    assert view.phase is Phase.COMPLETE
    assert view.result is not None
    assert view.result.members == (sim.workers[0].name,)
    left_behind = sim.workers[1]
    assert versions_served(sim) == {(2, sim.published[2])}, "what did not arrive whole is never served"
    left_behind.corrupts = False
    rest(sim)
    view = sim.run_refit(3, "r3")
    assert view.result is not None
    assert view.result.members == (sim.workers[0].name, left_behind.name)
    assert versions_served(sim) == {(3, sim.published[3])}


@pytest.mark.scenario("F64")
def test_a_replaced_peer_is_called_by_its_new_incarnation_alone_and_joins_a_newer_epoch():
    sim = fleet(2)
    old, before = sim.workers[1], len(sim.commands)
    epoch = sim.state.epoch
    fresh = sim.workers[1] = sim.new_engine(1)
    sim.apply(events.RosterChanged(sim.roster))
    rest(sim)
    assert sim.run_refit(2, "r2").phase is Phase.COMPLETE
    restarted = sim.restart(1)
    rest(sim)
    assert sim.run_refit(3, "r3").phase is Phase.COMPLETE
    calls = [c for c in sim.commands[before:] if isinstance(c, CallWorker) and c.message is not None]
    assert all(call.pod_uid != old.member.pod_uid for call in calls)
    bound = [(c.message.pod_uid, c.message.instance) for c in calls if c.message and c.verb is Verb.JOIN]
    assert (fresh.member.pod_uid, fresh.instance) in bound
    assert (restarted.member.pod_uid, restarted.instance) in bound
    joined = [c.message.epoch for c in calls if c.message and c.verb is Verb.JOIN]
    assert min(joined) > epoch
    after = joined.index(max(joined))
    assert all(instance != fresh.instance for _, instance in bound[after:])


@pytest.mark.scenario("F73")
@pytest.mark.row("A-U11")
def test_an_error_on_one_engine_ends_neither_sync_job_nor_session_and_the_engine_is_let_back():
    sim = fleet()
    session = sim.state.session
    assert session is not None
    sim.begin(2)
    sim.end_transfer(1, whole=False)
    failed = sim.restart(1)
    view = sim.follow()
    assert view.phase is Phase.COMPLETE
    assert view.result is not None
    assert view.result.members == (sim.workers[0].name, sim.workers[2].name)
    assert sim.state.session is not None
    assert sim.state.session.id == session.id
    assert all(sim.workers[engine].serves for engine in (0, 2))
    rest(sim)
    assert failed.serves
    assert versions_served(sim) == {(2, sim.published[2])}
    view = sim.run_refit(3, "r3")
    assert view.result is not None
    assert view.result.members == tuple(sim.workers[engine].name for engine in range(3))
    assert versions_served(sim) == {(3, sim.published[3])}


@pytest.mark.row("A-U10")
@pytest.mark.parametrize("fate", ["restarted", "replaced"])
def test_a_dead_engine_is_not_well_again_before_it_holds_the_fleets_version(fate: str):
    sim = fleet(1)

    def told() -> tuple[bool, WorkerState, int, str]:
        rest(sim, 6)
        view = view_fleet(sim.state).members[0]
        return view.ready, view.state, view.version, view.message

    assert told() == (True, WorkerState.SERVING, 1, "")
    sim.cut.add(sim.workers[0].name)
    ready, _, _, silent = told()
    assert not ready
    assert "connection refused" in silent
    sim.cut.clear()
    sim.workers[0].fence = sim.workers[0].fence.failed("the process of local rank 0 ended")
    assert told() == (False, WorkerState.FAILED, 1, "the process of local rank 0 ended")
    if fate == "replaced":
        sim.workers[0] = sim.new_engine(0)
        sim.apply(events.RosterChanged(sim.roster))
    else:
        sim.restart(0)
    stale = (False, WorkerState.SERVING, 0, "Stale: holds version 0, the fleet has committed version 1")
    ready, state, version, message = told()
    assert (ready, state, version, message[: len(stale[3])]) == stale
    assert not sim.workers[0].serves
    sim.begin(2)
    assert not sim.workers[0].serves
    sim.fail()
    assert sim.follow().phase is Phase.FAILED
    assert not told()[0]
    assert not sim.workers[0].serves
    assert sim.run_refit(2, "r2").phase is Phase.COMPLETE
    assert told() == (True, WorkerState.SERVING, 2, "")
    assert sim.workers[0].serves


@pytest.mark.row("B04")
def test_the_group_of_a_trainer_that_died_is_torn_down_before_the_next_trainers_is_formed():
    sim = fleet(2)
    first = sim.state.epoch
    assert all(engine.fence.joined for engine in sim.workers.values())
    sim.apply(events.SessionClosed("s1"))
    sim.settle()
    assert not any(engine.fence.joined for engine in sim.workers.values())
    sim.open_session("s2")
    assert sim.run_refit(2, "r2", "s2").phase is Phase.COMPLETE
    for engine in sim.workers.values():
        told = [(name, call.epoch) for name, call in engine.calls if name in {"Join", "Abort"}]
        joins = [epoch for name, epoch in told if name == "Join"]
        assert len(joins) == 2
        assert joins[-1] > first
        names = [name for name, _ in told]
        assert "Abort" in names[names.index("Join") + 1 : len(names) - names[::-1].index("Join") - 1]
        assert engine.fence.state is WorkerState.SERVING


@pytest.mark.row("B53")
def test_a_group_that_a_closed_session_leaves_is_ended_on_every_engine_however_late_it_answers():
    sim = fleet(2)
    late = sim.workers[1]
    sim.cut.add(late.name)
    sim.apply(events.SessionClosed("s1"))
    rest(sim)
    assert not sim.workers[0].fence.joined
    assert late.fence.joined, "it has heard of nothing yet"
    sim.cut.clear()
    rest(sim)
    assert not late.fence.joined
    assert all(engine.serves for engine in sim.workers.values())
