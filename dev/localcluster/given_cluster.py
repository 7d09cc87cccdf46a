"""A cluster that the user brings along in KUBECONFIG: used as it is, and never one that looks like production."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from localcluster.errors import LauncherError
from localcluster.paths import Paths

ALLOW_VARIABLE = "ROLLOUTFLEET_ALLOW_CONTEXT"
_WORDS = re.compile(r"(?<![a-z])(prod|prd|production|live)(?![a-z])")
_CLOUD_CONTEXT = re.compile(r"^(gke_|arn:aws:eks:|arn:aws-cn:eks:)|\.eksctl\.io$")
_CLOUD_SERVERS = (
    ".azmk8s.io",
    ".containers.appdomain.cloud",
    ".containers.cloud.ibm.com",
    ".eks.amazonaws.com",
    ".eks.amazonaws.com.cn",
    ".gke.goog",
    ".k8s.ondigitalocean.com",
    ".k8s.scw.cloud",
    ".linodelke.net",
    ".openshiftapps.com",
    ".oraclecloud.com",
    ".ovh.net",
    ".vultr-k8s.com",
)


@dataclass(frozen=True, slots=True)
class GivenCluster:
    """The current context of the user's kubeconfig."""

    kubeconfig: str
    context: str
    cluster: str
    server: str
    user: str


def read_kubeconfig(value: str) -> GivenCluster:
    """The current context of KUBECONFIG (one file, or several joined by `:`, the first word winning).

    Raises LauncherError when a file is missing or broken, or when the context does not resolve.
    """
    files = [Path(part) for part in value.split(os.pathsep) if part]
    documents = [_load(file) for file in files if file.exists()]
    if not documents:
        raise LauncherError(f"KUBECONFIG={value}: no such file; unset KUBECONFIG to have a local cluster built")
    context = next((str(d["current-context"]) for d in documents if d.get("current-context")), "")
    if not context:
        raise LauncherError(f"KUBECONFIG={value} has no current-context; choose one: kubectl config use-context NAME")
    found = _entry(documents, "contexts", context, value)["context"]
    cluster = str(found.get("cluster", ""))
    server = str(_entry(documents, "clusters", cluster, value)["cluster"].get("server", ""))
    return GivenCluster(value, context, cluster, server, str(found.get("user", "")))


def _load(file: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise LauncherError(f"{file} is not YAML: {error}") from error
    if not isinstance(document, dict):
        raise LauncherError(f"{file} is not a kubeconfig: it holds {type(document).__name__}, not a mapping")
    return document


def _entry(documents: list[dict[str, Any]], section: str, name: str, value: str) -> dict[str, Any]:
    for document in documents:
        for entry in document.get(section) or []:
            if entry.get("name") == name:
                return dict(entry)
    raise LauncherError(f"KUBECONFIG={value}: {section} has no entry named {name!r}")


def production_signs(given: GivenCluster) -> list[str]:
    """Why the cluster looks like production; empty when nothing says so."""
    signs = []
    for what in ("context", "cluster", "server", "user"):
        text = str(getattr(given, what)).lower()
        match = _WORDS.search(text)
        if match:
            signs.append(f"{what} {text!r} contains {match.group(1)!r}")
    if _CLOUD_CONTEXT.search(given.context.lower()):
        signs.append(f"context {given.context!r} is named as a cloud provider names clusters")
    host = re.sub(r"^https?://", "", given.server.lower()).split("/")[0].split(":")[0]
    clouds = [suffix for suffix in _CLOUD_SERVERS if host.endswith(suffix)]
    return signs + [f"server {host!r} is a cloud provider's ({suffix})" for suffix in clouds]


def refuse_production(given: GivenCluster, allowed: str | None) -> None:
    """Raises LauncherError when the cluster looks like production and `allowed` is not exactly its context."""
    signs = production_signs(given)
    if signs and allowed != given.context:
        reasons = "\n".join(f"  {sign}" for sign in signs)
        raise LauncherError(
            f"KUBECONFIG's context {given.context!r} looks like production:\n{reasons}\n"
            f"If it is meant: --allow-context {given.context} (or {ALLOW_VARIABLE}={given.context}). "
            "To have a local cluster built instead, unset KUBECONFIG."
        )


def find_given(paths: Paths, environment: Mapping[str, str], allowed: str | None) -> GivenCluster | None:
    """The user's own cluster, checked, or None when KUBECONFIG is unset or is the local cluster's own file."""
    value = environment.get("KUBECONFIG", "")
    if not value or Path(value).absolute() == paths.kubeconfig:
        return None
    given = read_kubeconfig(value)
    refuse_production(given, allowed or environment.get(ALLOW_VARIABLE))
    return given
