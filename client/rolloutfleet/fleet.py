"""A fleet as a trainer sees it: one object that refits all engines and generates with them."""

import logging
import threading
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

import httpx

from rolloutfleet.adapters import adapter_spec
from rolloutfleet.channel import Channel
from rolloutfleet.contract.adapter import AdapterSpec
from rolloutfleet.contract.addresses import generation_base
from rolloutfleet.contract.trainer import (
    CacheResetView,
    FleetView,
    RefitResult,
    SleepFleet,
    WakeFleet,
)
from rolloutfleet.contract.worker import SleepLevel, WakeTag, WorkerState
from rolloutfleet.errors import CacheNotReset, GenerationFailed
from rolloutfleet.generation import (
    Choice,
    Engine,
    GeneratedText,
    GeneratedTokens,
    complete,
    merge_texts,
    merge_tokens,
    read_prompts,
)
from rolloutfleet.leading import LeadingTrainer
from rolloutfleet.refit import Progress
from rolloutfleet.sampling import Sampling
from rolloutfleet.team.following import FollowingTrainer

logger = logging.getLogger("rolloutfleet")

REFIT_SECONDS: Final = 1200.0
GENERATE_SECONDS: Final = 600.0
SLEEP_SECONDS: Final = 600.0
"""Far above what the sync job gives engines to sleep or wake: its own answer names who did not."""


