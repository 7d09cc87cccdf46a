"""Refits whose weights arrive beside the live ones: what is told to whom, when, and what a loss costs."""

import pytest

from fakes.simulation import DEADLINES, Simulation
from rolloutfleet.contract.policy import PauseMode, RefitPolicy, Transport
from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import CommitReport, WorkerState
from rolloutfleet_sync.protocol import events
from rolloutfleet_sync.protocol.commands import WriteCommit, WriteIntent
from rolloutfleet_sync.protocol.machine import may_publish
from rolloutfleet_sync.protocol.model import Verb
from rolloutfleet_sync.protocol.summary import summarize_status


def staged(pause: PauseMode = PauseMode.KEEP, engines: int = 2, min_ready: int = 1) -> Simulation:
    """A fleet at version 1 whose next refits are staged and prepared."""
    policy = RefitPolicy(transport=Transport.AUTO, pause=pause, deadlines=DEADLINES, min_ready=min_ready)
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
def test_engines_that_must_stand_still_for_the_copy_do_so_before_the_version_is_decided(pause: PauseMode):
    sim = staged(pause)
    receive(sim)
    before = len(sim.verbs())
    sim.tell_sent()
    assert sim.view().phase is Phase.PAUSING
    assert verbs_since(sim, before) == ["pause", "pause"]
    assert not sim.writes
    while not sim.writes:
        sim.deliver_call() if sim.calls else sim.deliver_answer()
    assert [type(write) for write in sim.writes] == [WriteCommit]
    assert sim.view().phase is Phase.COMMITTING
    assert verbs_since(sim, before) == ["pause", "pause"]
    sim.settle()
    view = sim.view()
    assert (view.phase, view.result.staged) == (Phase.COMPLETE, True)
    assert verbs_since(sim, before) == ["pause", "pause", "commit", "commit", "resume", "resume"]
    assert all(engine.serves and engine.weights == (2, "bytes") for engine in sim.workers.values())


@pytest.mark.parametrize("trouble", ["slow", "cut", "refused", "trainer", "stop"])
def test_a_pause_for_the_copy_that_fails_leaves_every_engine_serving_the_version_before(trouble: str):
    sim = staged(PauseMode.WAIT, min_ready=2)
    receive(sim)
    sim.tell_sent()
    slow = sim.workers[1]
    held = next(call for call in sim.calls if call.verb is Verb.PAUSE and call.pod_uid == slow.member.pod_uid)
    if trouble != "cut":
        sim.calls.remove(held)
    match trouble:
        case "cut":
            sim.cut.add(slow.name)
        case "refused":
            problem = Problem(code=ProblemCode.DEADLINE_EXCEEDED, message="vLLM did not pause", member=slow.name)
            sim.apply(events.CallFailed(held.call, problem, refused=True))
        case "trainer":
            sim.apply(events.SessionClosed("s1"))
        case "stop":
            sim.apply(events.StopRequested())
    for _ in range(DEADLINES.pausing_seconds + int(sim.timing.aborting) + 1):
        sim.settle()
        sim.advance(1.0)
        if sim.state.session is not None:
            sim.apply(events.SessionRenewed("s1"))
    view = sim.view()
    assert (view.phase, view.problem.phase) == (Phase.FAILED, "Pausing")
    assert sim.stored.version == 1
    sim.cut.clear()
    for _ in range(4):
        sim.settle()
        sim.advance(1.0)
    for engine in sim.workers.values():
        assert engine.serves
        assert engine.weights == (1, sim.published[1])
        assert not engine.fence.staged
        assert not engine.vllm.paused


def test_an_engine_keeps_what_it_has_staged_while_all_pause_and_the_version_is_written():
    sim = staged(PauseMode.WAIT)
    receive(sim)
    sim.tell_sent()
    slow = sim.workers[1]
    held = next(call for call in sim.calls if call.pod_uid == slow.member.pod_uid and call.verb is Verb.PAUSE)
    sim.calls.remove(held)
    sim.settle()
    quick = sim.workers[0]
    assert quick.fence.state is WorkerState.PAUSED
    sim.advance(DEADLINES.pausing_seconds - 0.5)
    sim.settle()
    sim.calls.append(held)
    while not sim.writes:
        sim.deliver_call() if sim.calls else sim.deliver_answer()
    sim.advance(DEADLINES.committing_seconds - 0.5)
    while sim.calls or sim.answers:
        sim.deliver_call() if sim.calls else sim.deliver_answer()
    assert all(engine.fence.swaps_for(2) for engine in sim.workers.values())
    sim.settle()
    assert sim.view().phase is Phase.COMPLETE


