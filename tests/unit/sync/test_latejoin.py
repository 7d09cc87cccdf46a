"""Late joiners: who lends to whom, what stops it, and what is done about an attempt that fails."""

import pytest

from fakes.engine import FakeEngine
from fakes.simulation import DEADLINES, Simulation
from rolloutfleet.contract.policy import RefitPolicy, Transport, Wire
from rolloutfleet.contract.problems import ProblemError
from rolloutfleet.contract.trainer import FleetView, Phase, SleepFleet
from rolloutfleet.contract.worker import Borrow, Lend, LendReport, ReceiveReport, SleepLevel, WorkerState
from rolloutfleet_sync.protocol import events
from rolloutfleet_sync.protocol.commands import CallWorker
from rolloutfleet_sync.protocol.fanout import GRACE_SECONDS
from rolloutfleet_sync.protocol.latejoin import LONGEST_RETRY_SECONDS
from rolloutfleet_sync.protocol.model import Verb
from rolloutfleet_sync.protocol.summary import judge_readiness
from rolloutfleet_sync.protocol.view import view_fleet, view_rest


def fleet(engines: int = 2, version: int = 1) -> Simulation:
    """A fleet whose engines all serve this version."""
    sim = Simulation(engines=engines, policy=RefitPolicy(transport=Transport.AUTO, deadlines=DEADLINES))
    sim.start()
    sim.settle()
    sim.open_session()
    if version:
        assert sim.run_refit(version, "r0").phase is Phase.COMPLETE
    return sim


def pass_time(sim: Simulation, seconds: int) -> None:
    for _ in range(seconds):
        sim.advance(1.0)
        sim.settle()
        if sim.state.session is not None:
            sim.apply(events.SessionRenewed(sim.state.session.id))


def until_called(sim: Simulation, verb: Verb) -> CallWorker:
    """The first call of this verb that is under way, held back; everything before it has been delivered."""
    for _ in range(60):
        held = next((call for call in sim.calls if call.verb is verb), None)
        if held is not None:
            return held
        if sim.answers:
            sim.deliver_answer()
        elif sim.calls:
            sim.deliver_call()
        else:
            sim.advance(1.0)
    raise AssertionError(f"{verb} was not called")


def message_of(sim: Simulation, engine: int) -> str:
    view: FleetView = view_fleet(sim.state)
    return view.members[engine].message


def test_lend_and_borrow_carry_the_current_epoch_and_the_transfers_deadline():
    sim = fleet()
    kept = sim.state.epoch
    late = sim.restart(1)
    pass_time(sim, 8)
    assert late.serves
    assert late.weights == sim.workers[0].weights
    (lend,) = [call for name, call in sim.workers[0].calls if name == "Lend"]
    (borrow,) = [call for name, call in late.calls if name == "Borrow"]
    assert isinstance(lend, Lend)
    assert isinstance(borrow, Borrow)
    assert (lend.epoch, borrow.epoch, sim.state.epoch) == (kept, kept, kept)
    assert (lend.version, borrow.version) == (1, 1)
    assert (lend.wire, borrow.wire) == (Wire.GLOO, Wire.GLOO)
    assert lend.deadline_seconds == borrow.deadline_seconds == DEADLINES.transferring_seconds
    asked = {
        c.verb: c.seconds for c in sim.commands if isinstance(c, CallWorker) and c.verb in {Verb.LEND, Verb.BORROW}
    }
    longest = DEADLINES.transferring_seconds + GRACE_SECONDS
    assert asked == {Verb.LEND: longest, Verb.BORROW: longest}, "the worker's own reason comes first"
    assert sim.run_refit(2).phase is Phase.COMPLETE


def test_nothing_is_borrowed_before_the_first_version():
    sim = fleet(version=0)
    sim.restart(1)
    pass_time(sim, 8)
    assert "lend" not in sim.verbs()
    assert sim.workers[1].serves


