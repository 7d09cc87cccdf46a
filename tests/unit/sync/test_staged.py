"""Refits whose weights arrive beside the live ones: what is told to whom, when, and what a loss costs."""

import pytest

from fakes.simulation import DEADLINES, Simulation
from rolloutfleet.contract.policy import PauseMode, RefitPolicy, Transport
from rolloutfleet.contract.problems import ProblemCode
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import CommitReport, WorkerState
from rolloutfleet_sync.protocol import events
from rolloutfleet_sync.protocol.commands import WriteCommit, WriteIntent
from rolloutfleet_sync.protocol.model import Verb


def staged(pause: PauseMode = PauseMode.KEEP, engines: int = 2) -> Simulation:
    """A fleet at version 1 whose next refits are staged and prepared."""
    policy = RefitPolicy(transport=Transport.AUTO, pause=pause, deadlines=DEADLINES)
    sim = Simulation(engines=engines, policy=policy)
    for engine in sim.workers.values():
        engine.calibrated = True
    sim.start()
    sim.settle()
    sim.open_session()
    assert sim.run_refit(1, "r0").phase is Phase.COMPLETE
    return sim


def receive(sim: Simulation, version: int = 2, refit: str = "r1") -> None:
    """A refit up to where every engine holds the staged version and the trainer has not said what it sent."""
    sim.request(version, refit)
    sim.settle()
    view = sim.view(refit)
    assert view.phase is Phase.TRANSFERRING
    sim.sent[view.epoch, view.version] = "bytes"
    while sim.transfers or sim.answers:
        sim.end_transfer() if sim.transfers else sim.deliver_answer()


def verbs_since(sim: Simulation, before: int) -> list[str]:
    return sim.verbs()[before:]


def test_the_intent_is_durable_before_the_first_byte_and_nobody_pauses():
    sim = staged()
    before = len(sim.verbs())
    sim.request(2)
    while not sim.writes:
        sim.deliver_call() if sim.calls else sim.deliver_answer()
    assert [type(write) for write in sim.writes] == [WriteIntent]
    assert verbs_since(sim, before) == []
    sim.end_write()
    assert verbs_since(sim, before) == ["receive", "receive"]
    sim.send()
    sim.settle()
    assert sim.view().phase is Phase.COMPLETE
    assert verbs_since(sim, before) == ["receive", "receive", "commit", "commit"]


def test_engines_serve_the_old_version_until_the_new_one_is_durable():
    sim = staged()
    receive(sim)
    sim.tell_sent()
    assert [type(write) for write in sim.writes] == [WriteCommit]
    assert all(engine.serves and engine.weights[0] == 1 for engine in sim.workers.values())
    sim.end_write()
    sim.settle()
    assert all(engine.serves and engine.weights == (2, "bytes") for engine in sim.workers.values())


def test_the_pause_of_a_swap_is_the_longest_of_any_engine():
    sim = staged()
    receive(sim)
    sim.tell_sent()
    sim.end_write()
    sim.advance(3.0)
    pauses = {0: 0.007, 1: 0.011}
    for engine, seconds in pauses.items():
        uid = sim.workers[engine].member.pod_uid
        call = next(call for call in sim.calls if call.pod_uid == uid and call.verb is Verb.COMMIT)
        sim.calls.remove(call)
        report = CommitReport(version=2, cache_reset=True, state=WorkerState.SERVING, pause_seconds=seconds)
        sim.apply(events.CallAnswered(call.call, report))
    result = sim.view().result
    assert result is not None
    assert result.pause_seconds == 0.011
    assert result.seconds["Committing"] >= 3.0


def test_an_engine_that_stood_still_before_the_swap_is_resumed():
    sim = staged()
    receive(sim)
    paused = sim.workers[1]
    paused.fence = paused.fence.paused()
    before = len(sim.verbs())
    sim.tell_sent()
    sim.settle()
    assert sim.view().phase is Phase.COMPLETE
    assert verbs_since(sim, before) == ["commit", "commit", "resume"]
    assert paused.serves


@pytest.mark.parametrize("pause", [PauseMode.WAIT, PauseMode.ABORT])
def test_a_pause_after_the_decision_begins_when_the_version_is_durable(pause: PauseMode):
    sim = staged(pause)
    receive(sim)
    before = len(sim.verbs())
    sim.tell_sent()
    assert verbs_since(sim, before) == []
    sim.end_write()
    assert sim.view().phase is Phase.PAUSING
    assert verbs_since(sim, before) == ["pause", "pause"]
    sim.settle()
    assert sim.view().phase is Phase.COMPLETE
    assert verbs_since(sim, before) == ["pause", "pause", "commit", "commit", "resume", "resume"]


