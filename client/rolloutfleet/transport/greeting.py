"""The first messages of a prepared transfer: every pair of ranks that will exchange something does so once, small and compared.

That connects NCCL's peers before the first refit needs them, and finds members which would cut the stream differently.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import torch

from rolloutfleet.transport.courses import Course
from rolloutfleet.transport.group import Group
from rolloutfleet.transport.routes import Route

_BYTES: Final = 32


def greet(group: Group, courses: Iterable[Course], trainer_ranks: int, deadline: float) -> None:
    """Returns once everybody with whom this rank shares a course has the same one.

    ``courses`` are all of the group on a trainer rank, and its own on a worker. Raises ValueError naming the rank that derives another
    program, and what the group raises.
    """
    outgoing: list[tuple[int, bytes]] = []
    incoming: list[tuple[int, bytes]] = []
    collective: bytes | None = None
    team = bytes(_BYTES)
    for course in courses:
        team = bytes(a ^ b for a, b in zip(team, course.fingerprint, strict=True))
        if course.route is Route.BROADCAST:
            collective = course.fingerprint
        for frm, to in sorted(course.pairs(trainer_ranks)):
            if frm == group.rank:
                outgoing.append((to, course.fingerprint))
            elif to == group.rank:
                incoming.append((frm, course.fingerprint))
    # Trainer ranks add up their sums at rank 0, whatever the route.
    if 0 < group.rank < trainer_ranks:
        outgoing.append((0, team))
    elif group.rank == 0:
        incoming += [(other, team) for other in range(1, trainer_ranks)]
    _compare(group, outgoing, incoming, collective, deadline)


def _compare(
    group: Group,
    outgoing: list[tuple[int, bytes]],
    incoming: list[tuple[int, bytes]],
    collective: bytes | None,
    deadline: float,
) -> None:
    heard = {frm: _tensor(bytes(_BYTES), group.device) for frm, _ in incoming}
    spoken = [(to, _tensor(word, group.device)) for to, word in outgoing]
    with group.grouped(deadline):
        for to, tensor in spoken:
            group.send(tensor, to, deadline)
        for frm, tensor in heard.items():
            group.receive(tensor, frm, deadline)
    wanted = dict(incoming)
    if collective is not None:
        heard[0] = _tensor(collective, group.device)
        wanted[0] = collective
        group.broadcast(heard[0], 0, deadline)
    group.synchronize(deadline)
    _raise_unless_equal(group, wanted, {frm: bytes(tensor.tolist()) for frm, tensor in heard.items()})


def _raise_unless_equal(group: Group, wanted: Mapping[int, bytes], heard: Mapping[int, bytes]) -> None:
    for frm, word in sorted(heard.items()):
        if word != wanted[frm]:
            raise ValueError(
                f"rank {frm} derives another program than rank {group.rank} from the same layouts and holdings; both must run the same "
                "release of rolloutfleet, and no trainer rank may change what it holds between preparing and sending"
            )


def _tensor(word: bytes, device: torch.device) -> torch.Tensor:
    return torch.tensor(list(word), dtype=torch.uint8, device=device)


__all__ = ["greet"]