def test_without_a_peer_the_engine_waits_for_the_next_refit():
    sim = fleet(engines=1)
    late = sim.restart(0)
    pass_time(sim, 8)
    assert "lend" not in sim.verbs()
    assert not late.serves
    assert message_of(sim, 0).startswith("Stale: holds version 0, the fleet has committed version 1")
    assert sim.run_refit(2).phase is Phase.COMPLETE
    assert late.serves


@pytest.mark.parametrize("differs", ["ranks", "device"])
def test_a_peer_of_another_size_or_kind_is_not_asked(differs: str):
    sim = fleet(engines=2)
    late = sim.restart(1, **({"device": "GPU-1"} if differs == "device" else {}))
    if differs == "ranks":
        late.member = late.member.model_copy(update={"ranks": 2})
        sim.apply(events.RosterChanged(sim.roster))
    pass_time(sim, 8)
    assert "lend" not in sim.verbs()


def test_a_peer_of_another_shape_is_refused_by_the_borrower_and_named():
    sim = fleet()
    late = sim.restart(1, shape="other")
    pass_time(sim, 8)
    assert not late.serves
    assert late.weights == (0, "")
    assert f"could not borrow version 1 from {sim.workers[0].name}: " in message_of(sim, 1)
    assert "so weights can only come from the trainer" in message_of(sim, 1)
    assert f"{late.name}: Stale" in judge_readiness(sim.state).message
    assert not sim.workers[0].fence.lending, "the donor was told to let go"


def test_a_peer_of_another_shape_is_asked_once_for_a_version_and_its_group_and_epoch_stay():
    sim = fleet(engines=2)
    kept = sim.state.group
    assert kept is not None
    sim.engines, sim.workers[2] = 3, sim.new_engine(2)
    sim.workers[2].shape = "other"
    sim.apply(events.RosterChanged(sim.roster))
    pass_time(sim, 300)
    assert sim.verbs().count("borrow") == 2, "each of the two donors once"
    assert "abort" not in sim.verbs()
    assert (sim.state.group, sim.state.epoch) == (kept, kept.epoch)
    assert not any(engine.fence.lending for engine in sim.workers.values())
    assert all(sim.workers[engine].fence.joined for engine in range(2))
    assert "so weights can only come from the trainer" in message_of(sim, 2)
    fresh = sim.restart(2)
    pass_time(sim, 8)
    assert fresh.serves, "another container may fit"


def test_a_loan_that_no_peer_can_make_does_not_end_those_that_others_make():
    sim = fleet(engines=3)
    misfit, late = sim.restart(1, shape="other"), sim.restart(2)
    late.may_borrow.clear()
    pass_time(sim, 10)
    assert sum(engine.fence.lending for engine in sim.workers.values()) == 1
    late.may_borrow.set()
    pass_time(sim, 10)
    assert late.serves
    assert not misfit.serves
    assert "Abort" not in [name for name, _ in late.calls]


def lending_to_a_third(sim: Simulation) -> FakeEngine:
    """A third engine has come and borrows from this donor; its borrowing never ends."""
    sim.engines, sim.workers[2] = 3, sim.new_engine(2)
    sim.workers[2].may_borrow.clear()
    sim.apply(events.RosterChanged(sim.roster))
    held = until_called(sim, Verb.BORROW)
    sim.deliver_call(sim.calls.index(held))
    return next(engine for engine in sim.workers.values() if engine.fence.lending)


def scale_down(sim: Simulation) -> None:
    del sim.workers[2]
    sim.engines = 2
    sim.apply(events.RosterChanged(sim.roster))


def test_a_borrower_that_leaves_the_roster_frees_its_donor_and_the_kept_group_stays():
    sim = fleet()
    kept = sim.state.group
    donor = lending_to_a_third(sim)
    scale_down(sim)
    pass_time(sim, 2)
    assert not donor.fence.lending
    assert sim.state.loans == {}
    assert not [call for call in sim.state.calls.values() if call.borrower]
    assert sim.state.group == kept
    before = len(sim.verbs())
    assert sim.run_refit(2).phase is Phase.COMPLETE
    assert "join" not in sim.verbs()[before:]


