"""From what a caller knows (an address or a fleet's name, perhaps a token) to an open :class:`~rolloutfleet.fleet.Fleet`."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from rolloutfleet.channel import Channel, Target, contract_mismatch
from rolloutfleet.contract.names import CONTRACT_VERSION, SYNC_PORT, TOKEN_FILE
from rolloutfleet.contract.trainer import FleetView
from rolloutfleet.delivery import Seat
from rolloutfleet.devices import working_gpu
from rolloutfleet.errors import Unauthorized
from rolloutfleet.fleet import Fleet
from rolloutfleet.leading import LeadingTrainer
from rolloutfleet.rank import TrainerRank
from rolloutfleet.session import STORE_SECONDS, TrainerIdentity
from rolloutfleet.team import Follower, Leader, form_team
from rolloutfleet.team.crew import Crew
from rolloutfleet.team.following import FollowingTrainer
from rolloutfleet.team.messages import Begin, Connected

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ENV_TOKEN: Final = "ROLLOUTFLEET_TOKEN"  # noqa: S105 - the variable's name
ENV_NAMESPACE: Final = "ROLLOUTFLEET_NAMESPACE"
POD_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def connect(
    address: str,
    *,
    namespace: str | None = None,
    token: str | None = None,
    token_file: str | Path | None = None,
    timeout: float = 10.0,
    trainer: str = "",
    advertise: str | None = None,
    take_over: bool = False,
    team: "ProcessGroup | None" = None,
) -> Fleet:
    """A fleet that answered and accepted the token.

    ``address`` is the URL of the fleet's sync Service, or the name of a fleet in ``namespace`` (by default this pod's own, or the one in
    ROLLOUTFLEET_NAMESPACE, or ``default``). The token comes from ``token``, ``token_file``, ROLLOUTFLEET_TOKEN or
    /var/run/rolloutfleet/token, whichever is there first. ``timeout`` bounds each short call in seconds. ``trainer`` is the name shown in
    the fleet's status. ``advertise`` (``HOST`` or ``HOST:PORT``) is the address of this machine at which workers reach the trainer;
    by default the one that routes to them. ``take_over`` replaces a trainer that still holds the fleet.

    ``team`` is a ``torch.distributed`` process group of a trainer whose processes send together, each what it holds of the weights; every
    one of them calls this, and later :meth:`Fleet.refit`. Its rank 0 alone talks to the fleet about refits.

    Raises ValueError for an address that is neither, and FleetUnreachable, Unauthorized, ContractMismatch or TeamLost; in a team, all
    ranks raise what any of them does.
    """
    target = resolve_target(address, namespace)
    url = urlsplit(target.url)
    end = form_team(team, (url.hostname or "", url.port or SYNC_PORT), timeout)
    identity = TrainerIdentity(name=trainer, advertise=advertise, take_over=take_over)
    try:
        if isinstance(end, Follower):
            return _follow(end, lambda: Channel(target, find_token(target, token, token_file), timeout), timeout)
        return _lead(end, lambda: Channel(target, find_token(target, token, token_file), timeout), identity, timeout)
    except BaseException:
        end.close()
        raise


def _lead(end: Leader, open_channel: Callable[[], Channel], identity: TrainerIdentity, timeout: float) -> Fleet:
    crew = Crew(end)
    try:
        channel = open_channel()
        try:
            crew.agree(timeout)
            view = channel.get("fleet", FleetView)
            _check_contract(view, channel.target)
        except BaseException:
            channel.close()
            raise
    except BaseException as error:
        crew.failed(error)
        raise
    crew.connected(Connected(view=view))
    return Fleet(channel, view, LeadingTrainer(channel, identity, crew))


def _follow(end: Follower, open_channel: Callable[[], Channel], timeout: float) -> Fleet:
    trainer = FollowingTrainer(end, lambda begin, gpu: _take_seat(end, begin, gpu))
    try:
        channel = open_channel()
    except Exception as error:
        trainer.decline(error, timeout)
        raise
    try:
        view = trainer.await_fleet(timeout)
    except BaseException:
        channel.close()
        raise
    return Fleet(channel, view, trainer)


def _take_seat(end: Follower, begin: Begin, gpu: int | None) -> TrainerRank:
    """A seat of a rank other than 0 in a session; raises as :func:`rolloutfleet.transport.store.connect_store`."""
    from rolloutfleet.transport.store import connect_store

    store = connect_store(begin.rendezvous.host, begin.rendezvous.port, STORE_SECONDS)
    return TrainerRank(Seat(store=store, session=begin.session, rank=end.rank, ranks=end.ranks, gpu=working_gpu(gpu)))


def _check_contract(view: FleetView, target: Target) -> None:
    if view.contract_version != CONTRACT_VERSION:
        raise contract_mismatch(target.url, view.contract_version)


def resolve_target(address: str, namespace: str | None) -> Target:
    """Where the sync job of ``address`` answers; ValueError when it is neither a URL nor a fleet's name."""
    if "://" in address:
        parts = urlsplit(address)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"address {address!r} is not an http:// or https:// URL of a fleet's sync Service")
        service, _, rest = parts.hostname.partition(".")
        found = rest.partition(".")[0] if service.endswith("-sync") else ""
        fleet = service.removesuffix("-sync") if service.endswith("-sync") else "NAME"
        return Target(url=address.rstrip("/"), fleet=fleet, namespace=namespace or found or default_namespace())
    if not _LABEL.fullmatch(address) or len(address) > 63:
        raise ValueError(
            f"address {address!r} is neither a URL such as http://quickstart-sync.default:{SYNC_PORT} nor a fleet's name; "
            "a name has lower-case letters, digits and '-', and its namespace goes into namespace="
        )
    namespace = namespace or default_namespace()
    return Target(url=f"http://{address}-sync.{namespace}.svc:{SYNC_PORT}", fleet=address, namespace=namespace)


def default_namespace() -> str:
    """ROLLOUTFLEET_NAMESPACE, this pod's own namespace, or ``default``."""
    named = os.environ.get(ENV_NAMESPACE, "")
    if not named and POD_NAMESPACE_FILE.is_file():
        named = POD_NAMESPACE_FILE.read_text().strip()
    return named or "default"


def find_token(
    target: Target, token: str | None, token_file: str | Path | None, mounted: Path = Path(TOKEN_FILE)
) -> str:
    """The bearer token from the first place that has one; Unauthorized says where it could be and how to get it."""
    if token is not None:
        return _clean(token, "token=")
    if token_file is not None:
        return _clean(_read(Path(token_file)), str(token_file))
    if ENV_TOKEN in os.environ:
        return _clean(os.environ[ENV_TOKEN], ENV_TOKEN)
    if mounted.is_file():
        return _clean(_read(mounted), str(mounted))
    raise Unauthorized(
        f"no token for fleet {target.fleet}: pass token= or token_file=, set {ENV_TOKEN}, or mount the Secret "
        f"{target.fleet}-token at {mounted.parent}. It is printed by: {target.token_command}"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise Unauthorized(f"the token file {path} cannot be read: {error.strerror}") from error


def _clean(token: str, source: str) -> str:
    token = token.strip()
    if not token or not token.isascii() or any(character.isspace() for character in token):
        raise Unauthorized(
            f"the token from {source} is empty or holds spaces; a token is one line of letters, digits, '-' and '_'"
        )
    return token
