"""From the process group that a trainer gives to connections between rank 0 and every other rank.

The group is used for one broadcast, which says where rank 0 listens; so its backend does not matter, later messages never wait behind a
collective, and the end of a process shows at once as the end of its connection.
"""

import hmac
import json
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel, ConfigDict

from rolloutfleet.errors import DeadlineExceeded, TeamLost
from rolloutfleet.routing import local_address_towards
from rolloutfleet.team.links import Follower, Leader, Link, Team
from rolloutfleet.team.messages import Hello, Welcome

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ADDRESS_BYTES: Final = 2048
HELLO_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 0.05


class Meeting(BaseModel):
    """Where rank 0 listens, and the word by which members know each other."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: tuple[str, ...]
    port: int
    secret: str


def form_team(group: "ProcessGroup | None", towards: tuple[str, int], timeout: float) -> Team:
    """This process's end of the team, once every rank of the group has called this; a leader of nobody for None or a group of one.

    ``towards`` is the fleet's host and port: the local address that routes there is the first at which rank 0 is sought.
    Raises TeamLost naming the ranks that did not come within ``timeout`` seconds.
    """
    if group is None:
        return Leader()
    import torch.distributed as dist

    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(
            "team= is a process group of which this process is no member; call connect() on its members only"
        )
    if ranks == 1:
        return Leader()
    deadline = time.monotonic() + timeout
    if rank > 0:
        return join_leader(_share_meeting(group, None, timeout), rank, deadline)
    with closing(_listen(ranks)) as listening:
        meeting = Meeting(
            hosts=tuple(_own_addresses(towards)), port=listening.getsockname()[1], secret=secrets.token_hex(16)
        )
        _share_meeting(group, meeting, timeout)
        return gather_followers(listening, meeting.secret, ranks, deadline)


def gather_followers(listening: socket.socket, secret: str, ranks: int, deadline: float) -> Leader:
    """Rank 0's end, once ranks 1 to ``ranks - 1`` have connected and said the secret; TeamLost, for all of them, when one does not."""
    links: dict[int, Link] = {}
    try:
        _await_hellos(links, listening, secret, ranks, deadline)
        for link in links.values():
            link.send(Welcome(ranks=ranks))
    except TeamLost:
        for link in links.values():
            link.close()
        raise
    return Leader(links)


def _await_hellos(links: dict[int, Link], listening: socket.socket, secret: str, ranks: int, deadline: float) -> None:
    while len(links) < ranks - 1:
        listening.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            connection, _ = listening.accept()
        except TimeoutError as error:
            missing = ", ".join(str(rank) for rank in range(1, ranks) if rank not in links)
            raise TeamLost(
                f"of the trainer's {ranks} ranks, rank {missing} did not connect to rank 0 in time"
            ) from error
        link = Link(connection, -1)
        rank = _greeted(link, secret, ranks, deadline)
        if rank is None or rank in links:
            link.close()
            continue
        link.peer = rank
        links[rank] = link


def join_leader(meeting: Meeting, rank: int, deadline: float) -> Follower:
    """Another rank's end, from the first of rank 0's addresses at which it is met."""
    reasons: dict[str, str] = {}
    while True:
        for host in meeting.hosts:
            try:
                link = Link(socket.create_connection((host, meeting.port), HELLO_SECONDS), 0)
            except OSError as error:
                reasons[host] = str(error)
                continue
            try:
                link.send(Hello(rank=rank, secret=meeting.secret))
                welcome = link.receive(deadline)
                if isinstance(welcome, Welcome):
                    return Follower(link, rank, welcome.ranks)
            except (TeamLost, DeadlineExceeded) as error:
                reasons[host] = str(error)
            link.close()
        if time.monotonic() >= deadline:
            where = "; ".join(f"{host}:{meeting.port} ({reason})" for host, reason in reasons.items())
            raise TeamLost(f"trainer rank {rank} did not reach rank 0 at {where}")
        time.sleep(_RETRY_SECONDS)


def _greeted(link: Link, secret: str, ranks: int, deadline: float) -> int | None:
    try:
        hello = link.receive(min(deadline, time.monotonic() + HELLO_SECONDS))
    except (TeamLost, DeadlineExceeded):
        return None
    known = isinstance(hello, Hello) and hmac.compare_digest(hello.secret, secret) and 0 < hello.rank < ranks
    return hello.rank if known and isinstance(hello, Hello) else None


def _share_meeting(group: "ProcessGroup", meeting: Meeting | None, timeout: float) -> Meeting:
    """What rank 0 gives, on every rank."""
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if "gloo" not in str(dist.get_backend_config(group)):
        device = torch.device("cuda", torch.cuda.current_device())
    text = (meeting.model_dump_json() if meeting is not None else "").encode().ljust(ADDRESS_BYTES)
    words = torch.tensor(list(text), dtype=torch.uint8, device=device)
    try:
        work = dist.broadcast(words, group=group, group_src=0, async_op=True)
        if work is not None:
            work.wait(timedelta(seconds=timeout))
    except RuntimeError as error:
        raise TeamLost(
            f"the process group given as team= did not carry rank 0's address within {timeout:g} s; connect() must be called on all of its "
            f"ranks ({error})"
        ) from error
    return Meeting.model_validate(json.loads(bytes(words.tolist())))


def _listen(ranks: int) -> socket.socket:
    """A socket on every address of this machine: which of them other ranks reach is not known yet."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # where the kernel has IPv6 switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=ranks, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=ranks)


def _own_addresses(towards: tuple[str, int]) -> Iterator[str]:
    """Addresses at which other ranks may find this process, each once, the most likely one first."""
    found: list[str] = []
    for address in (*_routed(towards), *_named(), "127.0.0.1"):
        if address not in found:
            found.append(address)
            yield address


def _routed(towards: tuple[str, int]) -> Sequence[str]:
    try:
        return (local_address_towards(*towards),)
    except OSError:
        return ()


def _named() -> Sequence[str]:
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    except OSError:
        return ()
