"""What holds at every moment, each promise a function of its own: it says how it is broken, or nothing."""

from collections.abc import Callable

from fakes.explored.engine import Engine
from fakes.explored.world import TIMING, World, digest_of
from rolloutfleet.contract.policy import CachePolicy
from rolloutfleet.contract.problems import ProblemCode
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import Resume, WorkerState
from rolloutfleet_sync.protocol.commands import WriteCommit, WriteIntent
from rolloutfleet_sync.protocol.events import CallFailed
from rolloutfleet_sync.protocol.members import WHOLE
from rolloutfleet_sync.protocol.model import TERMINAL, Refit, Step
from rolloutfleet_sync.protocol.view import describe_member
from rolloutfleet_worker.fence import Door

Promise = Callable[[World, World], str]
"""From the moment before and the moment after to what is wrong; empty when nothing is."""


def no_engine_serves_a_mixture(before: World, after: World) -> str:
    """Requests never meet weights of which only a part is one version, nor a cache of other weights."""
    for engine in after.engines:
        if not engine.alive or engine.fence.door is not Door.OPEN or engine.paused:
            continue
        if engine.weights is None:
            return f"{engine.member.pod_name} is {engine.fence.state} and generates with a mixture"
        if engine.stale_cache and after.policy.cache is CachePolicy.RESET:
            return f"{engine.member.pod_name} generates with the cache of other weights"
    return ""


def every_serving_engine_has_a_published_version(before: World, after: World) -> str:
    """What an engine serves is, byte for byte, what the fleet has committed under that version."""
    for engine in after.engines:
        if not engine.serves:
            continue
        if engine.weights is None or engine.weights[0] != engine.fence.version:
            return f"{engine.member.pod_name} serves {engine.weights} as version {engine.fence.version}"
        if engine.weights not in after.published:
            return f"{engine.member.pod_name} serves {engine.weights}, which is not published"
    return ""


def a_version_is_published_once(before: World, after: World) -> str:
    """One version stands for one set of bytes."""
    versions = [version for version, _ in after.published]
    twice = {version for version in versions if versions.count(version) > 1}
    return f"versions {sorted(twice)} are published twice" if twice else ""


def version_and_epoch_only_rise(before: World, after: World) -> str:
    """In the sync job, in its record and in every engine, for as long as each of them lives."""
    old, new = before.state, after.state
    if after.stored.version < before.stored.version:
        return f"the stored version fell from {before.stored.version} to {after.stored.version}"
    if after.stored.epoch < before.stored.epoch:
        return f"the stored epoch fell from {before.stored.epoch} to {after.stored.epoch}"
    if before.restarts == after.restarts:
        if new.epoch < old.epoch:
            return f"the epoch fell from {old.epoch} to {new.epoch}"
        if new.version < old.version:
            return f"the version fell from {old.version} to {new.version}"
    lived = {engine.fence.identity.instance: engine for engine in before.engines if engine.alive}
    for engine in after.engines:
        was = lived.get(engine.fence.identity.instance)
        if was is not None and engine.alive and engine.fence.epoch < was.fence.epoch:
            return f"the epoch of {engine.member.pod_name} fell from {was.fence.epoch} to {engine.fence.epoch}"
    return ""


def a_version_counts_once_it_is_stored(before: World, after: World) -> str:
    """The sync job tells nobody of a version that its record does not hold."""
    if after.state.version > after.stored.version:
        return f"the sync job counts version {after.state.version}, the record holds {after.stored.version}"
    held = [engine for engine in after.engines if (engine.fence.admitted or 0) > after.stored.version]
    return f"{held[0].member.pod_name} was told version {held[0].fence.admitted}" if held else ""


def a_commit_follows_an_intent_and_a_verification(before: World, after: World) -> str:
    """A version is written as committed when every member of its ledger had its bytes, compared with those that were sent."""
    known = {write.write for write in before.writes}
    for write in after.writes:
        if not isinstance(write, WriteCommit) or write.write in known:
            continue
        refit = after.state.refit
        if refit is None or refit.version != write.record.version:
            return f"version {write.record.version} is committed by no refit"
        intent = after.stored.intent
        if intent is None or (intent.epoch, intent.version) != (refit.epoch, refit.version):
            return f"version {refit.version} of epoch {refit.epoch} is committed over the intent {intent}"
        if refit.sent is None:
            return f"version {refit.version} is committed before the trainer said what it sent"
        wrong = _lacking(after, refit)
        if wrong:
            return wrong
    return ""


def _lacking(world: World, refit: Refit) -> str:
    wanted = (refit.version, digest_of(refit.version, refit.id))
    for seat in refit.seats:
        if seat.pod_uid not in refit.received:
            return f"version {refit.version} is committed before {seat.pod_name} had received it"
        engine = world.engine(seat.pod_uid)
        if engine is None or not engine.alive or engine.fence.identity.instance != seat.instance:
            continue
        if not engine.fence.staged and engine.fence.state is not WorkerState.RECEIVED:
            continue  # it has given the version up since, and the sync job has not heard of it
        held = engine.beside if engine.fence.staged else engine.weights
        if engine.fence.version_in_flight == refit.version and held != wanted:
            return f"version {refit.version} is committed and {seat.pod_name} holds {held}"
    return ""


