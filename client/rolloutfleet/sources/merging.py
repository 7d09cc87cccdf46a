"""One manifest from those of several trainer ranks, which may know different tensors."""

from collections.abc import Sequence

from rolloutfleet.contract.manifest import Manifest, TensorSpec


def merge_manifests(manifests: Sequence[Manifest]) -> Manifest:
    """All ranks' tensors: the first rank's in its order, then what each further rank adds; the first manifest itself if none adds any.

    Raises ValueError naming a tensor on which two ranks disagree.
    """
    merged: dict[str, tuple[int, TensorSpec]] = {}
    for rank, manifest in enumerate(manifests):
        for spec in manifest.tensors:
            first, known = merged.setdefault(spec.name, (rank, spec))
            if known != spec:
                raise ValueError(
                    f"tensor {spec.name} is {spec.dtype} {list(spec.shape)} on trainer rank {rank} and {known.dtype} {list(known.shape)} "
                    f"on rank {first}; ranks must agree on dtype and whole shape"
                )
    if len(merged) == len(manifests[0].tensors):
        return manifests[0]
    return Manifest(tensors=tuple(spec for _, spec in merged.values()))
