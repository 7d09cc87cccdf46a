"""How good a plan is, in GPUs that stay in whole domains."""

from rolloutfleet_operator.plan.placement.result import LevelScore, Score
from rolloutfleet_operator.plan.placement.room import Room


def score_plan(before: Room, after: Room, degraded: int) -> Score:
    """The score of what is left.

    Args:
        before: without any of the planned fleets' engines.
        after: with all of them.
        degraded: preferences that are not kept.
    """
    tree = before.tree
    levels = zip(tree.levels, before.whole_gpus(), after.whole_gpus(), strict=True)
    return Score(
        levels=tuple(LevelScore(level.name, was, now, before.total[0]) for level, was, now in levels),
        free_before=before.free[0],
        free_after=after.free[0],
        degraded=degraded,
    )
