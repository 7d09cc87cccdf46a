"""Manifests: few whole ones, and what each choice of a user changes in them."""

import pytest

from rolloutfleet.contract.members import Member, Roster
from rolloutfleet_operator.render.drift import covers
from rolloutfleet_operator.render.engine import render_engine_pod, render_engine_template
from rolloutfleet_operator.render.identity import FleetIdentity
from rolloutfleet_operator.render.shared import render_members, render_services, render_token
from rolloutfleet_operator.render.sync import render_standing_weightsync, render_sync_access, render_sync_job


@pytest.fixture
def render(identity, images, make_spec):
    def run(number=0, incarnation=0, **fields):
        template = render_engine_template(identity, make_spec(**fields), images)
        return render_engine_pod(identity, template, number, incarnation)

    return run


def container(pod):
    (only,) = pod["spec"]["containers"]
    return only


def environment(pod):
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container(pod)["env"]}


def mounts(pod):
    return {mount["mountPath"]: mount["name"] for mount in container(pod)["volumeMounts"]}


FULL = {
    "model": {
        "name": "org/tiny",
        "servedName": "policy",
        "maxModelLength": 256,
        "dtype": "Float32",
        "loadFormat": "Dummy",
        "source": {"persistentVolumeClaim": {"claimName": "models", "path": "tiny"}},
    },
    "parallelism": {"tensor": 2},
    "engine": {
        "args": {"max-num-seqs": "8", "enforce-eager": ""},
        "env": [
            {"name": "HOME", "value": "/scratch"},
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
        ],
        "resources": {"limits": {"memory": "64Gi"}, "requests": {"cpu": 4}},
    },
    "template": {
        "labels": {"team": "a"},
        "annotations": {"note": "b"},
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "imagePullSecrets": [{"name": "pull"}],
        "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}],
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
        "terminationGracePeriodSeconds": 5,
    },
}


def test_the_smallest_engine_pod(render, golden):
    golden("engine_pod_cpu.yaml", render(placement={"gpuResource": ""}))


def test_an_engine_pod_with_everything_set(render, golden):
    golden("engine_pod_full.yaml", render(3, 1, **FULL))


def test_objects_of_the_whole_fleet(identity, golden):
    roster = Roster(
        fleet="demo",
        fleet_uid="fleet-uid",
        engines=2,
        members=(Member(engine=0, pod_name="demo-0-0-0", pod_uid="u", address="10.0.0.1", ranks=2),),
    )
    golden(
        "shared.yaml", [render_token(identity, "secret"), *render_services(identity), render_members(identity, roster)]
    )


def test_objects_of_the_sync_job(identity, images, make_spec, golden):
    job = render_sync_job(identity, make_spec(placement={"gpuResource": ""}), "demo", images)
    golden(
        "sync.yaml", [*render_sync_access(identity, "demo"), job.manifest, render_standing_weightsync(identity, 4, 7)]
    )


@pytest.mark.row("A18")
@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_an_engine_is_one_pod_that_holds_all_its_ranks(render, tensor):
    pod = render(parallelism={"tensor": tensor})
    assert container(pod)["resources"]["limits"] == {"nvidia.com/gpu": str(tensor)}
    assert environment(pod)["ROLLOUTFLEET_RANKS"] == str(tensor)
    assert f"--tensor-parallel-size={tensor}" in container(pod)["args"]


@pytest.mark.row("A13")
@pytest.mark.parametrize(("engine", "image"), [({}, "worker:1"), ({"image": "mine:2"}, "mine:2")])
def test_every_engine_runs_the_launcher_of_its_image(render, engine, image):
    pod = render(engine=engine)
    assert container(pod)["image"] == image
    assert container(pod)["command"] == ["python3", "-m", "rolloutfleet_worker", "--"]


@pytest.mark.row("B42")
@pytest.mark.parametrize(
    ("lora", "arguments"),
    [
        ({}, ["--enable-lora", "--max-lora-rank=16", "--max-loras=2"]),
        ({"maxRank": 17, "maxAdapters": 3}, ["--enable-lora", "--max-lora-rank=32", "--max-loras=6"]),
        (
            {"maxRank": 8, "targetModules": ["v_proj", "q_proj"]},
            ["--enable-lora", "--max-lora-rank=8", "--max-loras=2", "--lora-target-modules", "q_proj", "v_proj"],
        ),
    ],
)
def test_engines_that_take_adapters_have_room_for_two_versions_of_each(render, lora, arguments):
    given = container(render(engine={"lora": lora, "args": {"seed": "1"}}))["args"]
    assert given[given.index("--enable-lora") :] == [*arguments, "--seed=1"]
    assert "--enable-lora" not in container(render())["args"]