def nothing_is_received_before_the_intent_is_stored(before: World, after: World) -> str:
    """An engine takes bytes of a version only when a sync job that starts anew would know of it."""
    for engine in after.engines:
        was = before.engine(engine.uid)
        if was is None or was.fence.version_in_flight == engine.fence.version_in_flight or not engine.alive:
            continue
        version, intent = engine.fence.version_in_flight, after.stored.intent
        lent = version <= after.state.version
        late = any(isinstance(write, WriteIntent) for write in after.writes) or after.restarts != before.restarts
        if (
            version
            and not lent
            and not late
            and (intent is None or intent.version != version)
            and not _given_up(after, engine)
        ):
            return f"{engine.member.pod_name} receives version {version}, the intent is {intent}"
    return ""


def _given_up(world: World, engine: Engine) -> bool:
    """Whether the call was of an epoch that the sync job has left."""
    return engine.fence.epoch < world.state.epoch or world.restarts > 1


def no_dirty_engine_is_resumed(before: World, after: World) -> str:
    """The sync job asks an engine to generate that has just committed, or has said that it is whole; and no other runs its model."""
    known = {request.command.call for request in before.requests}
    refit = after.active
    for request in after.requests:
        if not isinstance(request.command.message, Resume) or request.command.call in known:
            continue
        record = after.state.members.get(request.command.pod_uid)
        committed = refit is not None and request.command.pod_uid in refit.left_paused
        if record is not None and record.report is not None and record.report.state not in WHOLE and not committed:
            return f"{record.pod_name} is {record.report.state} and asked to resume"
    for engine in after.engines:
        was = before.engine(engine.uid)
        if was is not None and was.paused and not engine.paused and engine.alive and engine.weights is None:
            return f"{engine.member.pod_name} holds a mixture and runs steps of the model again"
    return ""


def a_kept_group_has_the_newest_epoch(before: World, after: World) -> str:
    """What the next refit builds on is not refused by anybody as out of date."""
    group = after.state.group
    if group is None or group.epoch == after.state.epoch:
        return ""
    return f"the kept group is of epoch {group.epoch}, the epoch is {after.state.epoch}"


def who_receives_beside_serves_meanwhile(before: World, after: World) -> str:
    """A staged refit takes no engine out of service before it is decided, nor when it fails."""
    refit = after.active
    if refit is None or not refit.staged or refit.decided or refit.phase in {Phase.ABORTING, Phase.PAUSING}:
        return ""
    for seat in refit.seats:
        engine = after.engine(seat.pod_uid)
        if engine is None or not engine.alive or engine.fence.identity.instance != seat.instance:
            continue
        if refit.step is not Step.CHECK and not engine.fence.whole:
            return f"{seat.pod_name} is {engine.fence.state} in step {refit.step} of a staged refit"
    return ""


def a_lender_lends_to_one_and_never_during_a_refit(before: World, after: World) -> str:
    """Loans give way to refits."""
    donors = [loan.donor for loan in after.state.loans.values() if loan.donor]
    if len(donors) != len(set(donors)):
        return f"two loans have one lender: {donors}"
    return f"{donors} lend during a refit" if donors and after.active is not None else ""


def every_phase_ends(before: World, after: World) -> str:
    """A refit under way has a deadline that has not passed, and no phase begins with more time than any phase has."""
    refit = after.active
    if refit is None:
        return ""
    longest = max(*after.policy.deadlines.model_dump().values(), TIMING.aborting)
    if not after.now < refit.deadline <= after.now + longest:
        return f"{refit.phase} of {refit.id} ends at {refit.deadline}, it is {after.now}"
    return ""


def the_clock_does_not_stand_still(before: World, after: World) -> str:
    """The sync job never asks to be woken at once, again and again."""
    return "; ".join(after.doubts)


def what_has_ended_stays_ended(before: World, after: World) -> str:
    """A refit that is Complete or Failed never goes on, and one that is committed never counts as not committed."""
    old, new = before.state.refit, after.state.refit
    if old is None or new is None or old.id != new.id or before.restarts != after.restarts:
        return ""
    if old.phase in TERMINAL and new.phase is not old.phase:
        return f"{old.id} was {old.phase} and is {new.phase}"
    return f"{old.id} was committed and is not any more" if old.committed and not new.committed else ""


def every_attempt_loses_somebody(before: World, after: World) -> str:
    """There are no more attempts of a refit than it had members."""
    refit = after.active
    if refit is None or refit.attempt <= len(after.engines):
        return ""
    return f"attempt {refit.attempt} of {refit.id} with {len(after.engines)} engines"