class Fleet:
    """An open connection to a fleet; made by :func:`rolloutfleet.connect`.

    A session is opened by the first refit and kept, with its group, until :meth:`close`, the end of a ``with`` block, or the end of
    the process. Methods may be called from several threads; refits run one at a time.
    """

    def __init__(self, channel: Channel, view: FleetView, trainer: LeadingTrainer | FollowingTrainer) -> None:
        self.name = view.fleet
        self.namespace = view.namespace
        self.model = view.model
        self._channel = channel
        self._trainer = trainer
        self._refitting = threading.Lock()
        self._generation = httpx.Client(trust_env=False, limits=httpx.Limits(max_connections=None))
        self._finalizer = weakref.finalize(self, _close_all, trainer, channel, self._generation)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Fleet {self.namespace}/{self.name} at {self._channel.target.url}>"

    def view(self) -> FleetView:
        """The fleet as its sync job sees it now: members, epoch, version, endpoints."""
        return self._channel.get("fleet", FleetView)

    def endpoints(self) -> list[str]:
        """OpenAI base URLs (ending in ``/v1``) of the engines that are Ready with the committed version, by engine."""
        return [f"{url.rstrip('/')}/v1" for url in self.view().endpoints]

    def refit(
        self,
        tensors: Any,
        version: int,
        *,
        timeout: float = REFIT_SECONDS,
        progress: Progress | None = None,
        repair: bool = False,
    ) -> RefitResult:
        """Gives every engine these weights as ``version`` and returns once all of them serve it that have not been lost on the way: the
        result's ``members`` serve it, its ``attempts`` name engines that it went on without.

        ``tensors`` is an ``nn.Module``, a mapping from checkpoint name to tensor, a list of (name, tensor), or a
        :class:`~rolloutfleet.sources.source.WeightSource` such as :class:`~rolloutfleet.ShardedTensors`. They must keep still until
        this returns, and may lie on GPUs or in the host's memory. ``version`` must be above the fleet's; with ``repair`` it is the fleet's
        own, the tensors must be the very same again, and they go to the engines that lack it alone. ``timeout`` bounds the whole, in
        seconds. ``progress`` is called with each new :class:`RefitView`, on rank 0 of a team.

        In a team every rank calls this with the same version and with what it holds; all return the same result or raise the same error.

        Raises TypeError or ValueError for tensors that cannot be sent; ManifestMismatch (nothing was changed), InvalidRequest,
        SessionHeld, SessionLost, RefitFailed (with phase and member), DeadlineExceeded, FleetUnreachable or TeamLost. Whatever is raised
        once the transfer had begun, the trainer has left the group. Before the transfer every engine still holds the old version and serves
        it; so it does until the end where weights are staged. Where they are loaded in place, an engine that has taken any part of the new
        version generates nothing until a later refit completes. RefitFailed with ``committed`` true means that the version is published
        and some engines did not follow: send a higher version next.
        """
        return self._refit(tensors, version, timeout, progress, repair=repair)

    def refit_adapter(
        self,
        name: str,
        tensors: Any,
        version: int,
        config: Any,
        *,
        timeout: float = REFIT_SECONDS,
        progress: Progress | None = None,
    ) -> RefitResult:
        """Gives every engine this LoRA adapter, and returns once all of them serve it to requests that name it as their model.

        ``version`` counts on as in :meth:`refit`: it is the base weights of the version before, with this adapter. ``tensors`` have
        PEFT's names (``base_model.model.….lora_A.weight``), as ``peft.get_peft_model_state_dict`` gives them. ``config`` is the
        ``peft.LoraConfig`` or the mapping in ``adapter_config.json``. Engines must run with ``spec.engine.lora``.

        Nothing pauses and no cache is reset: the tensors arrive while engines serve, requests in flight end with the version that they
        began with, and later ones can still name that one as ``NAME-vVERSION`` until the refit after the next. Other adapters stay as they
        are, and all of them stay when :meth:`refit` replaces the base weights.

        Raises TypeError or ValueError for a config or tensors that cannot be sent, ManifestMismatch for an adapter that vLLM would refuse
        or leave out in part (rank, names, shapes), RefitFailed also while an engine does not hold the version before, and otherwise as
        :meth:`refit`. In a team every rank calls this, with the same name and config.
        """
        return self._refit(tensors, version, timeout, progress, adapter_spec(name, config))

    def _refit(
        self,
        tensors: Any,
        version: int,
        timeout: float,
        progress: Progress | None,
        adapter: AdapterSpec | None = None,
        *,
        repair: bool = False,
    ) -> RefitResult:
        with self._refitting:
            result = self._trainer.refit(tensors, version, timeout, progress, adapter, repair=repair)
        logger.info(
            "fleet %s serves version %s on %d engines: %.3f GB by %s in %.2f s, paused %.3f s",
            self.name,
            result.version,
            len(result.members),
            result.nbytes / 1e9,
            result.transport,
            sum(result.seconds.values()),
            result.pause_seconds,
        )
        return result

    def generate(
        self,
        input_ids: Any,
        input_lengths: Any,
        *,
        pad_token_id: int = 0,
        greedy: bool = False,
        sampling: Sampling | None = None,
        adapter: str | None = None,
        timeout: float = GENERATE_SECONDS,
    ) -> GeneratedTokens:
        """Tokens that follow each prompt, from all engines at once.

        ``input_ids`` is [batch, length], padded at the right, ``input_lengths`` is [batch]; lists, arrays and tensors will do. The batch is
        split over the Ready engines. ``adapter`` names one that a refit brought; by default the base model answers. ``timeout`` bounds
        the call in seconds. An empty batch gives an empty result.

        Raises ValueError before anything is sent, GenerationFailed naming the engine, DeadlineExceeded.
        """
        prompts = read_prompts(input_ids, input_lengths)
        choices = self._complete(prompts, sampling, adapter, greedy=greedy, timeout=timeout)
        return merge_tokens(prompts, choices, pad_token_id)

    def generate_text(
        self,
        prompts: Sequence[str],
        *,
        greedy: bool = False,
        sampling: Sampling | None = None,
        adapter: str | None = None,
        timeout: float = GENERATE_SECONDS,
    ) -> GeneratedText:
        """Text that follows each prompt, from all engines at once; otherwise as :meth:`generate`."""
        if isinstance(prompts, str):
            raise ValueError("prompts is a string; pass a list of strings")  # noqa: TRY004 - one kind for callers
        return merge_texts(self._complete(list(prompts), sampling, adapter, greedy=greedy, timeout=timeout))

    def reset_prefix_cache(self) -> dict[str, bool]:
        """True by pod name, once every engine has said so.

        Raises CacheNotReset naming the engines that answered otherwise or not at all.
        """
        expected = {member.pod_name for member in self.view().members}
        reset = self._channel.post("cache/reset", None, CacheResetView).reset
        faults = [f"{pod} answered {reset[pod]}" for pod in sorted(reset) if reset[pod] is not True]
        faults += [f"{pod} did not answer" for pod in sorted(expected - reset.keys())]
        if faults:
            raise CacheNotReset(f"prefix caches of fleet {self.name} are not all empty: {', '.join(faults)}")
        return dict(sorted(reset.items()))

    def sleep(self, level: int = SleepLevel.OFFLOAD) -> FleetView:
        """The fleet, once every engine sleeps and has left its device's memory to others.

        Level 1 keeps the weights in the host's memory and drops the cache; level 2 drops both, so that engines serve again only after
        :meth:`wake` and a refit. Raises ValueError for another level, InvalidRequest while a refit is under way, RolloutFleetError naming
        an engine that does not sleep.
        """
        if level not in set(SleepLevel):
            raise ValueError(
                f"level is {level!r}; engines sleep at level 1 (weights kept by the host) or 2 (weights dropped)"
            )
        return self._channel.post("sleep", SleepFleet(level=SleepLevel(level)), FleetView, held=SLEEP_SECONDS)

    def wake(self, *tags: str) -> FleetView:
        """The fleet, once every engine has taken back what the tags name (``weights``, ``kv_cache``), or by default everything.

        After level 2, wake ``weights``, refit, and wake ``kv_cache``. Raises ValueError for another tag, and otherwise as :meth:`sleep`.
        """
        unknown = sorted(set(tags) - {tag.value for tag in WakeTag})
        if unknown:
            raise ValueError(f"tags {', '.join(unknown)} are unknown; engines wake {', '.join(sorted(WakeTag))}")
        return self._channel.post(
            "wake", WakeFleet(tags=tuple(sorted(map(WakeTag, tags)))), FleetView, held=SLEEP_SECONDS
        )

    def release(self) -> FleetView:
        """The fleet, whose engines serve the committed version again although a refit failed; does nothing where none is held.

        With ``spec.refit.onFailure: Hold`` whole engines refuse requests after a failed refit until this is called, or a refit completes.
        """
        return self._channel.post("release", None, FleetView)

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> bool:
        """True once every engine is awake, or has taken back what ``tags`` name; at once where none sleeps."""
        if any(member.state is WorkerState.ASLEEP for member in self.view().members):
            self.wake(*(tags or ()))
        return True

    def finish_generation(self) -> bool:
        """True once every engine's prefix cache is empty; raises as :meth:`reset_prefix_cache`."""
        self.reset_prefix_cache()
        return True

    def close(self) -> None:
        """Gives the fleet back: leaves the group, ends the session, closes connections. The engines go on serving.

        In a team every rank closes its own; once one has, the team refits no more.
        """
        with self._refitting:
            self._finalizer()

    def shutdown(self) -> bool:
        """True after :meth:`close`; the engines themselves belong to the RolloutFleet object."""
        self.close()
        return True

    def _complete(
        self, prompts: Sequence[Any], sampling: Sampling | None, adapter: str | None, *, greedy: bool, timeout: float
    ) -> list[Choice]:
        fields = (sampling or Sampling()).request_fields(greedy=greedy)
        if not prompts:
            return []
        view = self.view()
        fields |= {"model": adapter or view.model, "logprobs": 0, "return_token_ids": True}
        return complete(self._generation, engines_of(view), prompts, fields, timeout)


def engines_of(view: FleetView) -> list[Engine]:
    """The engines that may be asked to generate; GenerationFailed says why there is none."""
    names = {generation_base(member.address): member.pod_name for member in view.members if member.address}
    engines = [Engine(name=names.get(url.rstrip("/"), url), url=url.rstrip("/")) for url in view.endpoints]
    if not engines:
        states = [f"{member.pod_name} is {member.state} {member.message}".strip() for member in view.members]
        raise GenerationFailed(
            f"fleet {view.fleet} has no Ready engine with version {view.version}: {'; '.join(states) or 'it has no members yet'}"
        )
    return engines


def _close_all(*parts: LeadingTrainer | FollowingTrainer | Channel | httpx.Client) -> None:
    for part in parts:
        part.close()