def test_a_member_lost_while_the_version_is_written_is_left_behind_and_finishes_when_it_is_back():
    sim = staged(PauseMode.WAIT)
    receive(sim)
    sim.tell_sent()
    while not sim.writes:
        sim.deliver_call() if sim.calls else sim.deliver_answer()
    gone = sim.workers[1]
    sim.cut.add(gone.name)
    sim.end_write()
    for _ in range(14):
        sim.settle()
        sim.advance(1.0)
    view = sim.view()
    assert (view.phase, view.problem.member) == (Phase.FAILED, gone.name)
    assert view.result.members == (sim.workers[0].name,)
    assert sim.stored.version == 2
    assert sim.workers[0].serves
    sim.cut.clear()
    for _ in range(6):
        sim.settle()
        sim.advance(1.0)
    assert [name for name, _ in gone.calls][-2:] == ["Commit", "Abort"]
    assert gone.serves
    assert gone.weights == (2, "bytes")
    assert not gone.fence.joined
    assert sim.run_refit(3, "r2").phase is Phase.COMPLETE


def staged_and_decided(pause: PauseMode) -> Simulation:
    """Both engines hold a staged version, serve, and the version is committed; the sync job has just started."""
    sim = staged()
    receive(sim)
    sim.tell_sent()
    sim.store(sim.writes.pop())
    sim.policy = sim.policy.model_copy(update={"pause": pause})
    sim.restart_sync()
    return sim


@pytest.mark.parametrize("pause", [PauseMode.WAIT, PauseMode.ABORT])
def test_a_successor_pauses_engines_before_the_swap_where_requests_must_not_see_two_versions(pause: PauseMode):
    sim = staged_and_decided(pause)
    for _ in range(5):
        sim.settle()
        sim.advance(1.0)
    for engine in sim.workers.values():
        assert [name for name, _ in engine.calls][-3:] == ["Pause", "Commit", "Resume"]
        assert engine.serves
        assert engine.weights == (2, "bytes")


def test_a_successor_whose_pause_fails_ends_the_requests_rather_than_lose_the_version():
    sim = staged_and_decided(PauseMode.WAIT)
    while not any(call.verb is Verb.PAUSE for call in sim.calls):
        sim.deliver_call() if sim.calls else sim.deliver_answer()
    held = next(call for call in sim.calls if call.verb is Verb.PAUSE)
    sim.calls.remove(held)
    problem = Problem(code=ProblemCode.DEADLINE_EXCEEDED, message="vLLM did not pause")
    sim.apply(events.CallFailed(held.call, problem, refused=True))
    for _ in range(5):
        sim.settle()
        sim.advance(1.0)
    engine = sim.find(held.pod_uid)
    assert engine is not None
    assert [call.mode for name, call in engine.calls if name == "Pause"] == [PauseMode.ABORT]
    assert all(engine.serves and engine.weights == (2, "bytes") for engine in sim.workers.values())


def test_a_successor_swaps_at_once_where_requests_may_see_both_versions():
    sim = staged_and_decided(PauseMode.KEEP)
    for _ in range(4):
        sim.settle()
        sim.advance(1.0)
    assert all(engine.serves and engine.weights == (2, "bytes") for engine in sim.workers.values())
    assert all("Pause" not in [name for name, _ in engine.calls] for engine in sim.workers.values())


def test_the_status_is_written_while_a_staged_version_travels_and_not_while_engines_wait():
    sim = staged(PauseMode.WAIT)
    sim.request(2)
    sim.settle()
    assert sim.view().phase is Phase.TRANSFERRING
    assert may_publish(sim.state)
    assert summarize_status(sim.state, sim.state.record)["intent"] == {"epoch": sim.state.epoch, "version": 2}
    sim.sent[sim.view().epoch, 2] = "bytes"
    while sim.transfers or sim.answers:
        sim.end_transfer() if sim.transfers else sim.deliver_answer()
    assert sim.view().phase is Phase.VERIFYING
    assert may_publish(sim.state)
    sim.tell_sent()
    assert sim.view().phase is Phase.PAUSING
    assert not may_publish(sim.state)


def test_engines_that_stand_still_while_nobody_knows_the_fate_of_the_commit_are_told_apart():
    sim = staged(PauseMode.WAIT)
    receive(sim)
    sim.tell_sent()
    while not sim.writes:
        sim.deliver_call() if sim.calls else sim.deliver_answer()
    sim.end_write(stored=False)
    assert "engines stand still until the sync job has read it back" in sim.view().problem.message
    for _ in range(5):
        sim.settle()
        sim.advance(1.0)
    assert all(engine.serves and engine.weights[0] == 1 for engine in sim.workers.values())


@pytest.mark.parametrize("loss", ["pod", "trainer", "bytes", "deadline", "stop"])
def test_whatever_is_lost_before_the_decision_leaves_every_engine_serving(loss: str):
    sim = staged(engines=3, min_ready=3)
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
    sim = staged(min_ready=2)
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