def test_a_pause_after_the_decision_that_gets_no_answer_is_repeated():
    sim = staged(PauseMode.WAIT)
    receive(sim)
    sim.tell_sent()
    sim.cut.add(sim.workers[1].name)
    sim.end_write()
    sim.settle()
    assert sim.view().phase is Phase.PAUSING
    assert sim.view().waiting_for == (sim.workers[1].name,)
    sim.cut.clear()
    sim.advance(1.0)
    sim.settle()
    assert sim.view().phase is Phase.COMPLETE


def test_a_member_that_cannot_pause_after_the_decision_is_left_behind():
    sim = staged(PauseMode.WAIT)
    receive(sim)
    sim.tell_sent()
    sim.cut.add(sim.workers[1].name)
    sim.end_write()
    for _ in range(14):
        sim.advance(1.0)
        sim.settle()
    view = sim.view()
    assert view.phase is Phase.FAILED
    assert view.problem is not None
    assert view.problem.member == sim.workers[1].name
    assert view.result is not None
    assert view.result.members == (sim.workers[0].name,)
    assert sim.stored.version == 2
    assert sim.workers[0].serves


@pytest.mark.parametrize("loss", ["pod", "trainer", "bytes", "deadline", "stop"])
def test_whatever_is_lost_before_the_decision_leaves_every_engine_serving(loss: str):
    sim = staged(engines=3)
    sim.request(2)
    sim.settle()
    assert sim.view().phase is Phase.TRANSFERRING
    survivors = [sim.workers[0], sim.workers[1]]
    match loss:
        case "pod":
            sim.workers[2] = sim.new_engine(2)
            sim.apply(events.RosterChanged(sim.roster))
        case "trainer":
            sim.apply(events.SessionClosed("s1"))
        case "bytes":
            sim.end_transfer(2, whole=False)
        case "deadline":
            for _ in range(DEADLINES.transferring_seconds):
                if sim.state.session is not None:
                    sim.apply(events.SessionRenewed("s1"))
                sim.advance(1.0)
        case "stop":
            sim.apply(events.StopRequested())
    sim.settle()
    view = sim.view()
    assert view.phase is Phase.FAILED
    assert view.problem is not None
    assert view.problem.phase == "Transferring"
    for engine in survivors:
        assert engine.serves
        assert engine.fence.state is WorkerState.SERVING
        assert engine.weights is not None
        assert engine.weights[0] == 1
    assert "pause" not in sim.verbs()[sim.verbs().index("receive", 10) :]


def test_a_member_that_forgets_a_staged_version_ends_the_refit_before_the_commit():
    sim = staged()
    receive(sim)
    worker = sim.workers[1]
    worker.fence = worker.fence.aborted("it waited too long")
    for _ in range(3):
        sim.advance(1.0)
        sim.settle()
    view = sim.view()
    assert view.phase is Phase.FAILED
    assert view.problem.member == worker.name
    assert view.problem.message.startswith(f"{worker.name} no longer holds version 2: it is Serving")
    assert sim.stored.version == 1
    assert all(engine.serves for engine in sim.workers.values())


def test_when_nobody_knows_whether_the_commit_is_written_engines_serve_the_old_version():
    sim = staged()
    receive(sim)
    sim.tell_sent()
    sim.end_write(stored=True, known=False)
    assert sim.view().problem is not None
    assert "engines serve the version before it until the sync job has read it back" in sim.view().problem.message
    assert all(engine.serves and engine.weights[0] == 1 for engine in sim.workers.values())
    for _ in range(5):
        sim.settle()
        sim.advance(1.0)
    assert all(engine.serves and engine.weights == (2, "bytes") for engine in sim.workers.values())


def test_an_engine_with_a_cache_that_was_not_reset_after_the_swap_is_left_behind():
    sim = staged()
    sim.workers[1].cache_answer = False
    view = sim.run_refit(2)
    assert (view.phase, view.problem.code) == (Phase.FAILED, ProblemCode.CACHE_NOT_RESET)
    assert sim.workers[0].serves
    assert not sim.workers[1].serves


def test_a_dirty_engine_is_refitted_in_place_with_all_others():
    sim = staged(engines=1)
    engine = sim.workers[0]
    engine.cache_answer = False
    assert sim.run_refit(2, "r1").phase is Phase.FAILED
    assert engine.fence.state is WorkerState.DIRTY
    engine.cache_answer = True
    view = sim.run_refit(3, "r2")
    assert view.result is not None
    assert not view.result.staged
    assert view.result.reason.endswith(f"not staged, for {engine.name} holds no whole version to serve meanwhile")
    assert sim.run_refit(4, "r3").result.staged
