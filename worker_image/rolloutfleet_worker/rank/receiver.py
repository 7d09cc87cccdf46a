"""What one rank can be ordered to do: check a manifest, join, prepare, receive, lend, borrow and leave; and, by vLLM, to swap."""

import threading
import time
from typing import Any

import torch
import vllm

from rolloutfleet.contract.adapter import AdapterSpec
from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.contract.policy import Verify
from rolloutfleet.locality import device_name
from rolloutfleet_worker.rank.adapted import base_model
from rolloutfleet_worker.rank.adapters import AdapterLoad, KnownAdapter, KnownAdapters
from rolloutfleet_worker.rank.broadcasting import TRANSFER_ERRORS, receive_whole
from rolloutfleet_worker.rank.fresh import FreshLoad
from rolloutfleet_worker.rank.layout_capture import UnsupportedModelError, capture_layout
from rolloutfleet_worker.rank.lending import Lending
from rolloutfleet_worker.rank.link import RankError, is_cut_off
from rolloutfleet_worker.rank.live_digest import live_digest
from rolloutfleet_worker.rank.live_tensors import live_shape
from rolloutfleet_worker.rank.loading import Loading, live_destinations
from rolloutfleet_worker.rank.manifests import Known, KnownManifests, summarize
from rolloutfleet_worker.rank.membership import Membership, join_epoch
from rolloutfleet_worker.rank.peer_copy import PeerCopy
from rolloutfleet_worker.rank.reload import Reload
from rolloutfleet_worker.rank.room import room_bytes
from rolloutfleet_worker.rank.staging import Staging
from rolloutfleet_worker.rank.transfer import Load, Order, Plan, Transfer
from rolloutfleet_worker.wire import Frame