@pytest.mark.row("A14")
@pytest.mark.scenario("F35")
def test_the_adapters_and_the_interface_of_an_overlay_network_can_be_given(render):
    own = [{"name": "NCCL_IB_HCA", "value": "=mlx5_0:1"}, {"name": "NCCL_SOCKET_IFNAME", "value": "=net1"}]
    given = environment(render(engine={"env": own}))
    assert (given["NCCL_IB_HCA"], given["NCCL_SOCKET_IFNAME"]) == ("=mlx5_0:1", "=net1")


@pytest.mark.row("A-U10")
def test_an_engine_that_three_probes_do_not_hear_is_started_again_and_one_that_says_no_gets_no_traffic(render):
    alive, ready = (container(render())[probe] for probe in ("livenessProbe", "readinessProbe"))
    assert (alive["failureThreshold"], ready["failureThreshold"]) == (3, 1)
    assert alive["httpGet"]["path"] != ready["httpGet"]["path"]


def test_every_pod_carries_the_same_environment_but_for_its_engine(render):
    fields = {"engine": {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}}
    first, second = environment(render(0, **fields)), environment(render(1, 4, **fields))
    assert (first.pop("ROLLOUTFLEET_ENGINE"), second.pop("ROLLOUTFLEET_ENGINE")) == ("0", "1")
    assert first == second
    assert first["NCCL_DEBUG"] == "INFO"


@pytest.mark.row("A15")
def test_cumem_is_on_for_gpus_absent_on_cpus_and_the_users_own_value_wins(render):
    assert environment(render())["NCCL_CUMEM_ENABLE"] == "1"
    assert "NCCL_CUMEM_ENABLE" not in environment(render(placement={"gpuResource": ""}))
    own = {"env": [{"name": "NCCL_CUMEM_ENABLE", "value": "0"}]}
    assert [e["value"] for e in container(render(engine=own))["env"] if e["name"] == "NCCL_CUMEM_ENABLE"] == ["0"]


@pytest.mark.row("A21")
def test_generation_reaches_leaders_that_are_ready_and_no_other_pod(identity):
    generation, engines, sync = render_services(identity)
    assert generation["spec"]["selector"] == {"rolloutfleet.io/fleet": "demo", "rolloutfleet.io/role": "leader"}
    assert "publishNotReadyAddresses" not in generation["spec"]
    assert engines["spec"]["publishNotReadyAddresses"]
    assert sync["spec"]["selector"]["rolloutfleet.io/role"] == "sync"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"replicas": 9}, True),
        ({"suspend": True}, True),
        ({"refit": {"pause": "Abort"}}, True),
        ({"parallelism": {"tensor": 2}}, False),
        ({"engine": {"args": {"max-num-seqs": "8"}}}, False),
        ({"template": {"labels": {"a": "b"}}}, False),
        ({"template": {"annotations": {"a": "b"}}}, False),
    ],
)
def test_a_revision_changes_with_the_pod_and_with_nothing_else(identity, images, make_spec, change, same):
    before = render_engine_template(identity, make_spec(), images).revision
    assert (render_engine_template(identity, make_spec(**change), images).revision == before) is same


def test_the_revision_does_not_depend_on_engine_or_incarnation(render):
    label = "rolloutfleet.io/revision"
    assert render(0, 0)["metadata"]["labels"][label] == render(7, 3)["metadata"]["labels"][label]


def test_the_order_in_which_a_user_writes_arguments_does_not_matter(render):
    one, other = {"max-num-seqs": "1", "block-size": "2"}, {"block-size": "2", "max-num-seqs": "1"}
    assert render(engine={"args": one}) == render(engine={"args": other})


def test_a_dotted_argument_never_takes_the_next_one_for_its_value(render):
    pod = render(engine={"args": {"hf-overrides.x": "", "hf-overrides.y": "2", "enforce-eager": ""}})
    assert container(pod)["args"][-3:] == ["--enforce-eager", "--hf-overrides.x=", "--hf-overrides.y=2"]


