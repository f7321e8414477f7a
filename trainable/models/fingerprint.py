"""Fingerprints of the frozen weights that a run loads beside its checkpoint, and their comparison on resuming."""

import hashlib
from pathlib import Path


def compute_fingerprint(folder: Path) -> str:
    """SHA-256 of the weight files of the model in `folder`.

    A checkpoint contains it where frozen weights are no part of it: those under adapters, and those of a teacher.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            digest.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def check_base(checkpoint_base: str | None, run_base: str | None) -> None:
    """ValueError if the adapters of a checkpoint were trained over another base than that of this run.

    checkpoint_base, run_base: fingerprints of the base; None without adapters.
    """
    _check_equal(checkpoint_base, run_base, "adapters of the base", "no adapters", "type the same model.")


def check_reference(checkpoint_reference: str | None, run_reference: str | None) -> None:
    """ValueError if a checkpoint was trained with another model at model.reference_path than this run loads.

    checkpoint_reference, run_reference: fingerprints of that model; None without one.
    """
    _check_equal(
        checkpoint_reference,
        run_reference,
        "the reference",
        "no reference of its own",
        "put back the model that model.reference_path named, or start the run again.",
    )


def _check_equal(checkpoint: str | None, run: str | None, name: str, none_name: str, advice: str) -> None:
    """ValueError that ends with `advice` if two fingerprints differ; none_name: what a run without one has."""
    if checkpoint != run:
        checkpoint_text, run_text = (
            none_name if fingerprint is None else f"{name} {fingerprint[:12]}" for fingerprint in (checkpoint, run)
        )
        raise ValueError(f"it has {checkpoint_text}, and this run has {run_text} (SHA-256 of its weights); {advice}")
