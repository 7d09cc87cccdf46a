"""Reads fleets and what belongs to them from the Kubernetes API."""

import os
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import urllib3
import yaml
from kubernetes import client, config

from rolloutfleet.cli.arguments import Options
from rolloutfleet.cli.failure import Failure
from rolloutfleet.cli.mending_arguments import ReviveOptions
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

    def __init__(self, options: Options | ReviveOptions) -> None:
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
            fleets = [_named(fleets, options.fleet, namespace)]
        if not fleets:
            return []
        syncs = self._list("weightsyncs", namespace)
        pods = self._pods(namespace)
        return [_gather(fleet, syncs, pods) for fleet in sorted(fleets, key=_key)]

    def fleet(self, name: str, namespace: str) -> Object:
        """The fleet of this name; Failure as :meth:`fleets`."""
        return _named(self._list("rolloutfleets", namespace), name, namespace)

    def annotate(self, name: str, namespace: str, key: str, value: str) -> None:
        """Gives a fleet's annotation this value; Failure when the API cannot be reached or refuses."""
        try:
            self._custom.patch_namespaced_custom_object(
                GROUP,
                VERSION,
                namespace,
                "rolloutfleets",
                name,
                {"metadata": {"annotations": {key: value}}},
                _content_type="application/merge-patch+json",
                _request_timeout=_SECONDS,
            )
        except client.ApiException as error:
            raise Failure(_explain(error, "rolloutfleets", namespace, "patch")) from error
        except urllib3.exceptions.HTTPError as error:
            raise Failure(_no_answer(self._api, error)) from error

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
            raise Failure(_no_answer(self._api, error)) from error
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
            raise Failure(_no_answer(self._api, error)) from error
        return [self._api.sanitize_for_serialization(pod) for pod in answer.items]


def _named(fleets: list[Object], name: str, namespace: str) -> Object:
    found = next((fleet for fleet in fleets if fleet["metadata"]["name"] == name), None)
    if found is not None:
        return found
    names = sorted(fleet["metadata"]["name"] for fleet in fleets)
    others = f"there are: {_some(names)}" if names else "there is none. Look for it with: rolloutfleet status -A"
    raise Failure(f"no fleet {name} in namespace {namespace}; {others}")


def _some(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


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


def _connect(options: Options | ReviveOptions) -> tuple[Any, str]:
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
    except (config.ConfigException, OSError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise Failure(
            f"no usable kubeconfig: {reason}. Set KUBECONFIG, pass --kubeconfig, or see `kubectl config get-contexts`"
        ) from error
    return api, active["context"].get("namespace", "default")


def _no_answer(api: Any, error: urllib3.exceptions.HTTPError) -> str:
    cause = error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason else error
    address = api.configuration.host
    return f"the API server {address} does not answer: {str(cause).partition(': ')[2] or cause}. See `kubectl version`"


def _explain(error: client.ApiException, plural: str, namespace: str, verb: str = "list") -> str:
    resource = plural if plural == "pods" else f"{plural}.{GROUP}"
    place = f"in namespace {namespace}" if namespace else "in all namespaces"
    if error.status == HTTPStatus.FORBIDDEN:
        advice = f"kubectl auth can-i {verb} {resource}" + (f" -n {namespace}" if namespace else " -A")
        return f"you may not {verb} {plural} {place}; ask for that right, or name a namespace with -n. Check with: {advice}"
    if error.status == HTTPStatus.UNAUTHORIZED:
        return "the API server does not accept the kubeconfig's credentials; log in again"
    if error.status == HTTPStatus.NOT_FOUND:
        return f"this cluster has no {resource}: is the operator installed? See `kubectl get crds`"
    return f"the API server refused to {verb} {plural} {place}: {error.status} {error.reason}"
