"""The sums that prove a transfer: added up at trainer rank 0, which tells every worker rank what it must hold."""

from collections.abc import Sequence
from typing import Final

import torch

from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.transport.courses import Course
from rolloutfleet.transport.group import Group
from rolloutfleet.transport.routes import Route

_NAMED: Final = 8


class DigestMismatch(RuntimeError):  # noqa: N818 - reads as what happened
    """What a rank holds is not what the trainer sent; ``tensors`` names the source tensors that differ."""

    def __init__(self, tensors: tuple[str, ...]) -> None:
        self.tensors = tensors
        more = f" and {len(tensors) - _NAMED} more" if len(tensors) > _NAMED else ""
        super().__init__(
            f"digest mismatch: what arrived differs from what was sent for {', '.join(tensors[:_NAMED])}{more}; refit again"
        )


def share_sums(
    group: Group, courses: Sequence[Course], sums: torch.Tensor, trainer_ranks: int, deadline: float
) -> None:
    """On a trainer rank: adds up all ranks' ``sums`` (courses, sources, 2) in place at rank 0, which sends each audience its totals."""
    if group.rank:
        group.send(sums, 0, deadline)
        return
    parts = [torch.empty_like(sums) for _ in range(1, trainer_ranks)]
    with group.grouped(deadline):
        for other, part in enumerate(parts, 1):
            group.receive(part, other, deadline)
    for part in parts:
        sums.add_(part)
    with group.grouped(deadline):
        for course, table in zip(courses, sums, strict=True):
            if course.route is Route.BROADCAST:
                group.broadcast(table, 0, deadline)
                continue
            for rank in course.audience.ranks:
                group.send(table, rank, deadline)


def receive_sums(group: Group, course: Course, sources: int, deadline: float) -> torch.Tensor:
    """On a worker rank: the sums (sources, 2) of what it must hold."""
    table = torch.empty((sources, 2), dtype=torch.int64, device=group.device)
    if course.route is Route.BROADCAST:
        group.broadcast(table, 0, deadline)
    else:
        group.receive(table, 0, deadline)
    return table


def check_sums(manifest: Manifest, expected: torch.Tensor, held: torch.Tensor) -> None:
    """Raises DigestMismatch naming every source tensor whose sums differ."""
    wrong = (expected != held).any(dim=1).nonzero().flatten().tolist()
    if wrong:
        raise DigestMismatch(tuple(manifest.tensors[source].name for source in wrong))


__all__ = ["DigestMismatch", "check_sums", "receive_sums", "share_sums"]
