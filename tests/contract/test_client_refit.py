"""The client's refits against the real sync job, with small engines in place of vLLM.

Where torch is installed tensors travel through real gloo groups too; elsewhere, and as well, through a transport in memory that blocks
and aborts as gloo does.
"""

import gc
import importlib.util
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import BaseModel

import rolloutfleet
from fakes.served_fleet import SOON, TOKEN, ServedFleet
from fakes.wires import GlooWire, MemoryWire
from rolloutfleet.channel import Channel
from rolloutfleet.contract.manifest import ManifestFaults
from rolloutfleet.contract.policy import RefitDeadlines, RefitPolicy, Transport
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import WakeTag, WorkerState
from rolloutfleet.errors import (
    CacheNotReset,
    DeadlineExceeded,
    FleetUnreachable,
    InvalidRequest,
    ManifestMismatch,
    RefitFailed,
    SessionHeld,
    SessionLost,
    Unauthorized,
)
from rolloutfleet_sync.protocol.model import Timing

no_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="real gloo groups need torch, which the worker image has"
)


@pytest.fixture(params=["memory", pytest.param("gloo", marks=no_torch)])
def setup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedFleet]:
    running = ServedFleet(MemoryWire(monkeypatch) if request.param == "memory" else GlooWire())
    running.start_sync()
    yield running
    running.close()


@pytest.fixture
def fleet(setup: ServedFleet) -> Iterator[rolloutfleet.Fleet]:
    with setup.connect() as connected:
        yield connected


@pytest.mark.row("A35")
@pytest.mark.row("A38")
def test_two_refits_go_to_every_engine_over_one_group(setup: ServedFleet, fleet: rolloutfleet.Fleet) -> None:
    phases: list[Phase] = []
    first = fleet.refit(setup.weights("a"), version=1, progress=lambda view: phases.append(view.phase))
    second = fleet.refit(setup.weights("bb"), version=2)
    assert (first.version, second.version) == (1, 2)
    assert first.epoch == second.epoch
    assert first.digest != second.digest
    assert {engine.digest for engine in setup.engines} == {second.digest}
    assert {(engine.version, engine.state) for engine in setup.engines} == {(2, WorkerState.SERVING)}
    assert [engine.calls.count("join") for engine in setup.engines] == [1, 1]
    assert (first.tensors, len(first.members)) == (4, 2)
    assert phases[-1] is Phase.COMPLETE
    assert fleet.view().version == 2


@pytest.mark.row("A37")
def test_tensors_that_the_model_cannot_load_are_named_and_nothing_was_paused(
    setup: ServedFleet, fleet: rolloutfleet.Fleet
) -> None:
    setup.engines[1].faults = ManifestFaults(missing=("lm_head.weight",))
    with pytest.raises(ManifestMismatch, match=r"lm_head\.weight"):
        fleet.refit(setup.weights(), version=1)
    assert not any("pause" in engine.calls for engine in setup.engines)
    setup.engines[1].faults = ManifestFaults()
    assert fleet.refit(setup.weights(), version=1).version == 1


@pytest.mark.scenario("F03")
def test_an_engine_that_fails_in_the_transfer_ends_the_blocked_trainer_and_the_next_refit_heals_all(
    setup: ServedFleet, fleet: rolloutfleet.Fleet
) -> None:
    setup.engines[1].refuse["receive"] = "out of memory"
    began = time.monotonic()
    with pytest.raises(RefitFailed, match="out of memory") as caught:
        fleet.refit(setup.weights(), version=1)
    assert time.monotonic() - began < SOON
    assert (caught.value.phase, caught.value.member) == ("Transferring", setup.engines[1].pod)
    assert fleet.view().version == 0
    failed_epoch = fleet.view().epoch
    setup.engines[1].refuse.clear()
    result = fleet.refit(setup.weights(), version=1)
    assert result.epoch > failed_epoch
    assert {(engine.version, engine.state) for engine in setup.engines} == {(1, WorkerState.SERVING)}


@pytest.mark.scenario("F01")
def test_an_engine_that_does_not_join_is_named_when_forming_is_over(
    setup: ServedFleet, fleet: rolloutfleet.Fleet
) -> None:
    setup.stop_sync()
    setup.policy = RefitPolicy(transport=Transport.GLOO, deadlines=RefitDeadlines(forming_seconds=1))
    setup.start_sync()
    setup.engines[1].hold.add("join")
    with pytest.raises(RefitFailed, match=setup.engines[1].pod) as caught:
        fleet.refit(setup.weights(), version=1)
    assert caught.value.phase == "Forming"
    assert {engine.state for engine in setup.engines} == {WorkerState.SERVING}


@pytest.mark.scenario("F03")
def test_a_trainer_that_fails_while_sending_ends_the_engines_wait(
    setup: ServedFleet, fleet: rolloutfleet.Fleet
) -> None:
    class Breaking(dict):
        readings = 0

        def items(self):
            self.readings += 1
            for index, item in enumerate(super().items()):
                if self.readings > 2 and index == 2:
                    raise ArithmeticError("loss is NaN")
                yield item

    began = time.monotonic()
    with pytest.raises(RefitFailed, match="ArithmeticError: loss is NaN") as caught:
        fleet.refit(Breaking(setup.weights()), version=1)
    assert time.monotonic() - began < SOON
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert fleet.refit(setup.weights(), version=1).version == 1