def test_a_staged_refit_is_not_asked_of_a_donor_whose_borrower_has_just_left():
    sim = fleet()
    assert sim.run_refit(2).phase is Phase.COMPLETE
    donor = lending_to_a_third(sim)
    scale_down(sim)
    sim.request(3, "r3")
    while not any(call.verb is Verb.RECEIVE for call in sim.calls):
        if sim.writes:
            sim.end_write()
        elif sim.calls:
            sim.deliver_call()
        else:
            assert sim.answers, "a refit that ends a loan waits for nobody's next turn"
            sim.deliver_answer()
    assert not donor.fence.lending
    sim.send("r3")
    sim.settle()
    assert (sim.view("r3").phase, sim.view("r3").result.staged) == (Phase.COMPLETE, True)


def test_a_donor_that_cannot_be_told_to_let_go_leaves_its_epoch_before_it_is_refitted():
    sim = fleet()
    donor = lending_to_a_third(sim)
    sim.cut.add(donor.name)
    scale_down(sim)
    sim.settle()
    assert donor.fence.lending
    sim.cut.clear()
    pass_time(sim, 4)
    assert not donor.fence.lending
    assert donor.serves
    assert sim.run_refit(2).phase is Phase.COMPLETE


@pytest.mark.parametrize("fate", ["restarts", "is dirty"])
def test_a_donor_that_does_not_serve_the_version_any_more_ends_the_loan_at_once(fate: str):
    sim = fleet(engines=3)
    late = sim.restart(2)
    until_called(sim, Verb.BORROW)
    late.may_borrow.clear()
    number = next(number for number, engine in sim.workers.items() if engine.fence.lending)
    if fate == "restarts":
        sim.restart(number)
    else:
        sim.workers[number].fence = sim.workers[number].fence.cache_not_reset(1, "vLLM answered no")
    pass_time(sim, 7)
    loan = sim.state.loans[late.member.pod_uid]
    assert loan.attempts >= 1
    late.peer_fails = False
    late.may_borrow.set()
    pass_time(sim, 8)
    assert late.serves
    assert all(engine.serves for engine in sim.workers.values())


@pytest.mark.parametrize("order", ["in order", "reversed"])
def test_a_fleet_that_falls_asleep_ends_loans_first(order: str):
    sim = fleet()
    donor = lending_to_a_third(sim)
    before = len(sim.verbs())
    sim.apply(events.SleepRequested("night", SleepFleet(level=SleepLevel.OFFLOAD)))
    assert sorted(sim.verbs()[before:]) == ["abort", "let-go", "sleep"]
    while sim.calls or sim.answers:
        if sim.calls:
            sim.deliver_call(0 if order == "in order" else -1)
        else:
            sim.deliver_answer()
    view = view_rest(sim.state, "night")
    assert view is not None
    assert [engine.fence.state for engine in sim.workers.values()] == [WorkerState.ASLEEP] * 3
    assert not donor.fence.lending


@pytest.mark.parametrize("fate", ["silent", "gone"])
def test_an_engine_whose_loan_could_not_be_ended_is_named_when_the_fleet_falls_asleep(fate: str):
    sim = fleet()
    donor = lending_to_a_third(sim)
    sim.apply(events.SleepRequested("night", SleepFleet(level=SleepLevel.OFFLOAD)))
    if fate == "silent":
        sim.cut.add(donor.name)
    else:
        number = next(number for number, engine in sim.workers.items() if engine is donor)
        sim.workers[number] = sim.new_engine(number)
        sim.apply(events.RosterChanged(sim.roster))
    sim.settle()
    with pytest.raises(ProblemError, match=f"of 3 engines did not sleep: {donor.name} did not answer let-go"):
        view_rest(sim.state, "night")


def test_a_loan_takes_no_longer_than_a_transfer_may():
    sim = fleet()
    sim.restart(1)
    held = until_called(sim, Verb.LEND)
    sim.advance(5.0)
    sim.deliver_call(sim.calls.index(held))
    borrow = until_called(sim, Verb.BORROW).message
    assert isinstance(borrow, Borrow)
    assert borrow.deadline_seconds <= DEADLINES.transferring_seconds - 5.0


