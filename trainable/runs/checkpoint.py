"""The whole state of a trainer on disk: weights and moments in safetensors, the rest in JSON, nothing pickled.

A checkpoint is a folder. It is written under another name and renamed when it is complete, so that a folder with the
right name is whole; checksums tell one that was damaged later.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainable.runs.links import LinkError
from trainable.runs.run_files import CHECKSUMS_FILE, fsync_path

TENSORS_FILE, VALUES_FILE = "state.safetensors", "state.json"

_PARTIAL_CHECKPOINT = re.compile(r"\.step_\d+\.(?:writing|old|fetching)")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Write a checkpoint at `folder`, replacing one that is there only after the new one is complete.

    Whatever fails, what was there stays; what was half-written is removed, so that a full disk gets its room back.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging_folder = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(staging_folder, ignore_errors=True)  # left by a process that died while it wrote
    staging_folder.mkdir()
    try:
        _write_files(staging_folder, tensors, values)
    except BaseException as error:
        shutil.rmtree(staging_folder, ignore_errors=True)
        if isinstance(error, SafetensorError):
            raise _as_os_error(error) from error
        raise
    _replace_folder(staging_folder, folder)


def _write_files(folder: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, folder / TENSORS_FILE)
    (folder / VALUES_FILE).write_text(json.dumps(values, sort_keys=True), encoding="utf-8")
    checksums = {name: _compute_sha256(folder / name) for name in (TENSORS_FILE, VALUES_FILE)}
    (folder / CHECKSUMS_FILE).write_text(json.dumps(checksums), encoding="utf-8")
    for path in (folder / TENSORS_FILE, folder / VALUES_FILE, folder / CHECKSUMS_FILE, folder):
        fsync_path(path)


def _as_os_error(error: SafetensorError) -> OSError:
    """The system's error inside safetensors' own, such as `(os error 28)`, so that a full disk is seen as one."""
    errno_match = re.search(r"os error (\d+)", str(error))
    error_number = int(errno_match.group(1)) if errno_match else errno.EIO
    return OSError(error_number, os.strerror(error_number), str(error))


def _replace_folder(staging_folder: Path, folder: Path) -> None:
    old_folder = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        shutil.rmtree(old_folder, ignore_errors=True)
        folder.rename(old_folder)
    staging_folder.rename(folder)
    fsync_path(folder.parent)
    shutil.rmtree(old_folder, ignore_errors=True)


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and values of the checkpoint at `folder`.

    If the process died between the two renames of `write_checkpoint`, the one before is read. Raises CheckpointError
    naming the file that is missing or damaged.
    """
    old_folder = folder.with_name(f".{folder.name}.old")
    source = old_folder if not folder.exists() and old_folder.exists() else folder
    try:
        checksums = _read_checksums(source / CHECKSUMS_FILE)
        for name in (TENSORS_FILE, VALUES_FILE):
            if _compute_sha256(source / name) != checksums[name]:
                raise CheckpointError(f"{source / name} is damaged: its checksum is not the one written with it.")
        return load_file(source / TENSORS_FILE), json.loads((source / VALUES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{source} is not a whole checkpoint: {error}.") from error


def _read_checksums(path: Path) -> dict[str, str]:
    try:
        checksums: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        return {name: checksums[name] for name in (TENSORS_FILE, VALUES_FILE)}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error


def write_rolling_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any], max_to_keep: int
) -> None:
    """Write the state after `step` as `folder`/step_<step>, then remove all but the newest `keep` states in it.

    Nothing but states is removed, whole or half-written. LinkError, before anything is written, where `folder` is a
    link.
    """
    if folder.is_symlink():
        raise LinkError(folder)
    write_checkpoint(folder / f"step_{step}", tensors, values)
    for path in list(folder.iterdir()):
        checkpoint_step = _parse_step(path.name)
        is_stale = checkpoint_step is not None and checkpoint_step > step
        if is_stale or _PARTIAL_CHECKPOINT.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    for _, path in list(iter_checkpoints(folder))[max_to_keep:]:
        shutil.rmtree(path, ignore_errors=True)


def iter_checkpoints(folder: Path) -> Iterator[tuple[int, Path]]:
    """(step, folder) of every checkpoint below `folder` whose name ends in its step, the latest first."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    # One that died between its two renames has only the older form, which `read_checkpoint` finds by the real name.
    checkpoint_names = {
        name.removeprefix(".").removesuffix(".old") if name.endswith(".old") else name for name in names
    }
    checkpoints = [(step, folder / name) for name in checkpoint_names if (step := _parse_step(name)) is not None]
    yield from sorted(checkpoints, reverse=True)


def _parse_step(name: str) -> int | None:
    """The step that a checkpoint's name ends in; None for other names."""
    match = re.fullmatch(r"(?:global_)?step_(\d+)", name)
    return int(match.group(1)) if match else None


def _compute_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
