"""A fleet's checkpoint, in whole passes over a cluster in memory: when its Job runs, and what is told of it."""

import pytest

from rolloutfleet_operator.cluster.kinds import ObjectRef
from rolloutfleet_operator.config import Images
from rolloutfleet_operator.reconcile.fleetpass import run_pass
from rolloutfleet_operator.render.checkpoint import render_checkpoint_job

KEY = ("rl", "demo")
FLEET = ObjectRef("RolloutFleet", *KEY)
STANDING = ObjectRef("WeightSync", *KEY)
URI = "s3://bucket/run"


class World:
    """A fleet, its sync job's reports and what becomes of the Jobs."""

    def __init__(self, cluster, runtime, make_body) -> None:
        self.cluster, self.runtime, self.make_body = cluster, runtime, make_body

    def apply(self, checkpoint=None, **spec) -> None:
        weights = {"weights": {"checkpoint": checkpoint}} if checkpoint else {}
        body = self.make_body(replicas=2, **(spec | weights))
        stored = self.cluster.objects.get(FLEET)
        if stored is not None:
            body["metadata"]["generation"] = stored["metadata"]["generation"] + 1
            body["status"] = stored.get("status", {})
        self.cluster.put(body)

    async def run(self):
        return await run_pass(self.runtime, KEY, self.cluster.observe, 0)

    async def settle(self, rounds: int = 40):
        for _ in range(rounds):
            self.run_pods()
            before = len(self.cluster.writes)
            result = await self.run()
            assert result.error is None, result.error
            if len(self.cluster.writes) == before:
                return result
        raise AssertionError(f"still writing: {self.cluster.writes[-10:]}")

    def run_pods(self) -> None:
        ended = {ref: body["status"] for ref, body in self.cluster.objects.items() if self._ended(ref, body)}
        self.cluster.run_pods()
        for ref, status in ended.items():
            self.cluster.objects[ref]["status"] = status

    @staticmethod
    def _ended(ref, body) -> bool:
        return ref.kind == "Pod" and (body.get("status") or {}).get("phase") in {"Failed", "Succeeded"}

    def report(self, version=0, admitted=2, behind=(), **status) -> None:
        """What the sync job says."""
        members = {"total": 2, "admitted": admitted}
        stored = self.cluster.objects[STANDING]
        conditions = stored.get("status", {}).get("conditions", [])
        stored["status"] = {
            "conditions": conditions,
            "phase": "Ready",
            "epoch": 3,
            "version": version,
            "members": members,
            "behind": list(behind),
            **status,
        }

    def job(self, name):
        return self.cluster.objects.get(ObjectRef("Job", "rl", name))

    def end_job(self, name, outcome, message="") -> None:
        """The Job controller's word, and the pod's own."""
        self.job(name)["status"] = {"conditions": [{"type": outcome, "status": "True", "message": "policy"}]}
        pod = self.cluster.objects[ObjectRef("Pod", "rl", f"{name}-x")]
        pod["status"] = {
            "phase": "Succeeded" if outcome == "Complete" else "Failed",
            "containerStatuses": [
                {"name": "checkpoint", "restartCount": 0, "state": {"terminated": {"exitCode": 4, "message": message}}}
            ],
        }

    def lose_job(self, name) -> None:
        """Its time to live is over."""
        del self.cluster.objects[ObjectRef("Job", "rl", name)]
        del self.cluster.objects[ObjectRef("Pod", "rl", f"{name}-x")]

    def condition(self, kind, ref=FLEET):
        return next(c for c in self.cluster.objects[ref]["status"]["conditions"] if c["type"] == kind)

    def weights(self):
        found = self.condition("WeightsCurrent")
        return found["status"], found["reason"], found["message"]

    def jobs(self):
        return [
            ref.name for ref in sorted(self.cluster.objects, key=str) if ref.kind == "Job" and "-sync-" not in ref.name
        ]

    def sync(self, version=1):
        return self.cluster.objects.get(ObjectRef("WeightSync", "rl", f"demo-checkpoint-{version}"))