@pytest.mark.parametrize("digests", [(), ("",), ("a", "b")])
def test_a_donor_that_cannot_say_what_it_lends_is_not_borrowed_from(digests: tuple[str, ...]):
    sim = fleet()
    late = sim.restart(1)
    held = until_called(sim, Verb.LEND)
    sim.deliver_call(sim.calls.index(held))
    answer = next(e for e in sim.answers if isinstance(e, events.CallAnswered) and e.call == held.call)
    assert isinstance(answer.answer, LendReport)
    sim.answers.remove(answer)
    sim.apply(events.CallAnswered(held.call, answer.answer.model_copy(update={"live_digests": digests})))
    assert "borrow" not in sim.verbs()
    assert "live digests for 1 ranks" in message_of(sim, 1)
    pass_time(sim, 8)
    assert late.serves


def test_nothing_is_borrowed_over_nccl_from_an_engine_on_the_same_gpu():
    sim = Simulation(engines=2, policy=RefitPolicy(transport=Transport.AUTO, deadlines=DEADLINES))
    for number, engine in sim.workers.items():
        sim.workers[number] = FakeEngine(engine.member, instance=engine.instance, device=f"GPU-{number}")
    sim.start()
    sim.settle()
    sim.open_session(devices=("GPU-t",), nccl_version="2.28")
    assert sim.run_refit(1, "r0").phase is Phase.COMPLETE
    sim.restart(1, device="GPU-0")
    pass_time(sim, 8)
    assert "lend" not in sim.verbs()
    fresh = sim.restart(1, device="GPU-1")
    pass_time(sim, 8)
    assert fresh.serves


def test_a_donor_that_lends_is_not_asked_by_another_late_engine():
    sim = fleet(engines=3)
    sim.restart(1)
    sim.restart(2)
    held = until_called(sim, Verb.BORROW)
    sim.calls.remove(held)
    pass_time(sim, 6)
    assert sim.verbs().count("lend") == 1
    assert len([loan for loan in sim.state.loans.values() if loan.donor]) == 1


def test_a_report_from_before_the_end_of_a_loan_does_not_undo_it():
    sim = fleet()
    late = sim.restart(1)
    late.may_borrow.clear()
    held = until_called(sim, Verb.BORROW)
    sim.deliver_call(sim.calls.index(held))
    uid = late.member.pod_uid
    while not any(call.pod_uid == uid and call.verb is Verb.REPORT for call in sim.calls):
        sim.advance(0.5)
    sim.deliver_call(next(i for i, call in enumerate(sim.calls) if call.pod_uid == uid))
    (stale,) = [e for e in sim.answers if isinstance(e, events.CallAnswered) and e.answer.pod_uid == uid]
    assert stale.answer.state is WorkerState.RECEIVING
    sim.answers.remove(stale)
    late.may_borrow.set()
    sim.advance(0.1)
    (ended,) = [e for e in sim.answers if isinstance(e, events.CallAnswered) and e.call == held.call]
    sim.answers.remove(ended)
    sim.apply(ended)
    sim.apply(stale)
    pass_time(sim, 3)
    assert late.serves
    assert "Abort" not in [name for name, _ in late.calls]


def test_a_dirty_engine_is_healed_by_a_peer():
    sim = fleet(engines=3)
    dirty = sim.workers[2]
    dirty.fence = dirty.fence.cache_not_reset(1, "vLLM answered no")
    pass_time(sim, 10)
    assert dirty.serves
    assert dirty.weights == sim.workers[0].weights


def test_attempts_that_fail_are_made_ever_more_rarely():
    sim = fleet()
    sim.restart(1, peer_fails=True)
    pass_time(sim, 240)
    lends = sum(name == "Lend" for name, _ in sim.workers[0].calls)
    assert 5 <= lends <= 3 + 240 / LONGEST_RETRY_SECONDS + 4
    sim.workers[1].peer_fails = False
    pass_time(sim, int(LONGEST_RETRY_SECONDS) + 5)
    assert sim.workers[1].serves
    assert message_of(sim, 1) == ""


