"""What the planner knows of a node, and whether a fleet's pods may go there."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

PRODUCT_LABEL: Final = "nvidia.com/gpu.product"
_KEEPS_PODS_OFF: Final = frozenset({"NoSchedule", "NoExecute"})
_DIGITS: Final = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class Taint:
    """A node's taint, as Kubernetes has it."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"


@dataclass(frozen=True, slots=True)
class Toleration:
    """A pod's toleration; an empty key tolerates every taint, an empty effect every effect."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def tolerates(self, taint: Taint) -> bool:
        """Whether the taint is tolerated."""
        if self.effect and self.effect != taint.effect:
            return False
        if self.key and self.key != taint.key:
            return False
        return self.operator == "Exists" or (bool(self.key) and self.value == taint.value)


@dataclass(frozen=True, slots=True)
class OtherPod:
    """A pod that is not for the planner to move: who it is, and the GPUs that it holds."""

    name: str
    gpus: int


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node. GPUs are whole devices; what the planned fleets' own pods hold is not part of ``others``."""

    name: str
    gpus: int
    """Allocatable."""
    labels: Mapping[str, str] = field(default_factory=dict)
    others: tuple[OtherPod, ...] = ()
    taints: tuple[Taint, ...] = ()
    cordoned: bool = False
    ready: bool = True
    """An engine on a node that is not Ready is planned anew: whoever would wait a while says so by waiting with this."""
    quarantined: bool = False

    @property
    def product(self) -> str:
        """The kind of GPU; empty when the node does not say."""
        return self.labels.get(PRODUCT_LABEL, "")

    @property
    def usable(self) -> bool:
        """Whether any new pod may come here."""
        return self.ready and not self.cordoned and not self.quarantined

    @property
    def used_by_others(self) -> int:
        """GPUs that others hold."""
        return sum(pod.gpus for pod in self.others)

    @property
    def free(self) -> int:
        """GPUs for new pods, taints not considered."""
        return max(0, self.gpus - self.used_by_others) if self.usable else 0

    @property
    def closed_because(self) -> str:
        """Why no new pod may come here; empty when one may."""
        reasons = ((not self.ready, "not Ready"), (self.cordoned, "cordoned"), (self.quarantined, "quarantined"))
        return " and ".join(words for holds, words in reasons if holds)


@dataclass(frozen=True, slots=True)
class Rule:
    """One expression of a node affinity term."""

    key: str
    operator: str
    values: tuple[str, ...] = ()
    on_name: bool = False
    """Whether it asks for the node's name, as ``matchFields`` does, and not for a label."""

    def holds(self, node: NodeFacts) -> bool:
        """Whether the node meets the expression. An operator that Kubernetes does not know holds nowhere."""
        given = node.name if self.on_name else node.labels.get(self.key)
        match self.operator:
            case "In":
                return given is not None and given in self.values
            case "NotIn":
                return given is None or given not in self.values
            case "Exists":
                return given is not None
            case "DoesNotExist":
                return given is None
            case "Gt" | "Lt":
                if given is None or len(self.values) != 1 or not (_whole(given) and _whole(self.values[0])):
                    return False
                left, right = int(given), int(self.values[0])
                return left > right if self.operator == "Gt" else left < right
        return False


def _whole(text: str) -> bool:
    return re.fullmatch(r"-?\d+", text) is not None


@dataclass(frozen=True, slots=True)
class NodeRules:
    """What a fleet's pods ask of a node: selector, tolerations, and the terms of required affinity, one of which must hold."""

    selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    terms: tuple[tuple[Rule, ...], ...] | None = None
    """None without required affinity; a term without a rule matches no node."""

    def admits(self, node: NodeFacts) -> bool:
        """Whether pods may run on the node, cordons and other passing states aside."""
        return not self.refusal(node)

    def refusal(self, node: NodeFacts) -> str:
        """Why pods may not run there; empty when they may."""
        for key, value in sorted(self.selector.items()):
            if node.labels.get(key) != value:
                return f"nodeSelector {key}={value}"
        for taint in node.taints:
            if taint.effect in _KEEPS_PODS_OFF and not any(each.tolerates(taint) for each in self.tolerations):
                return f"taint {taint.key}" + (f"={taint.value}" if taint.value else "")
        if self.terms is not None and not any(term and all(rule.holds(node) for rule in term) for term in self.terms):
            return "node affinity"
        return ""


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key by which node-9 comes before node-10."""
    parts = _DIGITS.split(text)
    return tuple((0, int(part), part) if index % 2 else (1, 0, part) for index, part in enumerate(parts) if part)