@pytest.fixture
async def world(cluster, runtime, make_body):
    made = World(cluster, runtime, make_body)
    made.apply()
    await made.settle()
    made.report()
    await made.settle()
    return made


async def test_a_checkpoint_is_sent_by_a_job_and_told_in_a_weightsync(world):
    pods = sorted(ref.name for ref in world.cluster.objects if ref.kind == "Pod")
    world.apply({"version": 1, "uri": URI})
    await world.settle()
    assert world.jobs() == ["demo-checkpoint-1"]
    assert world.weights() == ("False", "CheckpointRefit", "Job demo-checkpoint-1 reads the checkpoint")
    assert world.condition("Reconciling")["reason"] == "CheckpointRefit"
    assert world.condition("Ready")["status"] == "True"
    assert world.sync()["spec"]["checkpoint"] == {"version": 1, "place": URI}
    assert world.condition("Active", ObjectRef.of(world.sync() | {"kind": "WeightSync"}))["status"] == "True"

    progress = {"refit": "r1", "version": 1, "epoch": 4, "phase": "Transferring", "waitingFor": ["demo-0-0-0"]}
    world.report(session={"id": "s", "trainer": "demo-checkpoint-1"}, refit=progress)
    await world.settle()
    assert world.weights()[2] == "Job demo-checkpoint-1 sends: Transferring, waits for demo-0-0-0"
    assert world.sync()["status"]["phase"] == "Transferring"

    world.report(version=1, lastRefit={"version": 1, "outcome": "Complete", "nbytes": 7})
    world.end_job("demo-checkpoint-1", "Complete")
    await world.settle()
    assert world.weights() == ("True", "Current", "every engine holds version 1")
    assert world.condition("Reconciling")["status"] == "False"
    said = world.sync()["status"]
    assert (said["phase"], said["version"], said["lastRefit"]["nbytes"]) == ("Complete", 1, 7)
    assert (
        sorted(n for n in (ref.name for ref in world.cluster.objects if ref.kind == "Pod") if "check" not in n) == pods
    )

    world.lose_job("demo-checkpoint-1")
    await world.settle()
    assert world.jobs() == []
    assert world.sync()["status"]["phase"] == "Complete"


@pytest.mark.scenario("F76")
async def test_it_waits_while_a_trainer_holds_the_fleet(world):
    world.report(session={"id": "s", "trainer": "ppo/42"})
    world.apply({"version": 1, "uri": URI})
    await world.settle()
    assert world.jobs() == []
    assert world.weights() == ("False", "CheckpointRefit", "trainer ppo/42 holds the fleet; waits until it lets go")
    active = world.condition("Active", ObjectRef("WeightSync", "rl", "demo-checkpoint-1"))
    assert (active["status"], active["reason"]) == ("False", "WaitingForTurn")
    assert world.condition("Active", STANDING)["status"] == "True"
    world.report()
    await world.settle()
    assert world.jobs() == ["demo-checkpoint-1"]


async def test_a_job_that_fails_for_good_says_why_and_is_not_made_again(world):
    world.apply({"version": 1, "uri": URI})
    await world.settle()
    world.end_job("demo-checkpoint-1", "Failed", "tensor a was cut off")
    result = await world.run()
    words = "Job demo-checkpoint-1 failed: tensor a was cut off"
    assert world.weights() == ("False", "CheckpointFailed", words)
    assert world.condition("Stalled")["reason"] == "CheckpointFailed"
    assert world.condition("Reconciling")["status"] == "False"
    assert world.condition("Ready")["status"] == "True"
    assert [event.message for event in result.events if event.warning] == [words]
    await world.settle()
    world.lose_job("demo-checkpoint-1")
    await world.settle()
    assert world.jobs() == []
    assert world.weights() == ("False", "CheckpointFailed", words)

    world.apply({"version": 2, "uri": URI})
    await world.settle()
    assert world.jobs() == ["demo-checkpoint-2"]
    assert world.sync(1) is None
    assert world.condition("Stalled")["status"] == "False"


