"""The word that begins a transfer: before it nobody's weights are touched, so a trainer that fails early leaves every engine as it was."""

from collections.abc import Sequence

import torch

from rolloutfleet.transport.courses import Course
from rolloutfleet.transport.group import Group
from rolloutfleet.transport.routes import Route


def open_transfer(group: Group, courses: Sequence[Course], deadline: float) -> None:
    """On trainer rank 0: tells every rank of every audience that the messages follow."""
    word = torch.ones(1, dtype=torch.uint8, device=group.device)
    with group.grouped(deadline):
        for course in courses:
            if course.route is Route.BROADCAST:
                group.broadcast(word, 0, deadline)
                continue
            for rank in course.audience.ranks:
                group.send(word, rank, deadline)


def receive_opening(group: Group, course: Course, deadline: float) -> None:
    """On a worker rank: queues the word's arrival."""
    word = torch.empty(1, dtype=torch.uint8, device=group.device)
    if course.route is Route.BROADCAST:
        group.broadcast(word, 0, deadline)
    else:
        group.receive(word, 0, deadline)


__all__ = ["open_transfer", "receive_opening"]
