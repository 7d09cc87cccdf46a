"""One report for the pod out of what each of its ranks said."""

from collections.abc import Sequence

from rolloutfleet.contract.manifest import Manifest, ManifestFaults
from rolloutfleet.contract.worker import CheckReport, LayoutSummary, PrepareReport, ReceiveReport
from rolloutfleet_worker.wire import Frame


def merge_checks(manifest: Manifest, answers: Sequence[Frame]) -> CheckReport:
    """Faults of all ranks; a tensor of which all ranks together use only a part has the wrong shape."""
    missing = sorted({name for answer in answers for name in answer["missing"]})
    extra = sorted({name for answer in answers for name in answer["extra"]})
    misshapen = {sentence.split()[1]: sentence for answer in answers for sentence in answer["misshapen"]}
    ignored = []
    for spec in manifest.tensors:
        if spec.name in extra or spec.name in misshapen:
            continue
        used = sum(answer["consumed"].get(spec.name, spec.elements) for answer in answers)
        if used == 0 and spec.elements:
            ignored.append(spec.name)
        elif used < spec.elements:
            shape = list(spec.shape)
            misshapen[spec.name] = (
                f"tensor {spec.name} has shape {shape}, the model takes only {used} of its {spec.elements} elements"
            )
    faults = ManifestFaults(
        missing=tuple(missing),
        extra=tuple(extra),
        misshapen=tuple(misshapen[name] for name in sorted(misshapen)),
        adapter=tuple(sorted({sentence for answer in answers for sentence in answer.get("adapter", ())})),
    )
    layouts = () if faults else tuple(LayoutSummary.model_validate(answer["layout"]) for answer in answers)
    return CheckReport(faults=faults, ignored=tuple(ignored), layouts=layouts)


def merge_prepares(answers: Sequence[Frame]) -> PrepareReport:
    """Second buffers add up; the slowest rank's clock."""
    return PrepareReport(
        staging_bytes=sum(answer["staging_bytes"] for answer in answers),
        seconds=max(answer["seconds"] for answer in answers),
    )


def merge_receives(version: int, answers: Sequence[Frame]) -> ReceiveReport:
    """What arrived on the ranks, in rank order, by the slowest rank's clock."""
    seconds = [answer["receive_seconds"] + answer["load_seconds"] for answer in answers]
    changed = any(answer["layout_changed"] for answer in answers)
    return ReceiveReport(
        version=version,
        tensors=max(answer["tensors"] for answer in answers),
        nbytes=sum(answer["nbytes"] for answer in answers),
        received_digests=tuple(answer["received_digest"] for answer in answers),
        live_digests=tuple(answer["live_digest"] for answer in answers),
        layouts=tuple(LayoutSummary.model_validate(answer["layout"]) for answer in answers) if changed else (),
        receive_seconds=max(answer["receive_seconds"] for answer in answers),
        load_seconds=max(answer["load_seconds"] for answer in answers),
        slowest_rank=seconds.index(max(seconds)),
    )
