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
from trainable.runs.run_files import SUMS, sync_path

TENSORS, VALUES = "state.safetensors", "state.json"

_HALF_WRITTEN = re.compile(r"\.step_\d+\.(?:writing|old|fetching)")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Write a checkpoint at `folder`, replacing one that is there only after the new one is complete.

    Whatever fails, what was there stays; what was half-written is removed, so that a full disk gets its room back.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)  # left by a process that died while it wrote
    beside.mkdir()
    try:
        _write_files(beside, tensors, values)
    except BaseException as error:
        shutil.rmtree(beside, ignore_errors=True)
        if isinstance(error, SafetensorError):
            raise _as_os_error(error) from error
        raise
    _put_in_place(beside, folder)


def _write_files(beside: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, beside / TENSORS)
    (beside / VALUES).write_text(json.dumps(values, sort_keys=True), encoding="utf-8")
    sums = {name: _sha256(beside / name) for name in (TENSORS, VALUES)}
    (beside / SUMS).write_text(json.dumps(sums), encoding="utf-8")
    for path in (beside / TENSORS, beside / VALUES, beside / SUMS, beside):
        sync_path(path)


def _as_os_error(error: SafetensorError) -> OSError:
    """The system's error inside safetensors' own, such as `(os error 28)`, so that a full disk is seen as one."""
    found = re.search(r"os error (\d+)", str(error))
    number = int(found.group(1)) if found else errno.EIO
    return OSError(number, os.strerror(number), str(error))


def _put_in_place(beside: Path, folder: Path) -> None:
    old = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    beside.rename(folder)
    sync_path(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and values of the checkpoint at `folder`.

    If the process died between the two renames of `write_checkpoint`, the one before is read. Raises CheckpointError
    naming the file that is missing or damaged.
    """
    old = folder.with_name(f".{folder.name}.old")
    source = old if not folder.exists() and old.exists() else folder
    try:
        sums = _read_sums(source / SUMS)
        for name in (TENSORS, VALUES):
            if _sha256(source / name) != sums[name]:
                raise CheckpointError(f"{source / name} is damaged: its checksum is not the one written with it.")
        return load_file(source / TENSORS), json.loads((source / VALUES).read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{source} is not a whole checkpoint: {error}.") from error


def _read_sums(path: Path) -> dict[str, str]:
    try:
        sums: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        return {name: sums[name] for name in (TENSORS, VALUES)}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error


def write_rolling(folder: Path, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any], keep: int) -> None:
    """Write the state after `step` as `folder`/step_<step>, then remove all but the newest `keep` states in it.

    Nothing but states is removed, whole or half-written. LinkError, before anything is written, where `folder` is a
    link.
    """
    if folder.is_symlink():
        raise LinkError(folder)
    write_checkpoint(folder / f"step_{step}", tensors, values)
    for path in list(folder.iterdir()):
        number = _step(path.name)
        of_an_attempt_given_up = number is not None and number > step
        if of_an_attempt_given_up or _HALF_WRITTEN.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    for _, path in list(numbered(folder))[keep:]:
        shutil.rmtree(path, ignore_errors=True)


def numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    """(step, folder) of every checkpoint below `folder` whose name ends in its step, the latest first."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    # One that died between its two renames has only the older form, which `read_checkpoint` finds by the real name.
    whole = {name.removeprefix(".").removesuffix(".old") if name.endswith(".old") else name for name in names}
    found = [(step, folder / name) for name in whole if (step := _step(name)) is not None]
    yield from sorted(found, reverse=True)


def _step(name: str) -> int | None:
    """The step that a checkpoint's name ends in; None for other names."""
    found = re.fullmatch(r"(?:global_)?step_(\d+)", name)
    return int(found.group(1)) if found else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