PROMISES: tuple[Promise, ...] = (
    no_engine_serves_a_mixture,
    every_serving_engine_has_a_published_version,
    a_version_is_published_once,
    version_and_epoch_only_rise,
    a_version_counts_once_it_is_stored,
    a_commit_follows_an_intent_and_a_verification,
    nothing_is_received_before_the_intent_is_stored,
    no_dirty_engine_is_resumed,
    a_kept_group_has_the_newest_epoch,
    who_receives_beside_serves_meanwhile,
    a_lender_lends_to_one_and_never_during_a_refit,
    every_phase_ends,
    the_clock_does_not_stand_still,
    what_has_ended_stays_ended,
    every_attempt_loses_somebody,
)


def has_enough_survivors(world: World) -> bool:
    """Whether the refit under way has to complete when nothing more goes wrong: its trainer lives, and enough of its members are whole.

    An attempt that ends although nobody is lost is the trainer's fault, or that of all.
    """
    refit, trainer, session = world.active, world.trainer, world.state.session
    if refit is None or refit.final or refit.committed or trainer is None or not trainer.alive or session is None:
        return False
    if trainer.session != session.id or trainer.refit != refit.id:
        return False
    whole = {each.uid: each.fence.identity.instance for each in world.engines if _is_sound(each)}
    if refit.step is Step.ABORT and not refit.lost:
        late = refit.problem is not None and refit.problem.code is ProblemCode.DEADLINE_EXCEEDED
        if late or all(seat.pod_uid in whole for seat in refit.seats):
            return False
    group = world.group(refit.epoch)
    if group is not None and group.broken and group.gone <= whole.keys():
        return False  # somebody left it by itself, at the end of its own patience
    members = {seat.pod_uid: seat.instance for seat in refit.seats if seat.pod_uid not in refit.lost}
    if not refit.seats:
        known = world.state.members.items()
        members = {uid: record.report.instance for uid, record in known if record.report is not None}
        if refit.survivors is not None:
            members = dict(refit.survivors)
    refused = {reply.pod_uid for reply in world.replies if isinstance(reply.event, CallFailed)}
    silent = {uid for uid, record in world.state.members.items() if record.failure is not None}
    fit = [
        uid
        for uid, instance in members.items()
        if whole.get(uid) == instance and uid not in refused and uid not in silent
    ]
    return len(fit) >= world.policy.min_ready


def _is_sound(engine: Engine) -> bool:
    return engine.alive and not engine.leaving and not _is_damaged(engine)


def _is_damaged(engine: Engine) -> bool:
    return engine.corrupts or any(held is not None and "damaged" in held[1] for held in (engine.weights, engine.beside))


def nobody_is_left_paused(world: World) -> str:
    """At rest every engine that is up either generates or says why not, and holds nothing that waits for a word."""
    for engine in world.engines:
        if not engine.alive:
            continue
        name, fence = engine.member.pod_name, engine.fence
        if engine.work is not None or fence.lending:
            return f"{name} is still at work"
        if fence.state is WorkerState.PAUSED or (engine.paused and fence.whole):
            return f"{name} is paused for ever"
        if fence.state in {WorkerState.RECEIVING, WorkerState.RECEIVED} or fence.staged:
            return f"{name} is {fence.state} for ever"
    return ""


def all_serve_or_are_named(world: World) -> str:
    """At rest every engine serves the committed version, or the sync job says which one does not, and why."""
    for engine in world.engines:
        if engine.serves and engine.fence.version == world.state.version:
            continue
        record = world.state.members.get(engine.uid)
        if record is None:
            return f"{engine.member.pod_name} does not serve, and the sync job does not know of it"
        if not describe_member(world.state, record):
            return f"{engine.member.pod_name} is {engine.fence.state} with {engine.weights}, and nobody says so"
    return ""


def nothing_is_under_way(world: World) -> str:
    """At rest no refit is active or waits, and the store holds what the sync job knows."""
    state = world.state
    if state.active is not None or state.queued is not None:
        return f"refit {(state.active or state.queued)} never ends"
    if world.revision != world.known_revision:
        return ""  # somebody else has written, which the sync job finds out when it writes next
    if state.reading or state.record is None or world.writes:
        return "the record is read, or written, for ever"
    if (state.record.version, state.record.intent) != (world.stored.version, world.stored.intent):
        return f"the record holds {world.stored}, the sync job {state.record}"
    return ""


def a_whole_engine_gives_to_the_others(world: World) -> str:
    """At rest an engine that is up lacks the committed version only when nobody can lend it."""
    version = world.state.version
    lenders = [engine for engine in world.engines if engine.serves and engine.fence.version == version]
    if not lenders or not version:
        return ""
    lacking = [engine for engine in world.engines if engine.alive and not engine.serves]
    return f"{lacking[0].member.pod_name} lacks version {version} for ever" if lacking else ""


AT_REST = (nobody_is_left_paused, all_serve_or_are_named, nothing_is_under_way, a_whole_engine_gives_to_the_others)