async def test_another_secret_gives_a_job_that_failed_another_chance(world):
    world.apply({"version": 1, "uri": URI})
    await world.settle()
    world.end_job("demo-checkpoint-1", "Failed", "no credentials")
    await world.settle()
    before = world.job("demo-checkpoint-1")["metadata"]["uid"]
    world.apply({"version": 1, "uri": URI, "secretRef": {"name": "bucket"}})
    await world.settle()
    assert world.job("demo-checkpoint-1")["metadata"]["uid"] != before
    container = world.job("demo-checkpoint-1")["spec"]["template"]["spec"]["containers"][0]
    assert container["envFrom"] == [{"secretRef": {"name": "bucket"}}]


async def test_a_version_that_was_published_counts_although_its_job_failed(world):
    world.apply({"version": 1, "uri": URI})
    await world.settle()
    world.report(version=1, admitted=1)
    world.end_job("demo-checkpoint-1", "Failed", "demo-1-0-0 did not follow")
    await world.settle()
    assert world.weights() == ("False", "EnginesBehind", "1 of 2 engines do not hold version 1")
    assert world.sync()["status"]["phase"] == "Complete"


async def test_a_trainers_version_that_passes_the_checkpoints_leaves_nothing_of_it(world):
    world.report(session={"id": "s", "trainer": "ppo"})
    world.apply({"version": 1, "uri": URI})
    await world.settle()
    assert world.sync() is not None
    world.report(version=3, session={"id": "s", "trainer": "ppo"})
    await world.settle()
    assert world.sync() is None
    assert world.jobs() == []
    assert world.weights()[:2] == ("True", "Current")


async def test_a_newer_checkpoint_takes_the_place_of_one_on_its_way(world):
    world.apply({"version": 1, "uri": URI})
    await world.settle()
    world.apply({"version": 2, "uri": f"{URI}/2"})
    await world.settle()
    assert world.jobs() == ["demo-checkpoint-2"]
    assert world.sync(1) is None
    world.apply()
    await world.settle()
    assert world.jobs() == []
    assert world.sync(2) is None


async def test_without_engines_nothing_is_sent(world):
    world.apply({"version": 1, "uri": URI}, suspend=True)
    await world.settle()
    assert world.jobs() == []
    assert world.weights()[:2] == ("Unknown", "NothingRuns")
    world.apply({"version": 1, "uri": URI})
    await world.settle()
    world.report()
    await world.settle()
    assert world.jobs() == ["demo-checkpoint-1"]
    world.apply({"version": 1, "uri": URI}, suspend=True)
    await world.settle()
    assert world.jobs() == []


async def test_a_fleet_of_dummy_weights_gets_its_first_version(world):
    spec = {"model": {"name": "org/tiny", "loadFormat": "Dummy"}}
    world.apply({"version": 1, "uri": URI}, **spec)
    await world.settle()
    assert world.jobs() == ["demo-checkpoint-1"]
    world.end_job("demo-checkpoint-1", "Failed", "no such bucket")
    await world.settle()
    assert world.condition("WeightsCurrent")["reason"] == "CheckpointFailed"


async def test_a_weightsync_of_somebody_else_starts_nothing_and_says_what_would(world):
    world.cluster.put(
        {
            "kind": "WeightSync",
            "metadata": {"name": "mine", "namespace": "rl", "creationTimestamp": "2020-01-01T00:00:00Z"},
            "spec": {"fleetRef": {"name": "demo"}, "checkpoint": {"version": 9}},
        }
    )
    await world.settle()
    assert world.jobs() == []
    active = world.condition("Active", ObjectRef("WeightSync", "rl", "mine"))
    assert (active["status"], active["reason"]) == ("False", "NotOfFleet")
    assert world.condition("Active", STANDING)["status"] == "True"


@pytest.fixture
async def sent(world):
    """A fleet that serves its checkpoint, and whose late engines may get it from there."""
    world.late = {"refit": {"lateJoin": "Checkpoint"}}
    world.apply({"version": 1, "uri": URI}, **world.late)
    await world.settle()
    world.report(version=1)
    world.end_job("demo-checkpoint-1", "Complete")
    await world.settle()
    return world


