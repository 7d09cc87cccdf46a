"""Of several operators one acts: the holder of the Lease."""

from collections.abc import Callable
from datetime import datetime

from apiserver.harness.process import EXIT_LEASE_LOST, LEASE, OperatorProcess
from apiserver.harness.space import Space

DURATION_SECONDS = 15.0

Launch = Callable[..., OperatorProcess]


def await_holder(space: Space, other_than: str = "") -> str:
    """Who holds the Lease, once somebody else than that one does."""

    def holder(state: dict) -> str:
        found = state.get(LEASE, {}).get("spec", {}).get("holderIdentity", "")
        return found if found != other_than else ""

    return space.cluster.wait("a holder", "Lease", space.name, holder, name=LEASE, seconds=2 * DURATION_SECONDS)


def test_a_second_operator_waits_and_takes_over_when_the_first_goes_in_order(space: Space, launch: Launch):
    first = launch()
    first.await_lease()
    holder = await_holder(space)
    second = launch()
    assert second.await_message("waiting for the Lease")["holder"] == holder
    third = launch()
    third.await_message("waiting for the Lease")
    assert third.stop() == 0
    fleet = space.make_fleet("orderly")
    fleet.await_ready(1)
    assert not [record for record in second.records if record.get("fleet")]
    assert first.stop() == 0
    second.await_lease(seconds=5)
    assert await_holder(space, holder) != holder
    fleet.patch(replicas=2)
    fleet.await_ready(2)
    assert second.alive
    fleet.delete()
    fleet.await_gone()


def test_a_dead_holders_lease_runs_out_and_nobody_acts_before(space: Space, launch: Launch):
    first = launch()
    first.await_lease()
    holder = await_holder(space)
    second = launch()
    second.await_message("waiting for the Lease")
    first.kill()
    fleet = space.make_fleet("waiting")
    lease = space.cluster.get("Lease", space.name, LEASE)
    second.await_lease(seconds=2 * DURATION_SECONDS)
    after = space.cluster.get("Lease", space.name, LEASE)
    assert after["spec"]["holderIdentity"] != holder
    assert after["spec"]["leaseTransitions"] == lease["spec"]["leaseTransitions"] + 1
    idle = _seconds(after["spec"]["acquireTime"]) - _seconds(lease["spec"]["renewTime"])
    assert idle > DURATION_SECONDS
    fleet.await_ready(1)
    fleet.delete()
    fleet.await_gone()


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def test_a_process_that_loses_the_lease_ends_at_once_and_touches_nothing_more(space: Space, launch: Launch):
    operator = launch()
    operator.await_lease()
    fleet = space.make_fleet("robbed")
    fleet.await_ready(1)
    space.cluster.merge("Lease", space.name, LEASE, {"spec": {"holderIdentity": "somebody-else"}})
    assert operator.await_end(seconds=10) == EXIT_LEASE_LOST
    (record,) = [record for record in operator.records if record["level"] == "critical"]
    assert record["error"] == f"Lease {LEASE} is held by somebody-else now"
    assert space.cluster.get("Lease", space.name, LEASE)["spec"]["holderIdentity"] == "somebody-else"
    assert "rolloutfleet.io/operator" in fleet.body()["metadata"]["finalizers"]
