"""Content keys, image inputs, and the configuration that components get."""

import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from localcluster import buildah, config, images, kwok
from localcluster.archive import render_image
from localcluster.cache import content_key, publish
from localcluster.certificates import USERS, render_token_file
from localcluster.cpu_env import render_distribution
from localcluster.errors import LauncherError
from localcluster.network import render_nft_table
from localcluster.paths import find_paths
from localcluster.status import describe_age, render_table


def write(folder: Path, **files: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return [folder / name for name in files]


def test_a_key_follows_contents_names_and_facts_and_not_the_place(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    key = content_key(write(first, a="1", b="2"), {"go": "1.26"}, first)
    assert key == content_key(reversed(write(second, a="1", b="2")), {"go": "1.26"}, second)
    assert key != content_key(write(first, a="1", b="3"), {"go": "1.26"}, first)
    assert key != content_key(write(second, a="1", c="2"), {"go": "1.26"}, second)
    assert key != content_key(write(second, a="1", b="2"), {"go": "1.27"}, second)
    # Bytes that move from one file to the next are another content.
    assert content_key(write(first, a="12", b=""), {}, first) != content_key(write(first, a="1", b="2"), {}, first)


def test_a_folder_is_published_whole_once_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "key"

    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise LauncherError("broke")

    with pytest.raises(LauncherError):
        publish(target, fail)
    assert not target.exists()
    assert list(tmp_path.glob(".key.tmp-*")) == []
    assert publish(target, lambda folder: (folder / "whole").touch())
    assert not publish(target, fail)
    assert [file.name for file in target.iterdir()] == ["whole"]


def test_folders_follow_the_environment() -> None:
    paths = find_paths({"HOME": "/home/me"})
    assert (paths.cache, paths.state) == (
        Path("/home/me/.cache/rolloutfleet"),
        Path("/home/me/.local/state/rolloutfleet/cluster"),
    )
    chosen = find_paths({"HOME": "/home/me", "XDG_CACHE_HOME": "/c", "XDG_STATE_HOME": "/s"})
    assert (chosen.cache, chosen.state) == (Path("/c/rolloutfleet"), Path("/s/rolloutfleet/cluster"))
    assert find_paths({"HOME": "/home/me", "ROLLOUTFLEET_CLUSTER_DIR": "/x"}).state == Path("/x")


DOCKERFILE = """\
ARG BASE
FROM ${BASE}
COPY --chown=1:1 one two/ /there/
COPY --from=other /built /built
RUN --mount=type=bind,source=requirements,target=/r \\
    --mount=type=cache,target=/c --mount=type=bind,from=other,source=/x,target=/x \\
    pip install -r /r/operator.txt
"""


def test_what_a_dockerfile_takes_from_the_checkout_is_found() -> None:
    assert images.context_sources(DOCKERFILE) == ["one", "requirements", "two"]


def test_an_image_is_rebuilt_for_changed_inputs_and_not_for_a_wheel_built_again(tmp_path: Path) -> None:
    write(tmp_path, one="1")
    write(tmp_path / "two", inner="2")
    write(tmp_path / "requirements", **{"operator.txt": "a==1"})
    write(tmp_path / "two" / "__pycache__", junk="x")
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(DOCKERFILE)

    def wheel(year: int, text: str) -> None:
        with zipfile.ZipFile(tmp_path / "two" / "a.whl", "w") as archive:
            archive.writestr(zipfile.ZipInfo("a.py", (year, 1, 1, 0, 0, 0)), text)

    wheel(2020, "x = 1")
    key = images.image_key(tmp_path, dockerfile, "base")
    wheel(2024, "x = 1")
    write(tmp_path / "two" / "__pycache__", junk="y")
    write(tmp_path, untaken="z")
    assert images.image_key(tmp_path, dockerfile, "base") == key
    assert images.image_key(tmp_path, dockerfile, "other base") != key
    wheel(2024, "x = 2")
    assert images.image_key(tmp_path, dockerfile, "base") != key


def test_an_input_that_is_missing_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="make wheels"):
        images.source_files(tmp_path, ["build/wheels"])


def test_pip_gets_the_machines_certificates_and_the_wheelhouse_only_when_there_are_any() -> None:
    assert "cert" not in buildah.render_pip_configuration({}, wheels=False)
    assert "no-index" not in buildah.render_pip_configuration({"SSL_CERT_FILE": "/x"}, wheels=False)
    full = buildah.render_pip_configuration({"PIP_CERT": "/x"}, wheels=True)
    assert "cert = /wheelhouse/ca.crt\n" in full
    assert "find-links = /wheelhouse\nno-index = true\n" in full


def test_the_pause_archive_is_an_image_of_one_program() -> None:
    with tarfile.open(fileobj=io.BytesIO(render_image(b"program", "localhost/p:dev"))) as archive:
        manifest = json.loads(archive.extractfile("manifest.json").read())[0]  # type: ignore[union-attr]
        assert manifest["RepoTags"] == ["localhost/p:dev"]
        image = json.loads(archive.extractfile(manifest["Config"]).read())  # type: ignore[union-attr]
        assert image["config"]["Entrypoint"] == ["/pause"]
    assert render_image(b"program", "t") == render_image(b"program", "t")


def test_the_metadata_distribution_has_the_cpu_version() -> None:
    files = render_distribution("0.32.0+cpu")
    assert "Version: 0.32.0+cpu\n" in files["vllm-0.32.0+cpu.dist-info/METADATA"]
    assert files["vllm-0.32.0+cpu.dist-info/RECORD"].count("\n") == len(files)


def test_containers_get_the_engine_read_only_and_no_small_file_limit() -> None:
    default = {
        "process": {"rlimits": [{"type": "RLIMIT_NOFILE"}], "cwd": "/"},
        "mounts": [{"destination": "/proc"}],
    }
    spec = config.render_base_runtime_spec(default, Path("/state/vllm"))
    assert spec["mounts"][-1]["destination"] == "/opt/vllm"
    assert spec["mounts"][-1]["source"] == "/state/vllm"
    assert "ro" in spec["mounts"][-1]["options"]
    assert "rlimits" not in spec["process"]
    assert "rlimits" in default["process"]
    assert config.render_base_runtime_spec(spec | {"process": {}}, Path("/state/vllm"))["mounts"] == spec["mounts"]


def test_a_nodes_network_is_its_own_range_on_our_bridge() -> None:
    rendered = json.loads(config.render_cni("10.88.2.1", "10.88.2.254", Path("/pool")))
    plugin = rendered["plugins"][0]
    assert (plugin["bridge"], plugin["ipMasq"], plugin["hairpinMode"]) == ("rolloutfleet0", False, True)
    assert plugin["ipam"]["ranges"][0][0] == {
        "subnet": "10.88.0.0/16",
        "rangeStart": "10.88.2.1",
        "rangeEnd": "10.88.2.254",
        "gateway": "10.88.0.1",
    }


def test_a_kubelet_serves_on_its_own_address_asks_who_calls_and_keeps_to_its_cgroup() -> None:
    node = Path("/s/nodes/real-1")
    rendered = config.render_kubelet(
        node, Path("/s/pki"), "real-1", Path("/s/run/c.sock"), "10.88.0.11", 10348, "/g/real-1"
    )
    assert (rendered["address"], rendered["healthzBindAddress"]) == ("10.88.0.11", "127.0.0.1")
    assert rendered["authentication"]["anonymous"] == {"enabled": False}
    assert rendered["authorization"] == {"mode": "Webhook"}
    assert rendered["cgroupRoot"] == "/g/real-1"
    assert rendered["containerRuntimeEndpoint"] == "unix:///s/run/c.sock"
    assert rendered["resolvConf"] == "/s/config/resolv.conf"
    assert rendered["makeIPTablesUtilChains"] is False
    assert yaml.safe_load(config.to_yaml(rendered)) == rendered


def test_containerd_keeps_everything_in_the_nodes_folder() -> None:
    text = config.render_containerd(
        Path("/n/root"), Path("/n/state"), Path("/r/c.sock"), Path("/n"), "/usr/lib/cni", limited=True
    )
    assert "restrict_oom_score_adj = true" in text
    assert "netns_mounts_under_state_dir = true" in text
    assert 'base_runtime_spec = "/n/base-runtime-spec.json"' in text
    assert 'Root = "/n/runc"' in text


def test_the_audit_policy_skips_reads_and_heartbeats_and_keeps_every_other_write() -> None:
    rules = config.render_audit_policy()["rules"]
    assert rules[0] == {"level": "None", "verbs": ["get", "list", "watch"]}
    assert {"level": "Metadata", "verbs": ["create", "update", "patch", "delete", "deletecollection"]} in rules
    silenced = [rule for rule in rules if "userGroups" in rule]
    assert [rule["userGroups"] for rule in silenced] == [["system:nodes", "system:serviceaccounts:kube-system"]]


def test_the_kubeconfig_carries_the_authority_and_verifies() -> None:
    document = config.render_kubeconfig("https://127.0.0.1:6443", b"PEM", "secret")
    cluster = document["clusters"][0]["cluster"]
    assert cluster == {"server": "https://127.0.0.1:6443", "certificate-authority-data": "UEVN"}


def test_dns_forwards_only_where_the_host_has_a_resolver_that_pods_can_reach() -> None:
    assert config.upstream_resolvers("nameserver 127.0.0.53\nnameserver 192.0.2.1\noptions x\nnameserver\n") == [
        "192.0.2.1"
    ]
    corefile = config.render_corefile(Path("/k"), Path("/r"), forwards=True)
    assert corefile.count("bind 10.88.0.1") == 2
    assert corefile.count("forward . /r") == 2
    assert "forward" not in config.render_corefile(Path("/k"), Path("/r"), forwards=False)


def test_the_api_server_is_reached_on_loopback_though_it_listens_on_the_bridge() -> None:
    assert "ip daddr 127.0.0.1 tcp dport 6443 dnat to 10.88.0.1:6443" in render_nft_table()


def test_tokens_name_users_and_groups() -> None:
    lines = render_token_file(dict.fromkeys(USERS, "t")).splitlines()
    assert 't,rolloutfleet-admin,admin,"system:masters"' in lines
    assert 't,system:node:real-0,kubelet-real-0,"system:nodes"' in lines
    assert "t,system:kube-scheduler,scheduler" in lines


@pytest.mark.parametrize(
    ("template", "index", "value"),
    [
        ("rack-{i/8}", 17, "rack-2"),
        ("slot-{i%8}", 17, "slot-1"),
        ("n{i}", 3, "n3"),
        ("plain", 3, "plain"),
        ("{x}", 1, "{x}"),
    ],
)
def test_labels_of_fake_nodes_follow_their_index(template: str, index: int, value: str) -> None:
    assert kwok.expand(template, index) == value


def test_a_fake_node_has_what_was_asked_for() -> None:
    labels = kwok.parse_labels(["example.com/rack=r{i/2}"])
    node = kwok.render_node("gb200", 5, labels, 4, [kwok.parse_taint("fake=yes:NoSchedule")])
    assert node["metadata"]["name"] == "gb200-005"
    assert node["metadata"]["labels"]["example.com/rack"] == "r2"
    assert node["metadata"]["annotations"]["kwok.x-k8s.io/node"] == "fake"
    assert node["status"]["allocatable"]["nvidia.com/gpu"] == "4"
    assert node["spec"]["taints"] == [{"key": "fake", "effect": "NoSchedule", "value": "yes"}]
    assert "nvidia.com/gpu" not in kwok.render_node("cpu", 0, {}, 0, [])["status"]["capacity"]


@pytest.mark.parametrize("text", ["", "key", "=value"])
def test_a_malformed_label_is_refused(text: str) -> None:
    with pytest.raises(LauncherError, match="KEY=VALUE"):
        kwok.parse_labels([text])


@pytest.mark.parametrize("text", ["key", "key=value", "key:Never", ":NoSchedule"])
def test_a_malformed_taint_is_refused(text: str) -> None:
    with pytest.raises(LauncherError, match="NoSchedule"):
        kwok.parse_taint(text)


def test_a_division_by_zero_in_a_label_is_refused() -> None:
    with pytest.raises(LauncherError, match="divides by zero"):
        kwok.expand("{i/0}", 1)


def test_tables_line_up_and_ages_are_short() -> None:
    assert render_table([["A", "B"], ["long", "x"]]) == "A     B\nlong  x"
    assert [describe_age(s) for s in (5, 65, 7200, 200000)] == ["5s", "1m", "2h", "2d"]
