"""What a pod says of nodes: which it keeps off, which others it keeps away, and how long it stays on one that is lost."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any, Final

from rolloutfleet_operator.api.podparts import Toleration

NODE_LOSS_TAINTS: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_HOST: Final = "kubernetes.io/hostname"
_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"


def node_loss_tolerations(given: Iterable[Toleration], seconds: int) -> list[dict[str, Any]]:
    """Tolerations for a node that is lost, for those taints that the given ones leave to us; Kubernetes would wait five minutes."""
    given = list(given)
    return [
        {"effect": "NoExecute", "key": key, "operator": "Exists", "tolerationSeconds": seconds}
        for key in NODE_LOSS_TAINTS
        if not any(_tolerates(toleration, key) for toleration in given)
    ]


def _tolerates(toleration: Toleration, key: str) -> bool:
    return (toleration.key or key) == key and toleration.effect in (None, "NoExecute")


def avoid_nodes(affinity: Mapping[str, Any] | None, nodes: Iterable[str]) -> dict[str, Any]:
    """The affinity, by which none of the nodes is taken: said in each of its terms, for one that holds is enough.

    A field may be compared with one value only, so each node has a rule of its own.
    """
    rules = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in sorted(nodes)]
    kept: dict[str, Any] = deepcopy(dict(affinity or {}))
    if not rules:
        return kept
    node_affinity = kept.setdefault("nodeAffinity", {})
    terms = node_affinity.get(_REQUIRED, {}).get("nodeSelectorTerms")
    node_affinity[_REQUIRED] = {
        "nodeSelectorTerms": [_with_rules(term, rules) for term in terms] if terms else [{"matchFields": rules}]
    }
    return kept


def keep_apart(affinity: Mapping[str, Any] | None, labels: Mapping[str, str]) -> dict[str, Any]:
    """The affinity, by which no node takes two pods that carry these labels."""
    kept: dict[str, Any] = deepcopy(dict(affinity or {}))
    terms = kept.setdefault("podAntiAffinity", {}).setdefault(_REQUIRED, [])
    terms.append({"labelSelector": {"matchLabels": dict(sorted(labels.items()))}, "topologyKey": _HOST})
    return kept


def _with_rules(term: Mapping[str, Any], rules: list[dict[str, Any]]) -> dict[str, Any]:
    """A term without a rule matches no node, and one that gets ours would match all the others."""
    if not term.get("matchFields") and not term.get("matchExpressions"):
        return dict(term)
    return {**term, "matchFields": [*term.get("matchFields", ()), *rules]}
