"""One report for the pod out of what each of its ranks said."""

from collections.abc import Sequence

from rolloutfleet.contract.manifest import Manifest, ManifestFaults
from rolloutfleet.contract.worker import CheckReport, ReceiveReport
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
        missing=tuple(missing), extra=tuple(extra), misshapen=tuple(misshapen[name] for name in sorted(misshapen))
    )
    return CheckReport(faults=faults, ignored=tuple(ignored))


def merge_receives(version: int, answers: Sequence[Frame]) -> ReceiveReport:
    """What arrived, by the slowest rank's clock; ranks that differ in what arrived give a digest that equals no sender's."""
    digests = sorted({str(answer["received_digest"]) for answer in answers})
    return ReceiveReport(
        version=version,
        tensors=answers[0]["tensors"],
        nbytes=answers[0]["nbytes"],
        received_digest=" and ".join(digests),
        live_digests=tuple(answer["live_digest"] for answer in answers),
        receive_seconds=max(answer["receive_seconds"] for answer in answers),
        load_seconds=max(answer["load_seconds"] for answer in answers),
    )
