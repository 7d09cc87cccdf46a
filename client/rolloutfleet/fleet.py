"""A fleet as a trainer sees it: one object that refits all engines and generates with them."""

import logging
import threading
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

import httpx

from rolloutfleet.channel import Channel
from rolloutfleet.contract.addresses import generation_base
from rolloutfleet.contract.trainer import CacheResetView, FleetView, RefitResult, RefitView, RequestRefit
from rolloutfleet.errors import CacheNotReset, GenerationFailed, SessionLost
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
from rolloutfleet.refit import Progress, Refit
from rolloutfleet.sampling import Sampling
from rolloutfleet.session import Session, TrainerIdentity, open_session
from rolloutfleet.weights import NamedTensors

logger = logging.getLogger("rolloutfleet")

REFIT_SECONDS: Final = 1200.0
GENERATE_SECONDS: Final = 600.0


class Fleet:
    """An open connection to a fleet; made by :func:`rolloutfleet.connect`.

    A session is opened by the first refit and kept, with its group, until :meth:`close`, the end of a ``with`` block, or the end of
    the process. Methods may be called from several threads; refits run one at a time.
    """

    def __init__(
        self,
        channel: Channel,
        view: FleetView,
        *,
        trainer: str = "",
        advertise: str | None = None,
        take_over: bool = False,
    ) -> None:
        self.name = view.fleet
        self.namespace = view.namespace
        self.model = view.model
        self._channel = channel
        self._identity = TrainerIdentity(name=trainer, advertise=advertise, take_over=take_over)
        self._session: Session | None = None
        self._refitting = threading.Lock()
        self._generation = httpx.Client(trust_env=False, limits=httpx.Limits(max_connections=None))
        self._finalizer = weakref.finalize(self, _close_all, channel, self._generation)

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
    ) -> RefitResult:
        """Gives every engine these weights as ``version`` and returns once all of them serve it.

        ``tensors`` is an ``nn.Module``, a mapping from checkpoint name to tensor, or a list of (name, tensor); they must keep still until
        this returns. ``version`` must be above the fleet's. ``timeout`` bounds the whole in seconds. ``progress`` is called with each new
        :class:`RefitView`.

        Raises TypeError or ValueError for tensors that cannot be sent; ManifestMismatch (nothing was changed), InvalidRequest,
        SessionHeld, SessionLost, RefitFailed (with phase and member), DeadlineExceeded or FleetUnreachable. Whatever is raised, the
        trainer has left the group. Before the transfer every engine still holds the old version and serves it; weights are loaded in
        place, so an engine that has taken any part of the new one generates nothing until a later refit completes. RefitFailed with
        ``committed`` true means that the version is published and some engines did not follow: send a higher version next.
        """
        named = NamedTensors(tensors)
        request = RequestRefit(version=version, manifest=named.manifest())
        with self._refitting:
            session, accepted = self._request(request)
            result = Refit(self._channel, session, named, request, accepted).run(timeout, progress)
        logger.info(
            "fleet %s serves version %s on %d engines: %.3f GB in %.2f s, paused %.3f s",
            self.name,
            result.version,
            len(result.members),
            result.nbytes / 1e9,
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
        timeout: float = GENERATE_SECONDS,
    ) -> GeneratedTokens:
        """Tokens that follow each prompt, from all engines at once.

        ``input_ids`` is [batch, length], padded at the right, ``input_lengths`` is [batch]; lists, arrays and tensors will do. The batch is
        split over the Ready engines. ``timeout`` bounds the call in seconds. An empty batch gives an empty result.

        Raises ValueError before anything is sent, GenerationFailed naming the engine, DeadlineExceeded.
        """
        prompts = read_prompts(input_ids, input_lengths)
        return merge_tokens(prompts, self._complete(prompts, sampling, greedy=greedy, timeout=timeout), pad_token_id)

    def generate_text(
        self,
        prompts: Sequence[str],
        *,
        greedy: bool = False,
        sampling: Sampling | None = None,
        timeout: float = GENERATE_SECONDS,
    ) -> GeneratedText:
        """Text that follows each prompt, from all engines at once; otherwise as :meth:`generate`."""
        if isinstance(prompts, str):
            raise ValueError("prompts is a string; pass a list of strings")  # noqa: TRY004 - one kind for callers
        return merge_texts(self._complete(list(prompts), sampling, greedy=greedy, timeout=timeout))

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

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> bool:
        """True at once: engines of a fleet that shares no GPU with the trainer are always awake; ``tags`` would name what to wake."""
        del tags
        return True

    def finish_generation(self) -> bool:
        """True once every engine's prefix cache is empty; raises as :meth:`reset_prefix_cache`."""
        self.reset_prefix_cache()
        return True

    def close(self) -> None:
        """Gives the fleet back: leaves the group, ends the session, closes connections. The engines go on serving."""
        with self._refitting:
            self._drop_session()
            self._finalizer()

    def shutdown(self) -> bool:
        """True after :meth:`close`; the engines themselves belong to the RolloutFleet object."""
        self.close()
        return True

    def _request(self, request: RequestRefit) -> tuple[Session, RefitView]:
        for attempt in (1, 2):
            session = self._open_session()
            try:
                return session, self._channel.post(f"sessions/{session.id}/refits", request, RefitView)
            except SessionLost:
                # Nothing has begun yet, so a session that ended while the trainer was busy elsewhere is simply opened anew.
                session.mark_lost()
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    def _open_session(self) -> Session:
        if self._session is not None and self._session.usable:
            return self._session
        self._drop_session()
        self._session = open_session(self._channel, self.view(), self._identity)
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _close_all, self._session, self._channel, self._generation)
        return self._session

    def _drop_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _complete(
        self, prompts: Sequence[Any], sampling: Sampling | None, *, greedy: bool, timeout: float
    ) -> list[Choice]:
        fields = (sampling or Sampling()).request_fields(greedy=greedy)
        if not prompts:
            return []
        view = self.view()
        fields |= {"model": view.model, "logprobs": 0, "return_token_ids": True}
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


def _close_all(*parts: Session | Channel | httpx.Client) -> None:
    for part in parts:
        part.close()
