"""The operator dies at any moment; whoever comes next brings the fleet to what its spec says."""

import os
import random
import threading
from collections.abc import Callable

import pytest

from apiserver.harness.api import Body
from apiserver.harness.process import LEASE, OperatorProcess
from apiserver.harness.simulation import IMAGE
from apiserver.harness.space import Fleet, Space, condition, pod_is_ready, says
from apiserver.harness.syncjob import SyncJobStandIn

Launch = Callable[..., OperatorProcess]

SEED_VARIABLE = "ROLLOUTFLEET_TEST_SEED"
LIVES = 8
LONGEST_LIFE_SECONDS = 1.5
IMAGES = (IMAGE, "registry.example/worker:2", "registry.example/worker:3")


@pytest.fixture
def chance() -> random.Random:
    """Randomness that can be had again: the seed is printed."""
    seed = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(2**32))
    print(f"{SEED_VARIABLE}={seed}")
    return random.Random(seed)


def live_for(operator: OperatorProcess, seconds: float, work: Callable[[], None]) -> None:
    """The operator is killed so long after it began to act, while the work is done."""
    operator.await_lease()
    killer = threading.Timer(seconds, operator.kill)
    killer.start()
    try:
        work()
    finally:
        killer.join()


def test_a_fleet_converges_whenever_the_operator_is_killed(space: Space, launch: Launch, chance: random.Random):
    fleet = space.make_fleet("storm", replicas=2)
    spec: Body = {}

    def change() -> None:
        what = chance.choice(("replicas", "image", "policy", "pod", "suspend"))
        if what == "replicas":
            spec["replicas"] = chance.randrange(5)
        elif what == "image":
            spec["engine"] = {"image": chance.choice(IMAGES)}
        elif what == "policy":
            spec["refit"] = {"pause": chance.choice(("Keep", "Wait", "Abort"))}
        elif what == "suspend":
            spec["suspend"] = chance.random() < 0.5
        if spec:
            fleet.patch(**spec)
        if what == "pod" and (pods := sorted(fleet.pods())):
            space.cluster.delete("Pod", space.name, chance.choice(pods))

    for _ in range(LIVES):
        # Before it lives, so that its first pass has something to do, and again while it works.
        change()
        live_for(launch(), chance.uniform(0.0, LONGEST_LIFE_SECONDS), change)
        space.release_lease(LEASE)
    survivor = launch()
    survivor.await_lease()
    spec["suspend"] = False
    fleet.patch(**spec)
    body = fleet.await_ready(spec.get("replicas", 2))
    image = spec.get("engine", {}).get("image", IMAGE)
    assert {pod["spec"]["containers"][0]["image"] for pod in fleet.pods().values()} <= {image}
    assert len(space.cluster.list("Job", space.name, fleet.selector)) == 1
    assert len(fleet.pods(f"{fleet.selector},rolloutfleet.io/role=sync")) == 1
    engines = sorted(pod["metadata"]["labels"]["rolloutfleet.io/engine"] for pod in fleet.pods().values())
    assert engines == [str(n) for n in range(body["spec"]["replicas"])]
    fleet.delete()
    fleet.await_gone()


def test_a_fleet_whose_engines_serve_outlives_its_operator_untouched(space: Space, launch: Launch):
    first = launch()
    first.await_lease()
    fleet = space.make_fleet("calm", replicas=2)
    fleet.await_ready(2)
    before, status = fleet.child_uids(), fleet.body()["status"]
    first.kill()
    space.release_lease(LEASE)
    launch().await_lease()
    # A change of the spec that concerns no child, to see that a whole pass was made.
    generation = fleet.patch(replicas=2, refit={"cache": "Reset"}, suspend=False)["metadata"]["generation"]
    assert generation == status["observedGeneration"]
    probe = space.make_fleet("probe", replicas=0)
    probe.await_ready(0)
    assert fleet.child_uids() == before
    assert fleet.body()["status"] == status
    for gone in (fleet, probe):
        gone.delete()
        gone.await_gone()


@pytest.mark.row("A54")
def test_a_fleet_deleted_while_no_operator_runs_goes_when_one_does(space: Space, launch: Launch):
    first = launch()
    first.await_lease()
    fleet = space.make_fleet("orphan", replicas=2)
    fleet.await_ready(2)
    first.kill()
    space.release_lease(LEASE)
    fleet.delete()
    assert "deletionTimestamp" in fleet.body()["metadata"]
    assert len(fleet.pods()) == 2
    launch().await_lease()
    fleet.await_gone()


