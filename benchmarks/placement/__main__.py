"""How fast the planner is, how near to the optimum, and how many engines it places beside other rules.

By hand: ``make bench-placement``; ``TINY=1`` rehearses with fewer cases and leaves the result files alone.
"""

import gc
import random
import sys
import tempfile
import time
from collections import Counter
from operator import mul
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar, draw_bars
from benchmarks.placement.clusters import make_arrivals, make_fleet, make_nodes
from benchmarks.placement.exact import Optimum, solve_exactly
from benchmarks.placement.instances import make_case
from benchmarks.placement.rules import Rule, Score, place
from benchmarks.placement.weighed import Weighed, weigh
from benchmarks.record import RESULTS, TINY, Record, median, say
from rolloutfleet_operator.plan.placement.request import PlacementRequest
from rolloutfleet_operator.plan.placement.shape import Parallelism
from rolloutfleet_operator.plan.placement.solve import Limits, plan_placement

SIZES = (1000, 10_000) if TINY else (1000, 10_000, 50_000)
INSTANCES = 40 if TINY else 500
CLUSTERS = 3 if TINY else 30
FILLS = (60, 80, 95)
EXACT_SECONDS = 120.0
STEPS = (0.0, 2.0, 5.0, 10.0, 25.0, 100.0)
"""Upper ends of the classes of the distribution, in percent."""