def test_the_sync_server_may_take_its_time_to_end(identity, images, make_spec):
    job = render_sync_job(identity, make_spec(), "demo", images)
    assert job.manifest["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 40


def test_labels_of_the_operator_win(identity, images, make_spec):
    template = render_engine_template(identity, make_spec(template={"labels": {"team": "a"}}), images)
    labels = render_engine_pod(identity, template, 0, 0)["metadata"]["labels"]
    assert (labels["team"], labels["rolloutfleet.io/role"]) == ("a", "leader")


@pytest.mark.parametrize(
    ("source", "argument", "volume"),
    [
        (None, "org/tiny", None),
        ({"hub": {}}, "org/tiny", None),
        ({"hostPath": {"path": "/data/m"}}, "/models/model", {"hostPath": {"path": "/data/m", "type": "Directory"}}),
        (
            {"persistentVolumeClaim": {"claimName": "c"}},
            "/models/model",
            {"persistentVolumeClaim": {"claimName": "c", "readOnly": True}},
        ),
    ],
)
def test_the_model_comes_from_where_the_fleet_says(render, source, argument, volume):
    pod = render(model={"name": "org/tiny"} | ({"source": source} if source else {}))
    assert container(pod)["args"][:2] == [argument, "--served-model-name=org/tiny"]
    found = [v for v in pod["spec"]["volumes"] if v["name"] == "rolloutfleet-model"]
    assert found == ([volume | {"name": "rolloutfleet-model"}] if volume else [])


def test_a_users_mount_replaces_the_operators_scratch_space(render):
    pod = render(template=FULL["template"])
    assert mounts(pod)["/tmp"] == "scratch"
    assert "rolloutfleet-tmp" not in [volume["name"] for volume in pod["spec"]["volumes"]]


def test_engines_in_the_hosts_ipc_namespace_have_its_shared_memory_and_no_own(render):
    apart, shared = (render(template={"hostIPC": value})["spec"] for value in (False, True))
    assert "hostIPC" not in apart
    assert shared["hostIPC"] is True
    kept = [mount for mount in apart["containers"][0]["volumeMounts"] if mount["mountPath"] != "/dev/shm"]
    assert shared["containers"][0]["volumeMounts"] == kept
    assert {volume["name"] for volume in apart["volumes"]} - {volume["name"] for volume in shared["volumes"]} == {
        "rolloutfleet-shm"
    }


def test_a_fleet_that_starts_with_random_weights_tells_its_engines_to_wait(render):
    assert environment(render())["ROLLOUTFLEET_AWAIT_FIRST_REFIT"] == "false"
    dummy = render(model={"name": "m", "loadFormat": "Dummy"})
    assert environment(dummy)["ROLLOUTFLEET_AWAIT_FIRST_REFIT"] == "true"
    assert "--load-format=dummy" in container(dummy)["args"]


def test_pods_run_without_root_and_without_privileges(render, identity, images, make_spec):
    job = render_sync_job(identity, make_spec(), "demo", images).manifest
    for spec in (render()["spec"], job["spec"]["template"]["spec"]):
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        security = spec["containers"][0]["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert not security["allowPrivilegeEscalation"]


def test_a_new_refit_policy_makes_a_job_of_a_new_name_and_scaling_does_not(identity, images, make_spec):
    before = render_sync_job(identity, make_spec(), "demo", images).name
    assert render_sync_job(identity, make_spec(replicas=9), "demo", images).name == before
    assert render_sync_job(identity, make_spec(refit={"pause": "Wait"}), "demo", images).name != before
    assert render_sync_job(identity, make_spec(), "other", images).name != before


def test_the_sync_role_reaches_its_own_weightsync_and_the_roster_alone(identity):
    _, role, _ = render_sync_access(identity, "demo")
    assert all(rule["resourceNames"] in (["demo"], ["demo-members"]) for rule in role["rules"])
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "list", "watch", "patch"}


def test_names_fit_for_the_longest_fleet_and_the_largest_number(images, make_spec):
    identity = FleetIdentity(name="f" * 40, namespace="rl", uid="u")
    template = render_engine_template(identity, make_spec(), images)
    assert len(render_engine_pod(identity, template, 999, 99999)["metadata"]["name"]) <= 63
    pod_suffix = len("-abcde")
    assert len(render_sync_job(identity, make_spec(), "demo", images).name) + pod_suffix <= 63


class TestDrift:
    def test_what_others_add_does_not_count(self):
        assert covers({"a": 1, "b": 2}, {"a": 1})

    @pytest.mark.parametrize("live", [{"a": 2}, {}, {"a": [1]}, {"a": None}])
    def test_what_is_missing_or_changed_does(self, live):
        assert not covers(live, {"a": 1})

    def test_an_entry_slipped_into_a_list_is_seen(self):
        assert not covers({"rules": [{"v": 1}, {"v": 2}]}, {"rules": [{"v": 1}]})
        assert covers({"rules": [{"v": 1, "defaulted": True}]}, {"rules": [{"v": 1}]})
