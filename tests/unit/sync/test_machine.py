"""The protocol against engines and trainers that fail, answer late, restart and vanish at any moment."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fakes.engine import FakeEngine
from fakes.simulation import DEADLINES, Simulation
from rolloutfleet.contract.policy import PauseMode, RefitPolicy, Transport
from rolloutfleet.contract.problems import ProblemError
from rolloutfleet.contract.trainer import Phase, SleepFleet, WakeFleet
from rolloutfleet.contract.worker import SleepLevel, WakeTag, WorkerState
from rolloutfleet_sync.protocol.commands import CallWorker
from rolloutfleet_sync.protocol.events import RosterChanged, SessionClosed, SleepRequested, WakeRequested
from rolloutfleet_sync.protocol.model import TERMINAL, Step, Verb

LONGEST = sum(DEADLINES.model_dump().values())
TRANSFER = {Verb.JOIN, Verb.PREPARE, Verb.PAUSE, Verb.RECEIVE}
pick = st.integers(0, 7)


class FleetUnderFire(RuleBasedStateMachine):
    """Every rule is something that happens in a cluster; every invariant is a promise of the design."""

    def __init__(self):
        super().__init__()
        self.sim = Simulation()
        self.versions = 0
        self.seen_commands = 0
        self.seen_version = 0
        self.seen_stored = (0, 0)
        self.seen_epoch = 0
        self.worker_epochs: dict[int, tuple[FakeEngine, int]] = {}
        self.sessions = 0
        self.refits = 0

    @initialize(
        engines=st.integers(1, 3),
        ranks=st.integers(1, 2),
        settled=st.booleans(),
        transport=st.sampled_from([Transport.GLOO, Transport.AUTO]),
        pause=st.sampled_from(PauseMode),
        calibrated=st.booleans(),
    )
    def start(self, engines: int, ranks: int, settled: bool, transport: Transport, pause: PauseMode, calibrated: bool):
        policy = RefitPolicy(transport=transport, pause=pause, deadlines=DEADLINES)
        self.sim = Simulation(engines=engines, ranks=ranks, policy=policy)
        for engine in self.sim.workers.values():
            engine.calibrated = calibrated
        self.sim.start()
        if settled:
            self.sim.settle()

    # The network.

    @precondition(lambda self: self.sim.calls)
    @rule(index=pick)
    def a_call_arrives(self, index: int):
        self.sim.deliver_call(index % len(self.sim.calls))

    @precondition(lambda self: self.sim.calls)
    @rule(index=pick, arrives=st.booleans())
    def a_connection_breaks(self, index: int, arrives: bool):
        command = self.sim.calls[index % len(self.sim.calls)]
        before = len(self.sim.answers)
        if arrives and command.verb not in {Verb.RECEIVE, Verb.LEND}:
            self.sim.deliver_call(self.sim.calls.index(command))
            del self.sim.answers[before:]
        else:
            self.sim.calls.remove(command)
        self.sim.answers.append(self.sim.no_answer(command))

    @precondition(lambda self: self.sim.answers)
    @rule(index=pick)
    def an_answer_arrives(self, index: int):
        self.sim.deliver_answer(index % len(self.sim.answers))

    @rule()
    def everything_arrives(self):
        for _ in range(len(self.sim.calls)):
            if self.sim.calls:
                self.sim.deliver_call()
        for _ in range(len(self.sim.answers)):
            if self.sim.answers:
                self.sim.deliver_answer()

    @rule(seconds=st.sampled_from([0.2, 1.0, 3.0, 11.0, 31.0]))
    def time_passes(self, seconds: float):
        self.sim.advance(seconds)

    # Engines.

    @rule(index=pick)
    def a_container_restarts(self, index: int):
        engine = index % self.sim.engines
        old = self.sim.workers[engine]
        self.sim.workers[engine] = FakeEngine(old.member, instance=f"i{self.sim.fresh()}")

    @rule(index=pick, told=st.booleans())
    def a_pod_is_replaced(self, index: int, told: bool):
        engine = index % self.sim.engines
        self.sim.workers[engine] = self.sim.new_engine(engine)
        if told:
            self.the_roster_arrives()

    @rule()
    def the_roster_arrives(self):
        self.sim.apply(RosterChanged(self.sim.roster))

    @rule(index=pick, answer=st.booleans(), fails=st.booleans())
    def a_cache_is_stubborn(self, index: int, answer: bool, fails: bool):
        worker = self.sim.workers[index % self.sim.engines]
        worker.cache_answer, worker.cache_fails = answer, fails

    @rule(index=pick, fails=st.booleans())
    def a_peer_is_unreliable(self, index: int, fails: bool):
        self.sim.workers[index % self.sim.engines].peer_fails = fails

    @precondition(lambda self: self.sim.transfers)
    @rule(index=pick, whole=st.booleans())
    def a_transfer_ends(self, index: int, whole: bool):
        self.sim.end_transfer(index % len(self.sim.transfers), whole=whole)

    # The store and the sync job.

    @precondition(lambda self: self.sim.writes)
    @rule(stored=st.booleans(), known=st.booleans())
    def a_write_ends(self, stored: bool, known: bool):
        self.sim.end_write(stored=stored, known=known)

    @precondition(lambda self: self.sim.writes)
    @rule()
    def a_write_succeeds(self):
        self.sim.end_write()

    @precondition(lambda self: self.sim.reads)
    @rule()
    def the_status_is_read(self):
        self.sim.read_status()

    @rule(late=st.booleans())
    def the_sync_job_restarts(self, late: bool):
        if late and self.sim.writes:
            self.sim.store(self.sim.writes.pop(0))
        self.sim.restart_sync()
        self.seen_epoch = 0

    # The trainer.

    def _try(self, act: Any, *arguments: Any, **fields: Any) -> None:
        before = self.sim.state
        try:
            act(*arguments, **fields)
        except ProblemError:
            assert self.sim.state is before, "a refused request changes nothing"

    @rule(take_over=st.booleans())
    def a_trainer_opens_a_session(self, take_over: bool):
        self.sessions += 1
        self._try(self.sim.open_session, f"s{self.sessions}", take_over=take_over)

    @precondition(lambda self: self.sim.state.session)
    @rule()
    def the_trainer_requests_a_refit(self):
        assert self.sim.state.session is not None
        self.versions += 1
        self.refits += 1
        self._try(self.sim.request, self.versions, f"r{self.refits}", self.sim.state.session.id)

    @rule(level=st.sampled_from(SleepLevel))
    def the_fleet_falls_asleep(self, level: SleepLevel):
        self._try(self.sim.apply, SleepRequested(f"q{self.sim.fresh()}", SleepFleet(level=level)))

    @rule(tags=st.sampled_from([(), (WakeTag.WEIGHTS,), (WakeTag.KV_CACHE,)]))
    def the_fleet_wakes(self, tags: tuple[WakeTag, ...]):
        self._try(self.sim.apply, WakeRequested(f"q{self.sim.fresh()}", WakeFleet(tags=tags)))

    @precondition(lambda self: self.sim.state.active)
    @rule(deed=st.sampled_from(["follow", "follow", "follow", "follow", "fail", "leave", "repeat"]))
    def the_trainer_acts(self, deed: str):
        refit = self.sim.state.active
        assert refit is not None
        if deed == "fail":
            self._try(self.sim.fail, refit.id)
        elif deed == "leave" and self.sim.state.session is not None:
            self._try(self.sim.apply, SessionClosed(self.sim.state.session.id))
        elif deed == "repeat" and refit.sent is not None:
            self._try(self.sim.tell_sent, refit.id)
        elif refit.step is Step.JOIN:
            self._try(self.sim.join, refit.id)
        elif refit.step is Step.PREPARE:
            self._try(self.sim.prepare, refit.id)
        elif refit.step in {Step.RECEIVE, Step.VERIFY} and refit.sent is None:
            self._try(self.sim.send, refit.id)

    @precondition(lambda self: self.sim.state.session)
    @rule()
    def a_whole_refit_without_trouble(self):
        if self.sim.state.active is None and self.sim.state.queued is None and not self.sim.state.reading:
            assert self.sim.state.session is not None
            self.the_roster_arrives()
            self.versions += 1
            self.refits += 1
            try:
                view = self.sim.run_refit(self.versions, f"r{self.refits}", self.sim.state.session.id)
            except ProblemError:
                return
            assert view.phase in TERMINAL

    # The promises.

    @invariant()
    def engines_that_serve_hold_one_whole_published_version(self):
        for engine in self.sim.workers.values():
            if engine.serves:
                assert engine.weights is not None, f"{engine.name} serves a mixture"
                assert not engine.vllm.stale_cache, f"{engine.name} serves with the cache of other weights"
                assert not engine.vllm.paused, f"{engine.name} takes requests and is paused for ever"
                version, digest = engine.weights
                assert version == engine.fence.version
                assert self.sim.published.get(version) == digest, f"{engine.name} serves unpublished {engine.weights}"

    @invariant()
    def epoch_and_version_only_rise(self):
        state, stored = self.sim.state, self.sim.stored
        assert state.epoch >= self.seen_epoch
        assert state.version >= self.seen_version or state.record is None
        assert stored.version >= self.seen_stored[1]
        if state.record is not None:
            self.seen_version = max(self.seen_version, state.version)
            assert state.version <= stored.version, "a version counts only once it is stored"
        self.seen_epoch = state.epoch
        self.seen_stored = (stored.epoch, stored.version)
        for number, engine in self.sim.workers.items():
            known, epoch = self.worker_epochs.get(number, (engine, 0))
            assert known is not engine or engine.fence.epoch >= epoch
            self.worker_epochs[number] = (engine, engine.fence.epoch)

    @invariant()
    def a_kept_group_has_the_newest_epoch(self):
        group = self.sim.state.group
        assert group is None or group.epoch == self.sim.state.epoch

    @invariant()
    def only_a_refit_under_way_changes_weights(self):
        fresh = self.sim.commands[self.seen_commands :]
        self.seen_commands = len(self.sim.commands)
        last = self.sim.state.refit
        for command in fresh:
            if isinstance(command, CallWorker) and command.verb in TRANSFER:
                assert last is not None
                assert command.message is not None
                assert command.message.epoch == last.epoch
            if isinstance(command, CallWorker) and command.verb is Verb.RESUME:
                record = self.sim.state.members.get(command.pod_uid)
                assert record is None or record.report is None or record.report.state is not WorkerState.DIRTY

    @invariant()
    def whoever_receives_a_staged_version_serves_meanwhile(self):
        refit = self.sim.state.active
        if refit is None or not refit.staged or refit.decided or refit.phase is Phase.ABORTING:
            return
        for seat in refit.seats:
            engine = self.sim.find(seat.pod_uid)
            if engine is not None and engine.instance == seat.instance and refit.step is not Step.CHECK:
                assert engine.fence.whole, f"{engine.name} is {engine.fence.state} while {refit.step}"

    @invariant()
    def an_engine_lends_to_one_peer_at_a_time_and_never_during_a_refit(self):
        donors = [loan.donor for loan in self.sim.state.loans.values() if loan.donor]
        assert len(donors) == len(set(donors))
        assert not donors or self.sim.state.active is None

    @invariant()
    def a_refit_ends_within_its_deadlines(self):
        refit = self.sim.state.active
        if refit is not None:
            limit = LONGEST + self.sim.timing.aborting
            assert self.sim.now - refit.started <= limit, f"{refit.id} in {refit.phase} since {refit.started}"

    def teardown(self):
        """When the trouble ends, the next refit brings every engine to a new version."""
        sim = self.sim
        sim.transfers = [(c, e) for c, e in sim.transfers if sim.find(c.pod_uid) is e]
        for engine in sim.workers.values():
            engine.cache_answer, engine.cache_fails, engine.peer_fails = True, False, False
        self.the_roster_arrives()
        for _ in range(12):
            while sim.transfers:
                sim.end_transfer(whole=False)
            sim.settle()
            sim.advance(10.0)
        self._try(sim.apply, WakeRequested("morning", WakeFleet()))
        sim.settle()
        self.sessions += 1
        sim.open_session(f"s{self.sessions}", take_over=True)
        self.versions += 1
        view = sim.run_refit(self.versions, "last", f"s{self.sessions}")
        assert view.phase is Phase.COMPLETE, view.problem
        sim.settle()
        self.engines_that_serve_hold_one_whole_published_version()
        for engine in sim.workers.values():
            assert engine.serves, f"{engine.name} is {engine.fence}"
            assert engine.weights == (self.versions, sim.published[self.versions])


FleetUnderFire.TestCase.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None, derandomize=False, print_blob=True
)
test_fleet_under_fire = FleetUnderFire.TestCase
