"""Engines of several pods, from the spec to the pods: shapes, manifests, and whole passes."""

import pytest

from rolloutfleet_operator.api.parse import parse_fleet_spec
from rolloutfleet_operator.cluster.kinds import ObjectRef
from rolloutfleet_operator.errors import InvalidSpecError
from rolloutfleet_operator.reconcile.fleetpass import run_pass
from rolloutfleet_operator.render.engine import render_engine_pods, render_engine_template

TWO = {"tensor": 8, "pipeline": 2, "gpusPerNode": 8}


@pytest.fixture
def render(identity, images, make_spec):
    def run(number=0, incarnation=0, **fields):
        template = render_engine_template(identity, make_spec(**fields), images)
        return render_engine_pods(identity, template, number, incarnation)

    return run


def variables(pod):
    (container,) = pod["spec"]["containers"]
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


def arguments(pod):
    return pod["spec"]["containers"][0]["args"]


@pytest.mark.row("A12")
def test_pods_of_an_engine_differ_in_name_rank_and_role_alone(render):
    leader, follower = render(3, 1, parallelism=TWO)
    assert [pod["metadata"]["name"] for pod in (leader, follower)] == ["demo-3-0-1", "demo-3-1-1"]
    roles = [pod["metadata"]["labels"]["rolloutfleet.io/role"] for pod in (leader, follower)]
    assert roles == ["leader", "follower"]
    assert [pod["metadata"]["labels"]["rolloutfleet.io/rank"] for pod in (leader, follower)] == ["0", "1"]
    assert arguments(leader) == arguments(follower)
    assert {"--tensor-parallel-size=8", "--pipeline-parallel-size=2"} <= set(arguments(leader))
    told = [variables(pod) for pod in (leader, follower)]
    assert [each["ROLLOUTFLEET_POD_RANK"] for each in told] == ["0", "1"]
    assert "ROLLOUTFLEET_LEADER" not in told[0]
    assert told[1]["ROLLOUTFLEET_LEADER"] == "demo-3-0-1.demo-engines.rl.svc"
    assert {(each["ROLLOUTFLEET_RANKS"], each["ROLLOUTFLEET_PODS"]) for each in told} == {("16", "2")}
    limits = {pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in (leader, follower)}
    assert limits == {"8"}


@pytest.mark.row("A14")
@pytest.mark.scenario("F26")
def test_in_network_reductions_are_off_where_an_engine_spans_hosts_unless_a_user_says_otherwise(render):
    assert variables(render(parallelism=TWO)[1])["NCCL_NVLS_ENABLE"] == "0"
    assert "NCCL_NVLS_ENABLE" not in variables(render(parallelism={"tensor": 8})[0])
    own = [{"name": "NCCL_NVLS_ENABLE", "value": "1"}]
    assert variables(render(parallelism=TWO, engine={"env": own})[0])["NCCL_NVLS_ENABLE"] == "1"


@pytest.mark.row("A16")
def test_data_parallel_ranks_inside_an_engine_follow_from_its_experts(render):
    (pod,) = render(parallelism={"tensor": 2, "expert": 8})
    assert {"--data-parallel-size=4", "--enable-expert-parallel"} <= set(arguments(pod))
    assert (variables(pod)["VLLM_DP_SIZE"], variables(pod)["ROLLOUTFLEET_RANKS"]) == ("4", "8")


@pytest.mark.row("A-U1", "A-U3")
@pytest.mark.scenario("F32")
def test_pods_that_may_share_a_host_have_ports_and_caches_of_their_own(render):
    told = [variables(pod) for engine in range(6) for pod in render(engine, parallelism=TWO)]
    windows = [int(each["VLLM_PORT"]) for each in told]
    assert len(set(windows)) == len({each["VLLM_CACHE_ROOT"] for each in told}) == 12
    assert min(abs(a - b) for a in windows for b in windows if a != b) >= 32
    meeting = [each["ROLLOUTFLEET_ENGINE_PORT"] for each in told]
    assert meeting[::2] == meeting[1::2]
    assert len(set(meeting)) == 6


