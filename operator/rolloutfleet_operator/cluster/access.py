"""What the operator must be allowed to do, and the checks at start that it is.

The chart's roles grant exactly this list; a missing entry ends the process with a message that names all that is missing.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rolloutfleet.contract.names import GROUP
from rolloutfleet_operator import naming
from rolloutfleet_operator.cluster.gateway import Gateway
from rolloutfleet_operator.errors import NotFoundError, SetupError

RBAC_GROUP: Final = "rbac.authorization.k8s.io"


@dataclass(frozen=True, slots=True)
class Rule:
    """Verbs on one resource, spelled as a Role spells them (``weightsyncs/status``)."""

    group: str
    resource: str
    verbs: tuple[str, ...]


_APPLIED: Final = ("create", "get", "list", "patch", "watch")

FLEET_RULES: Final[tuple[Rule, ...]] = (
    Rule("", "configmaps", _APPLIED),
    Rule("", "events", ("create",)),
    Rule("", "pods", ("create", "delete", "get", "list", "watch")),
    Rule("", "secrets", ("create", "get", "patch")),
    Rule("", "serviceaccounts", _APPLIED),
    Rule("", "services", _APPLIED),
    Rule("batch", "jobs", ("create", "delete", "get", "list", "watch")),
    Rule(naming.COMPUTE_DOMAIN_GROUP, "computedomains", ("create", "get")),
    Rule(RBAC_GROUP, "rolebindings", _APPLIED),
    Rule(RBAC_GROUP, "roles", _APPLIED),
    Rule(GROUP, naming.FLEET_PLURAL, ("get", "list", "patch", "watch")),
    Rule(GROUP, f"{naming.FLEET_PLURAL}/finalizers", ("update",)),
    Rule(GROUP, f"{naming.FLEET_PLURAL}/status", ("get", "patch")),
    Rule(GROUP, naming.SYNC_PLURAL, (*_APPLIED[:1], "delete", *_APPLIED[1:])),
    Rule(GROUP, f"{naming.SYNC_PLURAL}/status", ("get", "patch")),
)
"""In every namespace that is served."""

LEASE_RULES: Final[tuple[Rule, ...]] = (Rule("coordination.k8s.io", "leases", ("create", "get", "update")),)
"""In the Lease's namespace."""

NODE_RULES: Final[tuple[Rule, ...]] = (Rule("", "nodes", ("list", "watch")),)
"""In the cluster; a namespaced operator does without, and leaves placement to the scheduler alone."""


async def check_served(gateway: Gateway) -> None:
    """Returns when the API server serves both kinds with their status.

    Raises:
        SetupError: names what is not served.
    """
    needed = {plural + tail for plural in (naming.FLEET_PLURAL, naming.SYNC_PLURAL) for tail in ("", "/status")}
    try:
        answer = await gateway.call("GET", f"/apis/{naming.API_VERSION}", naming.API_VERSION)
    except NotFoundError:
        answer = {"resources": []}
    missing = sorted(needed - {resource["name"] for resource in answer["resources"]})
    if missing:
        raise SetupError(
            f"the API server does not serve {', '.join(missing)} of {naming.API_VERSION}: install the CRDs (folder crds/)"
        )


async def check_access(gateway: Gateway, namespaces: Sequence[str], lease_namespace: str) -> bool:
    """Whether nodes may be read; everything else is required.

    Raises:
        SetupError: lists every verb that is missing, and where.
    """
    wanted = [(namespace, rule) for namespace in (namespaces or ("",)) for rule in FLEET_RULES]
    wanted += [(lease_namespace, rule) for rule in LEASE_RULES]
    missing = await _denied(gateway, wanted)
    denied_nodes = await _denied(gateway, [("", rule) for rule in NODE_RULES])
    if not namespaces:
        missing += denied_nodes
    if missing:
        raise SetupError("the operator's service account lacks these permissions: " + "; ".join(sorted(missing)))
    return not denied_nodes


async def _denied(gateway: Gateway, wanted: Iterable[tuple[str, Rule]]) -> list[str]:
    questions = [(namespace, rule, verb) for namespace, rule in wanted for verb in rule.verbs]
    answers = await asyncio.gather(*(_allowed(gateway, *question) for question in questions))
    return [
        f"{verb} {rule.resource}{f'.{rule.group}' if rule.group else ''} {f'in namespace {namespace}' if namespace else 'in the cluster'}"
        for (namespace, rule, verb), allowed in zip(questions, answers, strict=True)
        if not allowed
    ]


async def _allowed(gateway: Gateway, namespace: str, rule: Rule, verb: str) -> bool:
    resource, _, subresource = rule.resource.partition("/")
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {
            "resourceAttributes": {
                "group": rule.group,
                "namespace": namespace,
                "resource": resource,
                "subresource": subresource,
                "verb": verb,
            }
        },
    }
    answer = await gateway.call(
        "POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", "access review", body=review
    )
    return bool(answer["status"].get("allowed"))
