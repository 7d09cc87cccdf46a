"""A plan as a document: what ``plan -o yaml`` and ``-o json`` print, and the affinity that would pin each pod."""

from typing import Any

from rolloutfleet_operator.plan.placement.ranks import plan_ranks
from rolloutfleet_operator.plan.placement.result import FleetPlan, Plan
from rolloutfleet_operator.plan.placement.tree import Tree


def render_plan(plan: Plan, first_rank: int = 1) -> dict[str, Any]:
    """Fleets with their pods, nodes and ranks; the score; what was noticed."""
    score = plan.score
    return {
        "complete": plan.complete,
        "fleets": [_fleet(plan.tree, fleet, first_rank) for fleet in plan.fleets],
        "score": {
            "freeGpus": {"before": score.free_before, "after": score.free_after},
            "wholeGpus": [
                {"level": level.level, "before": level.before, "after": level.after, "of": level.gpus}
                for level in score.levels
            ],
            "preferencesNotKept": score.degraded,
        },
        "notes": list(plan.notes),
    }


def _fleet(tree: Tree, plan: FleetPlan, first_rank: int) -> dict[str, Any]:
    sizes = plan.request.parallelism
    pods: dict[int, list[dict[str, Any]]] = {}
    for ranks in plan_ranks(tree, plan, first_rank):
        pods.setdefault(ranks.engine, []).append(
            {
                "pod": ranks.pod,
                "node": ranks.node,
                "gpus": ranks.count,
                "ranks": [ranks.first, ranks.first + ranks.count - 1],
                "nodeAffinity": pin(ranks.node),
            }
        )
    return {
        "fleet": plan.request.fleet,
        "verdict": plan.verdict.value,
        **({"message": plan.message} if plan.message else {}),
        "parallelism": {
            "tensor": sizes.tensor,
            "pipeline": sizes.pipeline,
            "data": sizes.data,
            "expert": sizes.expert,
            "gpusPerEngine": sizes.world,
        },
        "fieldsRead": list(plan.request.fields),
        "engines": [
            {
                "engine": place.engine,
                "domain": place.domain,
                "stays": place.kept,
                **({"degraded": list(place.degraded)} if place.degraded else {}),
                "pods": pods[place.engine],
            }
            for place in plan.engines
        ],
        "missing": list(plan.missing),
        "moved": [{"engine": moved.engine, "reason": moved.reason} for moved in plan.moved],
    }


def pin(node: str) -> dict[str, Any]:
    """Node affinity that lets a pod run on one node alone, with the scheduler still checking resources and taints."""
    rule = {"key": "metadata.name", "operator": "In", "values": [node]}
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": [rule]}]}}
