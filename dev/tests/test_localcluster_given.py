"""A cluster of one's own is used; one that looks like production is refused."""

from pathlib import Path

import pytest
import yaml

from localcluster.errors import LauncherError
from localcluster.given_cluster import GivenCluster, find_given, production_signs, read_kubeconfig, refuse_production
from localcluster.paths import Paths


def given(
    context: str = "dev", cluster: str = "dev", server: str = "https://127.0.0.1:6443", user: str = "me"
) -> GivenCluster:
    return GivenCluster("/kubeconfig", context, cluster, server, user)


def kubeconfig(file: Path, context: str = "dev", server: str = "https://127.0.0.1:6443") -> Path:
    document = {
        "current-context": context,
        "contexts": [{"name": context, "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
    }
    file.write_text(yaml.safe_dump(document))
    return file


@pytest.mark.parametrize(
    "cluster",
    [
        given(context="prod"),
        given(context="eu-prod-1"),
        given(context="PRODUCTION"),
        given(cluster="team_prd"),
        given(user="live-admin"),
        given(server="https://api.prod.example.com"),
        given(server="https://prod1.example.com:6443"),
        given(context="gke_project_zone_name"),
        given(context="arn:aws:eks:eu-west-1:123456789012:cluster/test"),
        given(server="https://0123ABCD.gr7.eu-west-1.eks.amazonaws.com"),
        given(server="https://x.hcp.westeurope.azmk8s.io:443"),
    ],
)
def test_signs_of_production_are_refused_and_named(cluster: GivenCluster) -> None:
    assert production_signs(cluster)
    with pytest.raises(LauncherError, match=r"looks like production(.|\n)*--allow-context"):
        refuse_production(cluster, None)


@pytest.mark.parametrize(
    "cluster",
    [
        given(),
        given(context="kind-kind"),
        given(context="minikube"),
        given(context="product-team-dev"),
        given(context="olive-garden"),
        given(context="reproduction"),
        given(context="deliver"),
        given(server="https://10.0.0.1:6443"),
    ],
)
def test_ordinary_clusters_pass(cluster: GivenCluster) -> None:
    assert production_signs(cluster) == []
    refuse_production(cluster, None)


def test_only_exactly_the_allowed_context_passes() -> None:
    refuse_production(given(context="prod-eu"), "prod-eu")
    with pytest.raises(LauncherError):
        refuse_production(given(context="prod-eu"), "prod")


def test_the_environment_can_allow_a_context(tmp_path: Path) -> None:
    file = kubeconfig(tmp_path / "config", context="prod")
    paths = Paths(tmp_path / "cache", tmp_path / "state", tmp_path)
    with pytest.raises(LauncherError):
        find_given(paths, {"KUBECONFIG": str(file)}, None)
    found = find_given(paths, {"KUBECONFIG": str(file), "ROLLOUTFLEET_ALLOW_CONTEXT": "prod"}, None)
    assert found is not None
    assert found.context == "prod"


def test_the_local_clusters_own_kubeconfig_is_no_given_cluster(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "cache", tmp_path / "state", tmp_path)
    assert find_given(paths, {"KUBECONFIG": str(paths.kubeconfig)}, None) is None
    assert find_given(paths, {}, None) is None


def test_several_files_are_read_as_kubectl_reads_them(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.write_text(yaml.safe_dump({"current-context": "b"}))
    second = kubeconfig(tmp_path / "second", context="b", server="https://192.0.2.1:6443")
    found = read_kubeconfig(f"{first}:{tmp_path / 'absent'}:{second}")
    assert (found.context, found.server) == ("b", "https://192.0.2.1:6443")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("[]", "not a kubeconfig"), ("a: [", "not YAML"), ("{}", "no current-context"), ("current-context: x", "'x'")],
)
def test_a_broken_kubeconfig_says_what_is_wrong(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    with pytest.raises(LauncherError, match=complaint):
        read_kubeconfig(str(file))


def test_a_missing_kubeconfig_tells_the_way_to_a_local_cluster(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="unset KUBECONFIG"):
        read_kubeconfig(str(tmp_path / "absent"))