def test_no_node_takes_two_pods_of_an_engine_whatever_else_a_user_asks(render):
    affinity = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}}
    pod = render(parallelism=TWO, template={"affinity": affinity})[1]
    (term,) = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    labels = pod["metadata"]["labels"]
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()
    assert "rolloutfleet.io/rank" not in term["labelSelector"]["matchLabels"]
    assert "preferredDuringSchedulingIgnoredDuringExecution" in pod["spec"]["affinity"]["podAntiAffinity"]
    assert "affinity" not in render(parallelism={"tensor": 8})[0]["spec"]


@pytest.mark.row("A26")
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tensor": 2, "expert": 3}, "parallelism.expert is 3, which is no multiple of parallelism.tensor 2"),
        (
            {"tensor": 3, "pipeline": 8, "gpusPerNode": 8},
            "parallelism.gpusPerNode is 8, but a tensor parallel group has 3 GPUs",
        ),
        ({"tensor": 8, "gpusPerNode": 3}, "parallelism.gpusPerNode is 3, but a tensor parallel group has 8 GPUs"),
    ],
)
def test_stored_shapes_that_cannot_be_are_refused_with_both_numbers(make_body, sizes, words):
    with pytest.raises(InvalidSpecError) as refused:
        parse_fleet_spec(make_body(parallelism=sizes))
    assert words in str(refused.value)


def names(cluster):
    return sorted(
        p["metadata"]["name"] for p in cluster.of("Pod") if "rolloutfleet.io/engine" in p["metadata"]["labels"]
    )


@pytest.fixture
def settle(runtime, cluster):
    async def until_quiet():
        for _ in range(40):
            cluster.run_pods()
            before = len(cluster.writes)
            result = await run_pass(runtime, ("rl", "demo"), cluster.observe, 0)
            if len(cluster.writes) == before:
                return result
        raise AssertionError(f"still writing: {cluster.writes[-10:]}")

    return until_quiet


async def test_a_fleet_counts_engines_and_its_roster_names_leaders(cluster, make_body, settle):
    cluster.put(make_body(replicas=2, parallelism=TWO))
    await settle()
    assert names(cluster) == ["demo-0-0-0", "demo-0-1-0", "demo-1-0-0", "demo-1-1-0"]
    status = cluster.objects[ObjectRef("RolloutFleet", "rl", "demo")]["status"]
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (2, 2, 2)
    members = cluster.objects[ObjectRef("ConfigMap", "rl", "demo-members")]["data"]
    assert "demo-0-0-0" in str(members)
    assert "demo-0-1-0" not in str(members)


async def test_a_follower_that_is_deleted_costs_its_engine_and_no_other(cluster, make_body, settle):
    cluster.put(make_body(replicas=2, parallelism=TWO))
    await settle()
    cluster.objects[ObjectRef("Pod", "rl", "demo-1-1-0")]["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    before = len(cluster.writes)
    await settle()
    wrote = {(verb, name) for verb, kind, name in cluster.writes[before:] if kind == "Pod"}
    assert {("create", "demo-1-0-1"), ("create", "demo-1-1-1"), ("delete", "demo-1-0-0")} <= wrote
    assert not [name for _, name in wrote if name.startswith("demo-0-")]


async def test_scaling_down_ends_every_pod_of_an_engine(cluster, make_body, settle):
    cluster.put(make_body(replicas=2, parallelism=TWO))
    await settle()
    stored = cluster.objects[ObjectRef("RolloutFleet", "rl", "demo")]
    stored["spec"]["replicas"] = 1
    stored["metadata"]["generation"] += 1
    await settle()
    assert names(cluster) == ["demo-0-0-0", "demo-0-1-0"]