def demands(nodes: int) -> dict[str, list[PlacementRequest]]:
    """What is asked of a cluster of so many nodes: a tenth as many engines of two pods each, and more than there is."""
    engines, two_pods = nodes // 10, Parallelism(8, 2)
    return {
        "one fleet": [make_fleet("a", engines, two_pods)],
        "ten fleets": [
            make_fleet(f"f{index}", engines // 10, sizes)
            for index, sizes in enumerate(
                [two_pods, Parallelism(4), Parallelism(8), Parallelism(4, 1, 16), Parallelism(2)] * 2
            )
        ],
        "more than fits": [make_fleet("a", nodes, two_pods)],
    }


def measure_seconds(record: Record) -> None:
    """Seconds of one plan, from facts to ranks' order, on one core."""
    slowest: dict[int, float] = {}
    for nodes in SIZES:
        cluster = make_nodes(nodes, random.Random(nodes), held=0.4)
        for name, requests in demands(nodes).items():
            seconds, placed = [], 0
            for _ in range(3):
                gc.collect()
                began = time.perf_counter()
                plan = plan_placement(cluster, requests)
                seconds.append(time.perf_counter() - began)
                placed = sum(len(fleet.engines) for fleet in plan.fleets)
            record.add(
                part="seconds", nodes=nodes, demand=name, engines=placed, seconds=[round(each, 4) for each in seconds]
            )
            say(f"{nodes} nodes, {name}: {placed} engines in {median(seconds):.3f} s")
            if name != "more than fits":
                slowest[nodes] = max(slowest.get(nodes, 0.0), median(seconds))
    for nodes, value in slowest.items():
        record.figure(f"seconds_{nodes // 1000}k_nodes_{_short(nodes // 10)}_engines", round(value, 4))


def _short(count: int) -> str:
    return f"{count // 1000}k" if count >= 1000 else str(count)


EFFORTS = {
    "planner": Limits(),
    "without search": Limits(exact_nodes=0),
    "first way alone": Limits(exact_nodes=0, several_nodes=0),
}
"""What clusters of up to 48 nodes get, of up to 2000, and larger ones."""


def measure_gap(record: Record) -> None:
    """GPUs left in whole domains beside CP-SAT's optimum, with all that the planner does and with what larger clusters get of it.

    The gap is that of instances with as many engines in as many pods; the others are counted.
    """
    pairs: dict[str, list[tuple[Weighed, Optimum]]] = {name: [] for name in EFFORTS}
    wrong, unproved = 0, 0
    for seed in range(INSTANCES):
        case = make_case(seed)
        best = solve_exactly(case, EXACT_SECONDS)
        found = {name: weigh(case, limits) for name, limits in EFFORTS.items()}
        unproved += not best.proved
        wrong += any(each.certain and each.engines < best.engines for each in found.values())
        counts = {name: _said(each) for name, each in found.items()}
        record.add(part="gap", seed=seed, proved=best.proved, optimum=_said(best), **counts)
        if best.proved:
            for name, each in found.items():
                pairs[name].append((each, best))
    for name, compared in pairs.items():
        suffix = "" if name == "planner" else f": {name}"
        alike = [(ours, best) for ours, best in compared if (ours.engines, ours.pods) == (best.engines, best.pods)]
        also = {
            "distribution": _distribution(alike),
            "fewer engines": sum(ours.engines < best.engines for ours, best in compared),
            "more pods": sum(ours.engines == best.engines and ours.pods > best.pods for ours, best in compared),
        }
        record.figures[f"gap{suffix}"] = also
        record.figure(f"gap_to_optimum_percent{suffix}", _total_gap(alike), **also)
    record.figure("instances", INSTANCES)
    record.figure("instances_without_a_proved_optimum", unproved)
    record.figure("feasible_called_infeasible", wrong)


def _said(result: Weighed | Optimum) -> str:
    return f"{result.engines} engines, {result.pods} pods, {result.whole} GPUs in whole domains"


def _total_gap(pairs: list[tuple[Weighed, Optimum]]) -> float:
    best = sum(optimum.whole for _, optimum in pairs)
    return round(100 * (best - sum(each.whole for each, _ in pairs)) / best, 4)


def _distribution(pairs: list[tuple[Weighed, Optimum]]) -> dict[str, int]:
    """Instances by gap in percent of the optimum."""
    counts: Counter[str] = Counter()
    for each, optimum in pairs:
        gap = 100 * (optimum.whole - each.whole) / max(1, optimum.whole)
        upper = next(step for step in STEPS if gap <= step)
        counts["none" if not upper else f"at most {upper:g} %"] += 1
    return {name: counts[name] for name in ("none", *(f"at most {step:g} %" for step in STEPS[1:]))}


def measure_fill(record: Record) -> None:
    """Whole engines placed of the same fleets, on the same clusters of 256 nodes, by each rule; and the GPUs of those engines."""
    contenders = [(rule, score) for rule in Rule for score in Score if rule is not Rule.PLANNER or score is Score.LEAST]
    for fill in FILLS:
        placed: Counter[str] = Counter()
        gpus: Counter[str] = Counter()
        for seed in range(CLUSTERS):
            arrivals = make_arrivals(seed, fill / 100)
            sizes = [fleet.parallelism.world for fleet in arrivals.fleets]
            counts = {_name(rule, score): place(arrivals, rule, score, seed) for rule, score in contenders}
            counts["wanted"] = [fleet.replicas for fleet in arrivals.fleets]
            placed.update({name: sum(engines) for name, engines in counts.items()})
            gpus.update({name: sum(map(mul, engines, sizes)) for name, engines in counts.items()})
            record.add(part="fill", fill=fill, seed=seed, engines={name: sum(each) for name, each in counts.items()})
        for name in (_name(*contender) for contender in contenders):
            for what, count in (("engines", placed), ("gpus", gpus)):
                share = round(100 * count[name] / count["wanted"], 2)
                record.figure(f"{what}_placed_percent_at_{fill}_percent_fill: {name}", share)
        leaders = max(placed[_name(Rule.LEADER_FIRST, score)] for score in Score)
        record.figure(
            f"placed_vs_leader_first_at_{fill}_percent_fill",
            round(placed[_name(Rule.PLANNER, Score.LEAST)] / leaders, 4),
        )


def _name(rule: Rule, score: Score) -> str:
    return "planner" if rule is Rule.PLANNER else f"{rule.value}, {score.value}"


def draw(figures: dict[str, Any]) -> str:
    """Engines placed, by fill and rule."""
    bars = []
    for fill in FILLS:
        prefix = f"engines_placed_percent_at_{fill}_percent_fill: "
        for key, value in figures.items():
            if key.startswith(prefix):
                name = key.removeprefix(prefix)
                bars.append(Bar(f"{fill} %: {name}", value, ours=name == "planner"))
    return draw_bars(
        "Engines placed of those wanted, by fill (other rules are simulated)",
        "%",
        bars,
    )


def main() -> int:
    """0, or 1 when a part failed."""
    folder = Path(tempfile.mkdtemp()) if TINY else RESULTS
    record = Record("placement", folder / "placement.json")
    for part in (measure_seconds, measure_fill, measure_gap):
        with record.part(part.__name__):
            part(record)
    if not record.failures:
        (folder / "placement.svg").write_text(draw(record.figures))
        say(f"wrote {record.path} and {folder / 'placement.svg'}")
    return record.exit_code


if __name__ == "__main__":
    sys.exit(main())
