"""Reads fleets and what belongs to them from the Kubernetes API."""

import os
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import urllib3
from kubernetes import client, config

from rolloutfleet.cli.arguments import Options
from rolloutfleet.cli.failure import Failure
from rolloutfleet.connecting import default_namespace
from rolloutfleet.contract.names import GROUP

VERSION: Final = "v1alpha1"
_SECONDS: Final = 15.0

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FleetObjects:
    """A fleet, its weight syncs and its pods, as the API returned them; pods are None when they may not be listed."""

    fleet: Object
    weight_syncs: tuple[Object, ...]
    pods: tuple[Object, ...] | None


class Cluster:
    """A connection to one cluster's API, with the caller's own rights."""

    def __init__(self, options: Options) -> None:
        self._api, self.namespace = _connect(options)
        self._custom = client.CustomObjectsApi(self._api)
        self._core = client.CoreV1Api(self._api)

    def fleets(self, options: Options) -> list[FleetObjects]:
        """The fleets that were asked for, sorted, each with what belongs to it.

        Raises Failure when the API cannot be reached or refuses, and when the named fleet does not exist.
        """
        namespace = "" if options.all_namespaces else options.namespace or self.namespace
        fleets = self._list("rolloutfleets", namespace)
        if options.fleet is not None:
            names = [fleet["metadata"]["name"] for fleet in fleets]
            fleets = [fleet for fleet in fleets if fleet["metadata"]["name"] == options.fleet]
            if not fleets:
                raise Failure(
                    f"no fleet {options.fleet} in namespace {namespace}; "
                    + (
                        f"there are: {', '.join(sorted(names))}"
                        if names
                        else "there is none. Try -A for all namespaces"
                    )
                )
        if not fleets:
            return []
        syncs = self._list("weightsyncs", namespace)
        pods = self._pods(namespace)
        return [_gather(fleet, syncs, pods) for fleet in sorted(fleets, key=_key)]

    def _list(self, plural: str, namespace: str) -> list[Object]:
        try:
            answer: Any = (
                self._custom.list_namespaced_custom_object(GROUP, VERSION, namespace, plural, _request_timeout=_SECONDS)
                if namespace
                else self._custom.list_cluster_custom_object(GROUP, VERSION, plural, _request_timeout=_SECONDS)
            )
        except client.ApiException as error:
            raise Failure(_explain(error, plural, namespace)) from error
        except urllib3.exceptions.HTTPError as error:
            raise Failure(_no_answer(error)) from error
        return list(answer["items"])

    def _pods(self, namespace: str) -> list[Object] | None:
        selector = f"{GROUP}/fleet"
        try:
            answer = (
                self._core.list_namespaced_pod(namespace, label_selector=selector, _request_timeout=_SECONDS)
                if namespace
                else self._core.list_pod_for_all_namespaces(label_selector=selector, _request_timeout=_SECONDS)
            )
        except client.ApiException as error:
            if error.status == HTTPStatus.FORBIDDEN:
                return None
            raise Failure(_explain(error, "pods", namespace)) from error
        except urllib3.exceptions.HTTPError as error:
            raise Failure(_no_answer(error)) from error
        return [self._api.sanitize_for_serialization(pod) for pod in answer.items]


def _gather(fleet: Object, syncs: list[Object], pods: list[Object] | None) -> FleetObjects:
    namespace, name = _key(fleet)
    return FleetObjects(
        fleet=fleet,
        weight_syncs=tuple(
            sync
            for sync in sorted(syncs, key=_key)
            if sync["metadata"]["namespace"] == namespace and sync["spec"]["fleetRef"]["name"] == name
        ),
        pods=None
        if pods is None
        else tuple(
            pod
            for pod in sorted(pods, key=_key)
            if pod["metadata"]["namespace"] == namespace and pod["metadata"]["labels"].get(f"{GROUP}/fleet") == name
        ),
    )


def _key(found: Object) -> tuple[str, str]:
    return found["metadata"]["namespace"], found["metadata"]["name"]


def _connect(options: Options) -> tuple[Any, str]:
    configured = options.kubeconfig or options.context or "KUBECONFIG" in os.environ
    # The configuration helpers of the Kubernetes client carry no types.
    loading: Any = config
    # Whoever wrote insecure-skip-tls-verify into the kubeconfig knows; kubectl does not warn at each call either.
    urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    try:
        if not configured and "KUBERNETES_SERVICE_HOST" in os.environ:
            settings = client.Configuration()
            loading.load_incluster_config(settings)
            return client.ApiClient(settings), default_namespace()
        contexts, active = loading.list_kube_config_contexts(options.kubeconfig)
        if options.context is not None:
            active = next((known for known in contexts if known["name"] == options.context), active)
        api = loading.new_client_from_config(config_file=options.kubeconfig, context=options.context)
    except (config.ConfigException, OSError) as error:
        reason = str(error).rstrip(".")
        raise Failure(
            f"no usable kubeconfig: {reason}. Set KUBECONFIG, pass --kubeconfig, or see `kubectl config get-contexts`"
        ) from error
    return api, active["context"].get("namespace", "default")


def _no_answer(error: urllib3.exceptions.HTTPError) -> str:
    return f"the API server does not answer: {error}. See `kubectl version`"


def _explain(error: client.ApiException, plural: str, namespace: str) -> str:
    resource = plural if plural == "pods" else f"{plural}.{GROUP}"
    place = f"in namespace {namespace}" if namespace else "in all namespaces"
    if error.status == HTTPStatus.FORBIDDEN:
        advice = f"kubectl auth can-i list {resource}" + (f" -n {namespace}" if namespace else " -A")
        return (
            f"you may not list {plural} {place}; ask for that right, or name a namespace with -n. Check with: {advice}"
        )
    if error.status == HTTPStatus.UNAUTHORIZED:
        return "the API server does not accept the kubeconfig's credentials; log in again"
    if error.status == HTTPStatus.NOT_FOUND:
        return f"this cluster has no {resource}: is the operator installed? See `kubectl get crds`"
    return f"listing {plural} {place} failed with {error.status} {error.reason}"