def test_the_trainers_own_deadline_names_phase_and_absentee_and_ends_the_refit(
    setup: ServedFleet, fleet: rolloutfleet.Fleet
) -> None:
    setup.engines[0].hold.add("receive")
    with pytest.raises(DeadlineExceeded, match=f"phase Transferring, waiting for .*{setup.engines[0].pod}"):
        fleet.refit(setup.weights(), version=1, timeout=1.0)
    setup.engines[0].hold.clear()
    setup.wait_until(lambda state: state.active is None)
    assert fleet.refit(setup.weights(), version=1).version == 1


@pytest.mark.parametrize("heard", [True, False], ids=["the answer is lost", "the word is lost"])
def test_one_lost_word_to_the_sync_job_costs_no_refit(
    setup: ServedFleet, fleet: rolloutfleet.Fleet, monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    tell, said = Channel.tell, Counter[str]()

    def lossy(channel: Channel, path: str, body: BaseModel) -> None:
        step = path.rpartition("/")[2]
        said[step] += 1
        if said[step] > 1 or heard:
            tell(channel, path, body)
        if said[step] == 1:
            raise FleetUnreachable(f"connection reset while telling {step}")

    monkeypatch.setattr(Channel, "tell", lossy)
    assert fleet.refit(setup.weights(), version=1).version == 1
    assert (said["joined"], said["sent"]) == (2, 2)
    assert {(engine.version, engine.state) for engine in setup.engines} == {(1, WorkerState.SERVING)}


def test_a_version_that_does_not_rise_is_refused(setup: ServedFleet, fleet: rolloutfleet.Fleet) -> None:
    fleet.refit(setup.weights(), version=3)
    with pytest.raises(InvalidRequest, match="3"):
        fleet.refit(setup.weights(), version=3)


@pytest.mark.scenario("F04")
def test_a_second_trainer_is_told_who_holds_the_fleet_and_may_take_over(
    setup: ServedFleet, fleet: rolloutfleet.Fleet
) -> None:
    first = fleet.refit(setup.weights(), version=1)
    with setup.connect(trainer="second") as other, pytest.raises(SessionHeld, match=r"first.*take_over=True"):
        other.refit(setup.weights(), version=2)
    with setup.connect(trainer="second", take_over=True) as other:
        assert other.refit(setup.weights(), version=2).epoch > first.epoch


@pytest.mark.row("A54")
def test_a_trainer_that_shuts_down_gives_the_fleet_back_and_engines_go_on(setup: ServedFleet) -> None:
    fleet = setup.connect()
    fleet.refit(setup.weights(), version=1)
    assert fleet.shutdown() is True
    assert setup.runtime.state.session is None
    assert {engine.state for engine in setup.engines} == {WorkerState.SERVING}
    with setup.connect(trainer="second") as other:
        assert other.refit(setup.weights(), version=2).version == 2


@pytest.mark.row("A54")
def test_a_forgotten_fleet_object_gives_the_fleet_back_too(setup: ServedFleet) -> None:
    fleet = setup.connect()
    fleet.refit(setup.weights(), version=1)
    del fleet
    gc.collect()
    setup.wait_until(lambda state: state.session is None)


@pytest.mark.parametrize("setup", ["memory"], indirect=True)
def test_the_lease_is_renewed_while_the_trainer_trains(setup: ServedFleet, fleet: rolloutfleet.Fleet) -> None:
    setup.stop_sync()
    setup.timing = Timing(poll=0.02, heartbeat=0.1, retry=0.05, lease=0.6)
    setup.start_sync()
    fleet.refit(setup.weights(), version=1)
    opened = setup.runtime.state.session
    setup.wait_until(lambda state: state.session is None or state.session.expires > opened.expires + 2 * 0.6)
    assert setup.runtime.state.session.id == opened.id
    assert fleet.refit(setup.weights(), version=2).epoch == fleet.view().epoch


def test_a_sync_job_that_restarts_between_refits_is_not_noticed(setup: ServedFleet, fleet: rolloutfleet.Fleet) -> None:
    first = fleet.refit(setup.weights(), version=1)
    setup.stop_sync()
    setup.start_sync()
    assert fleet.refit(setup.weights(), version=2).epoch > first.epoch


@pytest.mark.parametrize("committed", [False, True], ids=["before the record", "after it"])
def test_a_sync_job_that_restarts_in_a_refit_leaves_no_doubt_about_the_version(
    setup: ServedFleet, fleet: rolloutfleet.Fleet, committed: bool
) -> None:
    setup.engines[0].hold.add("commit" if committed else "join")
    with ThreadPoolExecutor() as threads:
        call = threads.submit(fleet.refit, setup.weights(), version=1)
        setup.wait_until(lambda state: state.version == 1 if committed else "join" in setup.engines[0].calls)
        setup.stop_sync()
        setup.engines[0].hold.clear()
        setup.start_sync()
        error = call.exception(30)
    if committed:
        assert isinstance(error, RefitFailed)
        assert error.committed
        assert "refit to version 1, which is committed" in str(error)
        assert fleet.refit(setup.weights(), version=2).version == 2
    else:
        # The old sync job's last word reaches a trainer that waits for one; without it the new one knows no such session.
        assert isinstance(error, SessionLost | RefitFailed)
        assert not (isinstance(error, RefitFailed) and error.committed)
        assert fleet.refit(setup.weights(), version=1).version == 1


@pytest.mark.row("A27")
def test_endpoints_are_those_of_ready_engines(setup: ServedFleet, fleet: rolloutfleet.Fleet) -> None:
    ports = [int(member.address.partition(":")[2]) for member in fleet.view().members]
    assert fleet.endpoints() == [f"http://127.0.0.1:{port - 1}/v1" for port in ports]


@pytest.mark.row("A41")
@pytest.mark.row("A42")
@pytest.mark.row("A53")
@pytest.mark.row("B52")
def test_a_cache_counts_as_reset_only_when_every_engine_said_true(
    setup: ServedFleet, fleet: rolloutfleet.Fleet
) -> None:
    assert fleet.reset_prefix_cache() == {engine.pod: True for engine in setup.engines}
    assert fleet.finish_generation() is True
    setup.engines[1].cache_reset = False
    for reset in (fleet.reset_prefix_cache, fleet.finish_generation):
        with pytest.raises(CacheNotReset, match=setup.engines[1].pod):
            reset()


@pytest.mark.row("A42")
def test_an_engine_that_does_not_answer_has_not_reset_its_cache(setup: ServedFleet, fleet: rolloutfleet.Fleet) -> None:
    setup.engines[0].refuse["reset-cache"] = "busy"
    with pytest.raises(CacheNotReset, match=setup.engines[0].pod):
        fleet.reset_prefix_cache()


def test_a_result_says_how_the_weights_travelled_and_why(setup: ServedFleet, fleet: rolloutfleet.Fleet) -> None:
    result = fleet.refit(setup.weights(), version=1)
    assert result.transport is Transport.GLOO
    assert "the policy says so" in result.reason
    assert not result.staged


@pytest.mark.row("A52")
@pytest.mark.scenario("F49")
def test_a_fleet_sleeps_refuses_refits_and_wakes_by_tags(setup: ServedFleet, fleet: rolloutfleet.Fleet) -> None:
    fleet.refit(setup.weights(), version=1)
    assert {member.state for member in fleet.sleep(2).members} == {WorkerState.ASLEEP}
    assert {engine.sleep_level for engine in setup.engines} == {2}
    with pytest.raises(RefitFailed, match=r"wake the fleet first"):
        fleet.refit(setup.weights(), version=2)
    fleet.wake("weights")
    assert {engine.asleep for engine in setup.engines} == {(WakeTag.KV_CACHE,)}
    assert fleet.prepare_for_generation(["kv_cache"]) is True
    assert {engine.state for engine in setup.engines} == {WorkerState.SERVING}
    assert fleet.refit(setup.weights(), version=2).version == 2


def test_levels_and_tags_that_do_not_exist_are_refused_before_anything_is_asked(
    setup: ServedFleet, fleet: rolloutfleet.Fleet
) -> None:
    asked = [len(engine.calls) for engine in setup.engines]
    with pytest.raises(ValueError, match=r"level is 3; engines sleep at level 1"):
        fleet.sleep(3)
    with pytest.raises(ValueError, match=r"tags cache are unknown; engines wake kv_cache, weights"):
        fleet.wake("weights", "cache")
    assert [len(engine.calls) for engine in setup.engines] == asked


@pytest.mark.row("A52")
def test_a_fleet_that_shares_no_device_is_always_prepared(setup: ServedFleet, fleet: rolloutfleet.Fleet) -> None:
    asked = [len(engine.calls) for engine in setup.engines]
    assert fleet.prepare_for_generation() is True
    assert fleet.prepare_for_generation(tags=["weights", "kv_cache"]) is True
    assert [len(engine.calls) for engine in setup.engines] == asked


def test_a_wrong_token_is_refused_at_once_with_the_command_that_prints_the_right_one(setup: ServedFleet) -> None:
    with pytest.raises(Unauthorized, match="kubectl get secret NAME-token -n default"):
        setup.connect(token="wrong")


def test_an_address_where_nobody_listens_says_how_to_get_there(setup: ServedFleet) -> None:
    with pytest.raises(FleetUnreachable, match=r"kubectl port-forward .*service/quickstart-sync 8080"):
        rolloutfleet.connect("quickstart", namespace="nowhere", token=TOKEN, timeout=2)


@pytest.mark.parametrize("advertise", ["203.0.113.7", "0.0.0.0"])
def test_an_address_that_is_not_here_cannot_be_advertised(setup: ServedFleet, advertise: str) -> None:
    with (
        setup.connect(advertise=advertise) as fleet,
        pytest.raises(ValueError, match=rf"{advertise}.*peers need|advertise='{advertise}' cannot"),
    ):
        fleet.refit(setup.weights(), version=1)