def test_what_differs_from_what_was_lent_is_never_committed():
    sim = fleet()
    late = sim.restart(1)
    held = until_called(sim, Verb.BORROW)
    sim.deliver_call(sim.calls.index(held))
    answer = next(e for e in sim.answers if isinstance(e, events.CallAnswered) and e.call == held.call)
    assert isinstance(answer.answer, ReceiveReport)
    sim.answers.remove(answer)
    late.peer_fails = True
    report = answer.answer.model_copy(update={"live_digests": ("something else",)})
    sim.apply(events.CallAnswered(held.call, report))
    assert "it holds version 1 with live digests something else, what was lent is " in message_of(sim, 1)
    sim.cut.add(late.name)
    sim.settle()
    sim.cut.clear()
    pass_time(sim, 4)
    assert late.fence.state is WorkerState.DIRTY
    assert "Commit" not in [name for name, _ in late.calls]


def test_a_borrower_that_falls_silent_frees_its_donor_before_the_deadline():
    sim = fleet()
    late = sim.restart(1)
    held = until_called(sim, Verb.BORROW)
    sim.calls.remove(held)
    assert sim.workers[0].fence.lending
    assert message_of(sim, 1).endswith(f"takes version 1 over from {sim.workers[0].name}")
    sim.cut.add(late.name)
    started = sim.now
    while sim.workers[0].fence.lending:
        pass_time(sim, 1)
    assert sim.now - started <= sim.timing.unreachable + 8 < DEADLINES.transferring_seconds
    assert sim.workers[0].serves


def test_a_donor_that_leaves_the_fleet_ends_the_loan_and_another_one_lends():
    sim = fleet(engines=3)
    late = sim.restart(2)
    held = until_called(sim, Verb.BORROW)
    sim.calls.remove(held)
    donor = sim.workers[0]
    assert donor.fence.lending
    sim.workers[0] = sim.new_engine(0)
    sim.apply(events.RosterChanged(sim.roster))
    pass_time(sim, 12)
    assert late.serves
    assert sim.workers[0].serves
    assert late.weights == sim.workers[1].weights == sim.workers[0].weights


def test_a_refit_that_begins_ends_the_loan_first():
    sim = fleet()
    late = sim.restart(1)
    held = until_called(sim, Verb.BORROW)
    before = len(sim.verbs())
    sim.calls.remove(held)
    sim.request(2)
    assert sim.state.loans == {}
    assert sorted(sim.verbs()[before:]) == ["abort", "let-go"]
    assert sim.view().phase is Phase.FORMING
    sim.settle()
    assert not sim.workers[0].fence.lending
    sim.fail()
    sim.settle()
    assert sim.run_refit(2, "r2").phase is Phase.COMPLETE
    assert late.serves


def test_a_successor_of_the_sync_job_lends_again():
    sim = fleet()
    late = sim.restart(1)
    held = until_called(sim, Verb.BORROW)
    sim.calls.remove(held)
    sim.restart_sync()
    sim.workers[0].ranks.let_go()
    pass_time(sim, 20)
    assert late.serves


@pytest.mark.parametrize("early", [False, True])
def test_a_successor_has_engines_let_go_that_lend_to_nobody_it_knows_of(early: bool):
    sim = fleet()
    assert sim.run_refit(2).phase is Phase.COMPLETE
    donor = lending_to_a_third(sim)
    del sim.workers[2]
    sim.engines = 2
    sim.restart_sync()
    if early:
        sim.open_session("s2")
        sim.request(3, "r3", "s2")
    pass_time(sim, 4)
    assert not donor.fence.lending
    if not early:
        sim.open_session("s2")
        sim.request(3, "r3", "s2")
    for _ in range(4):
        sim.settle()
        view = sim.view("r3")
        if view.join is not None:
            sim.join("r3")
        elif view.prepare is not None:
            sim.prepare("r3")
        elif view.send is not None:
            sim.send("r3")
    assert (sim.view("r3").phase, sim.view("r3").result.staged) == (Phase.COMPLETE, True)
    assert "Abort" not in [name for name, _ in donor.calls]
