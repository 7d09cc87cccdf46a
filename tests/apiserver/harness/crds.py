"""Kinds come to a cluster and leave it."""

from collections.abc import Iterable
from pathlib import Path

import yaml

from apiserver.harness.api import Body, Cluster
from apiserver.harness.process import CRD_FOLDER

CRD_NAMES = ("rolloutfleets.rolloutfleet.io", "weightsyncs.rolloutfleet.io")


def install_crds(cluster: Cluster) -> None:
    """Applies ``crds/`` and returns once both kinds are served."""
    apply_crds(cluster, sorted(CRD_FOLDER.glob("rolloutfleet.io_*.yaml")))


def apply_crds(cluster: Cluster, files: Iterable[Path]) -> None:
    """Applies the definitions in these files and returns once all of them are served."""
    for file in files:
        manifest = yaml.safe_load(file.read_text())
        cluster.apply(manifest, "apiserver-tier")
        name = manifest["metadata"]["name"]
        cluster.wait("the kind is served", "CustomResourceDefinition", "", _established, name=name)


def remove_crds(cluster: Cluster, names: Iterable[str] = CRD_NAMES) -> None:
    """Deletes these kinds and whatever there is of them, and returns once they are gone."""
    for name in names:
        cluster.delete("CustomResourceDefinition", "", name)
        cluster.await_gone("CustomResourceDefinition", "", name)


def _established(state: dict[str, Body]) -> bool:
    conditions = (c for body in state.values() for c in body.get("status", {}).get("conditions") or ())
    return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)