class Receiver:
    """The rank operations of a model that lives in this process."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, device: torch.device, rank: int) -> None:
        self.rank = rank
        self._adapters = KnownAdapters(model, vllm_config)
        self._model = model = base_model(model)
        self._config = vllm_config
        self._device = device
        self._manifests = KnownManifests()
        self._guard = threading.Lock()
        self._member: Membership | None = None
        self._transfer: Transfer | None = None
        self._receiving: Transfer | None = None
        """At work; whoever drops it leaves closing it to that thread."""
        self._staging: Staging | None = None
        self._borrowed: PeerCopy | None = None
        """A peer's weights beside the live ones; the staged version is then this."""
        self._aborts = 0
        self._spent = False
        """Whether memory of such a copy may still be kept by torch."""
        self._staged_version: int | None = None
        self._lending = Lending(model, device, rank)

    def describe(self) -> Frame:
        """Versions and device of this rank, for the ledger."""
        cuda = self._device.type == "cuda"
        return {
            "vllm_version": vllm.__version__,
            "nccl_version": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
            "device": device_name(self._device),
        }

    def check(self, body: Frame) -> Frame:
        """Faults of a manifest, and where its tensors would go; one without faults is kept by its key."""
        manifest = Manifest.model_validate(body["manifest"])
        if body["adapter"] is not None:
            return self._check_adapter(manifest, AdapterSpec.model_validate(body["adapter"]))
        known = self._manifests.find(manifest.digest())
        if known is None:
            try:
                captured = capture_layout(self._model, self._config, manifest)
            except UnsupportedModelError as error:
                raise RankError(f"rank {self.rank}: {error}") from error
            faults = captured.faults
            if not faults:
                known = self._manifests.add(captured)
        else:
            faults = known.captured.faults
        return {
            "missing": faults.missing,
            "extra": faults.extra,
            "misshapen": faults.misshapen,
            "consumed": faults.consumed,
            "layout": None if known is None else self._summary(known),
        }

    def _check_adapter(self, manifest: Manifest, spec: AdapterSpec) -> Frame:
        faults, adapter = self._adapters.check(manifest, spec)
        return {
            "missing": faults.missing,
            "extra": faults.extra,
            "misshapen": faults.misshapen,
            "consumed": {},
            "adapter": faults.adapter,
            "layout": None if adapter is None else self._summary(adapter),
        }

    def join(self, body: Frame, cancelled: threading.Event) -> Frame:
        """Join the epoch's group as the commanded rank, which must be the offset plus this process's own rank."""
        self._drop_transfer()
        self.abort()
        self._use_device()
        member = join_epoch(body, self.rank, self._device, cancelled)
        with self._guard:
            self._member = member
        if cancelled.is_set():
            self.abort()
            raise RankError(f"rank {member.rank} joined epoch {body['epoch']} after it had been aborted", cut_off=True)
        return {"rank": member.rank}

    def prepare(self, body: Frame, cancelled: threading.Event) -> Frame:
        """Lay out program, tables and buffers for the versions to come; the live weights are not touched."""
        began = time.monotonic()
        member = self._require_member(cancelled)
        known = self._require_known(body["manifest_digest"])
        deadline = began + float(body["timeout_seconds"])
        self._use_device()
        self._drop_transfer()
        staging = self._stage_for(known) if body["staged"] and isinstance(known, Known) else None
        if not body["staged"]:
            self._free_staging()
        plan = Plan(member, known, body["layouts"], self._model, staging, body["staged"], deadline, cancelled)
        try:
            transfer = _make_transfer(plan)
        except TRANSFER_ERRORS as error:
            message = f"rank {member.rank}: {type(error).__name__}: {error}"
            raise RankError(message, cut_off=is_cut_off(error)) from error
        with self._guard:
            if self._member is member:
                self._transfer = transfer
        self._require_member(cancelled)
        return {"staging_bytes": staging.nbytes if staging else 0, "seconds": time.monotonic() - began}

    def receive(self, body: Frame, cancelled: threading.Event) -> Frame:
        """Receive a version: into the live weights, while generation is paused, or beside them."""
        member = self._require_member(cancelled)
        known = self._require_known(body["manifest_digest"])
        deadline = time.monotonic() + float(body["timeout_seconds"])
        self._use_device()
        if isinstance(known, KnownAdapter):
            return self._receive_adapter(known, Order(body["version"], deadline, cancelled))
        fresh = self._fresh_load(known) if body["verify"] == Verify.FULL and not body["staged"] else None
        if not member.transport.by_layout:
            reload = Reload(self._model, self._config)
            report = receive_whole(member, known.manifest, reload, self._model, self._device, deadline, fresh)
            return {**report, "layout": self._summary(known), "layout_changed": False}
        transfer = self._require_transfer(known, staged=body["staged"])
        staging = self._stage_for(known) if body["staged"] else None
        loading = Loading(self._model, self._config, known, fresh)
        report = self._run(transfer, loading, staging, Order(body["version"], deadline, cancelled))
        if staging is not None:
            # An abort that came meanwhile has forgotten it already; live weights, once changed, stay so whoever leaves.
            self._require_member(cancelled)
            with self._guard:
                self._staged_version = body["version"] if self._member is member else None
        return {**report, "layout": self._summary(known)}

    def _fresh_load(self, known: Known) -> FreshLoad:
        self._return_memory()
        return FreshLoad(self._model, self._config, self._device, known.manifest)

    def _run(self, transfer: Transfer, load: Load, staging: Staging | None, order: Order) -> Frame:
        """The transfer's report; one that was dropped meanwhile is closed when it has ended."""
        with self._guard:
            self._receiving = transfer
        try:
            return transfer.receive(load, staging, order)
        finally:
            with self._guard:
                self._receiving, dropped = None, self._transfer is not transfer
            if dropped:
                transfer.close()

    def _receive_adapter(self, known: KnownAdapter, order: Order) -> Frame:
        transfer = self._require_transfer(known, staged=True)
        load = AdapterLoad(known, order.version, self.rank)
        report = self._run(transfer, load, None, order)
        self._require_member(order.cancelled)
        held = None if load.held is None else load.held.model_dump(mode="json")
        return {**report, "layout": self._summary(known), "adapter": held}

    def swap(self, version: int) -> None:
        """Copy the staged version into the live weights; called on vLLM's own thread, between two steps of the model.

        Raises:
            RankError: this version does not lie staged here.
        """
        with self._guard:
            beside, staged = self._borrowed or self._staging, self._staged_version
            self._staged_version = self._borrowed = None
        if beside is None or staged != version:
            raise RankError(f"local rank {self.rank} has version {staged} staged, not {version}")
        beside.copy_into_live()

    def free(self) -> Frame:
        """Give the buffers back; the next version has to be prepared anew."""
        self._drop_transfer()
        self._free_staging()
        return {}

    def unmap(self) -> Frame:
        """Let go of the trainer's memory until the next version comes, so that the trainer's freeing it frees it."""
        with self._guard:
            transfer = self._transfer
        if transfer is not None:
            transfer.close()
        return {}

    def shape(self, body: Frame, cancelled: threading.Event) -> Frame:
        """Digests of the shapes and of the values of what this rank computes with; asked for ``room``, whether a second copy of it fits."""
        self._use_device()
        try:
            digest = live_digest(self._model, cancelled=cancelled)
        except ConnectionAbortedError as error:
            raise RankError(f"local rank {self.rank}: {error}") from error
        answer: Frame = {"shape": live_shape(self._model), "live_digest": digest}
        if body["room"]:
            self._return_memory()
            held = self._staging.nbytes if self._staging is not None else 0
            answer |= {"copy_bytes": self._lending.copy_bytes(), "room_bytes": room_bytes(self._device) + held}
        return answer

    def offer(self, body: Frame) -> Frame:
        """Open the store in which the ranks of this engine and those of a borrower meet, pair by pair."""
        return self._lending.offer(float(body["timeout_seconds"]))

    def lend(self, body: Frame, cancelled: threading.Event) -> Frame:
        """Send all that this rank computes with to the borrower's rank of the same number, while the engine serves."""
        self._use_device()
        return self._lending.lend(body, cancelled)

    def borrow(self, body: Frame, cancelled: threading.Event) -> Frame:
        """Overwrite all that this rank computes with by what the lender's rank of the same number does, or take that beside it."""
        self._use_device()
        report = self._borrow_beside(body, cancelled) if body["staged"] else self._lending.borrow(body, cancelled)
        return {**report, "layout": None, "layout_changed": False}

    def _borrow_beside(self, body: Frame, cancelled: threading.Event) -> Frame:
        with self._guard:
            self._borrowed = self._staged_version = None
            aborts = self._aborts
        if self._lending.copy_bytes() > room_bytes(self._device):
            self._free_staging()  # the next version that comes from the trainer takes its own again
        report, borrowed = self._lending.borrow_beside(body, cancelled)
        with self._guard:
            self._spent = True
            # What was cancelled says nothing: it is set when a pair has ended, however it has.
            if self._aborts == aborts:
                self._borrowed, self._staged_version = borrowed, int(body["version"])
        return report

    def let_go(self) -> None:
        """End lending now; safe to call from another thread at any time."""
        self._lending.let_go()

    def abort(self) -> None:
        """Leave the group, unblock whatever waits in it, and forget a staged version; safe to call from another thread at any time."""
        with self._guard:
            self._aborts += 1
            member, self._member = self._member, None
            transfer, self._transfer, self._staged_version, self._borrowed = self._transfer, None, None, None
            busy = transfer is self._receiving
        if member is not None:
            member.abort()
        self._lending.let_go()
        if transfer is not None and not busy:
            transfer.close()

    def _require_known(self, key: str) -> Known | KnownAdapter:
        return self._adapters.find(key) or self._manifests.require(key)

    def _summary(self, known: Known | KnownAdapter) -> Frame:
        self._return_memory()
        held = self._staging.nbytes if self._staging is not None else 0
        return summarize(known.layout, room_bytes(self._device) + held).model_dump(mode="json")

    def _require_member(self, cancelled: threading.Event) -> Membership:
        with self._guard:
            member = self._member
        if member is None or cancelled.is_set():
            raise RankError("this rank is in no group: it has not joined one, or was told to leave it", cut_off=True)
        return member

    def _require_transfer(self, known: Known | KnownAdapter, *, staged: bool) -> Transfer:
        with self._guard:
            transfer = self._transfer
        if transfer is None or transfer.known is not known or transfer.staged != staged:
            where = "beside the live weights" if staged else "into the live weights"
            raise RankError(f"this rank is not prepared to receive this manifest {where}; prepare first")
        if transfer.layout.digest != known.layout.digest:
            raise RankError("the layout has changed since this rank was prepared; prepare again")
        return transfer

    def _stage_for(self, known: Known) -> Staging:
        """The second buffer for the layout; the one of before, when it fits."""
        staging = self._staging
        live = live_destinations(self._model, known.layout)
        if staging is not None and staging.fits(known.layout, live):
            return staging
        self._free_staging()
        staging = Staging(known.layout, live, self._device)
        with self._guard:
            self._staging = staging
        return staging

    def _drop_transfer(self) -> None:
        with self._guard:
            transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close()

    def _free_staging(self) -> None:
        with self._guard:
            held, self._staging, self._staged_version = self._staging, None, None
        if held is not None and self._device.type == "cuda":
            del held
            torch.cuda.empty_cache()

    def _return_memory(self) -> None:
        """What a peer's copy took is the device's again; not at its swap, where every moment is a pause."""
        with self._guard:
            spent = self._spent and self._borrowed is None
            self._spent = self._spent and not spent
        if spent and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _use_device(self) -> None:
        """CUDA's current device belongs to the thread."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)


def _make_transfer(plan: Plan) -> Transfer:
    if plan.member.group is None:
        from rolloutfleet_worker.rank.shared_transfer import SharedTransfer

        return SharedTransfer(plan)
    from rolloutfleet_worker.rank.pulled_transfer import PulledTransfer

    return PulledTransfer(plan)