LATE = {"member": "demo-1-0-1", "engine": 1, "state": "Late", "version": 0}


@pytest.mark.scenario("F62")
async def test_engines_that_have_lost_every_copy_get_the_checkpoint_again(sent):
    sent.report(
        version=1, admitted=0, behind=[{"member": "demo-0-0-1", "engine": 0, "state": "Starting", "version": 0}]
    )
    await sent.settle()
    assert sent.jobs() == ["demo-checkpoint-1"]
    sent.report(version=1, admitted=0, behind=[LATE])
    await sent.settle()
    assert sent.jobs() == ["demo-checkpoint-1", "demo-repair-1"]
    command = sent.job("demo-repair-1")["spec"]["template"]["spec"]["containers"][0]["command"]
    assert "--repair" in command
    assert "the checkpoint is sent again: Job demo-repair-1 reads the checkpoint" in sent.weights()[2]
    sent.end_job("demo-repair-1", "Complete")
    sent.report(version=1)
    await sent.settle()
    assert sent.jobs() == ["demo-checkpoint-1"]
    assert sent.weights()[:2] == ("True", "Current")


async def test_an_engine_that_a_peer_can_help_is_left_to_it_for_a_while(sent):
    sent.report(version=1, admitted=1, behind=[LATE])
    await sent.settle()
    assert sent.jobs() == ["demo-checkpoint-1"]
    result = await sent.run()
    assert result.retry_after is not None
    assert 0 < result.retry_after <= 60
    condition = sent.condition("WeightsCurrent")
    condition["lastTransitionTime"] = "2026-01-02T03:00:00Z"
    await sent.settle()
    assert sent.jobs() == ["demo-checkpoint-1", "demo-repair-1"]


async def test_stale_engines_take_their_turn_at_borrowing_unless_nobody_is_left_who_lends(sent):
    stale = [{"member": f"demo-{n}-0-0", "engine": n, "state": "Stale", "version": 0} for n in range(2)]
    sent.report(version=1, admitted=1, behind=stale[:1])
    await sent.settle()
    sent.condition("WeightsCurrent")["lastTransitionTime"] = "2026-01-02T03:00:00Z"
    await sent.settle()
    assert sent.jobs() == ["demo-checkpoint-1"]
    sent.report(version=1, admitted=0, behind=stale)
    await sent.settle()
    assert sent.jobs() == ["demo-checkpoint-1", "demo-repair-1"]


async def test_an_engine_whose_time_is_over_gets_the_checkpoint_again_like_a_late_one(sent):
    sent.report(version=1, admitted=0, behind=[LATE | {"state": "Overdue"}])
    await sent.settle()
    assert sent.jobs() == ["demo-checkpoint-1", "demo-repair-1"]


async def test_a_version_that_came_from_a_trainer_is_not_repaired_from_a_checkpoint(sent):
    sent.report(version=2, admitted=0, behind=[LATE])
    await sent.settle()
    assert sent.jobs() == ["demo-checkpoint-1"]


def test_the_job_asks_for_no_gpu_no_root_and_no_token(make_spec, identity, golden):
    spec = make_spec(
        weights={"checkpoint": {"version": 7, "persistentVolumeClaim": {"claimName": "runs", "path": "step-7"}}},
        engine={
            "image": "own:1",
            "env": [{"name": "GLOO_SOCKET_IFNAME", "value": "eth1"}, {"name": "X", "value": "y"}],
        },
        template={"tolerations": [{"key": "gpu", "operator": "Exists"}]},
    )
    images = Images(worker="worker:1", operator="operator:1")
    job = render_checkpoint_job(identity, spec, spec.weights.checkpoint, images)
    golden("checkpoint_job.yaml", job.manifest)
    assert job.revision == render_checkpoint_job(identity, spec, spec.weights.checkpoint, images).revision