def owned_by_the_sync_job(stored: Body) -> Body:
    """The part of a WeightSync's status that is the sync job's word."""
    status = dict(stored["status"])
    status["conditions"] = [c for c in status["conditions"] if c["type"] == "Ready"]
    return status


@pytest.mark.scenario("F75")
def test_a_refit_under_way_does_not_notice_that_the_operator_died(
    space: Space, launch: Launch, chance: random.Random, sync_job: Callable[..., SyncJobStandIn]
):
    first = launch()
    first.await_lease()
    fleet = space.make_fleet("refit", replicas=2)
    fleet.await_ready(2)
    reporter = sync_job("refit")
    reporter.report(epoch=2, version=6, engines=2)
    fleet.await_condition("WeightsCurrent", "True")
    intent = {"epoch": 3, "version": 7}
    before = fleet.child_uids()
    first.kill()
    space.release_lease(LEASE)
    word = reporter.report(epoch=2, version=6, engines=2, intent=intent, phase="Pausing")
    for phase in ("Transferring", "Verifying"):
        operator = launch()
        operator.await_lease()
        fleet.await_that("the refit is seen", lambda body: body["status"]["weights"]["target"] == 7)
        assert owned_by_the_sync_job(space.cluster.get("WeightSync", space.name, "refit")) == owned_by_the_sync_job(
            word
        )

        def go_on(phase: str = phase) -> None:
            nonlocal word
            word = reporter.report(epoch=2, version=6, engines=2, intent=intent, phase=phase)

        live_for(operator, chance.uniform(0.0, 0.5), go_on)
        space.release_lease(LEASE)
    last = {"version": 7, "epoch": 3, "outcome": "Complete", "members": 2}
    word = reporter.report(epoch=3, version=7, engines=2, lastRefit=last)
    launch().await_lease()
    body = fleet.await_that("the commit is seen", lambda found: found["status"]["weights"]["version"] == 7)
    weights = body["status"]["weights"]
    assert (weights["epoch"], weights["target"], weights["skew"]) == (3, 7, 0)
    assert says(fleet.await_ready(2), "WeightsCurrent", "True", "Current")
    assert fleet.child_uids() == before
    stored = space.cluster.get("WeightSync", space.name, "refit")
    assert owned_by_the_sync_job(stored) == owned_by_the_sync_job(word)
    assert condition(stored, "Active")["status"] == "True"
    fleet.delete()
    fleet.await_gone()


def test_a_version_reported_while_no_operator_ran_survives_its_weightsync(
    space: Space, launch: Launch, sync_job: Callable[..., SyncJobStandIn]
):
    first = launch()
    first.await_lease()
    fleet = space.make_fleet("missed")
    fleet.await_ready(1)
    first.kill()
    space.release_lease(LEASE)
    sync_job("missed").report(epoch=5, version=12, engines=1)
    space.cluster.delete("WeightSync", space.name, "missed")
    launch().await_lease()
    space.cluster.wait(
        "a successor with its floor",
        "WeightSync",
        space.name,
        lambda state: state.get("missed", {}).get("spec", {}).get("floor") == {"epoch": 5, "version": 12},
        name="missed",
    )
    weights = fleet.await_that("the version is kept", lambda body: body["status"]["weights"]["version"] == 12)
    assert weights["status"]["weights"]["epoch"] == 5
    fleet.await_ready(1)
    fleet.delete()
    fleet.await_gone()


def test_an_update_is_finished_by_the_next_operator_one_engine_at_a_time(
    space: Space, launch: Launch, chance: random.Random
):
    first = launch()
    first.await_lease()
    fleet = space.make_fleet("update", replicas=3)
    fleet.await_ready(3)
    serving: list[int] = []
    watched = threading.Thread(target=_watch_until_updated, args=(fleet, serving))
    live = chance.uniform(0.02, 0.4)
    watched.start()
    live_for(first, live, lambda: fleet.patch(engine={"image": IMAGES[1]}))
    space.release_lease(LEASE)
    launch().await_lease()
    watched.join(60)
    assert not watched.is_alive()
    fleet.await_ready(3)
    assert min(serving) >= 2
    fleet.delete()
    fleet.await_gone()


def _watch_until_updated(fleet: Fleet, serving: list[int]) -> None:
    def updated(pods: dict[str, Body]) -> bool:
        serving.append(sum(pod_is_ready(pod) for pod in pods.values()))
        images = [pod["spec"]["containers"][0]["image"] for pod in pods.values() if pod_is_ready(pod)]
        return images == [IMAGES[1]] * 3

    fleet.await_pods(updated, seconds=50)
