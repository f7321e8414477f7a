"""Read and write checkpoints: weights and moments as safetensors, everything else as JSON, without pickle.

A checkpoint is a folder that is written under a temporary name and renamed when complete, so a folder with the final
name is always complete. Checksums reveal later damage.

The tensors of a large checkpoint are in several files, which threads write and hash in parallel, since SHA-256 on one
core is slower than a disk. Only files that are being written take host memory.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainable.config.constants import MAX_TENSORS_FILE_BYTES
from trainable.files.json_values import parse_json
from trainable.files.paths import check_path, compute_sha256, fsync_path, read_bytes, write_text
from trainable.runs.failures import CheckpointError
from trainable.runs.run_files import CHECKSUMS_FILE

T = TypeVar("T")
U = TypeVar("U")

TENSORS_FILE, VALUES_FILE = "state.safetensors", "state.json"
"""TENSORS_FILE has the tensors of a checkpoint if they fit in one file."""

_PARTIAL_CHECKPOINT = re.compile(r"\.step_\d+\.(?:writing|old)")
"""Folders left by a dead process: partially written, or replaced by a newer checkpoint."""

_MAX_VALUES_BYTES = 2**30
"""Maximum size of VALUES_FILE."""


def write_checkpoint(
    folder: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any], max_file_bytes: int = MAX_TENSORS_FILE_BYTES
) -> None:
    """Write a checkpoint to `folder`, replacing an earlier one only after the new one is complete.

    max_file_bytes: bytes of tensors per file, unless a single tensor is larger. As many files are written in parallel
    as torch has threads (see `torch.set_num_threads`).

    If writing fails, the earlier checkpoint stays, and incomplete files are removed to free disk space.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging_folder = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(staging_folder, ignore_errors=True)  # left by a process that died while writing
    staging_folder.mkdir()
    try:
        _write_files(staging_folder, group_tensors(tensors, max_file_bytes), values)
    except BaseException as error:  # including KeyboardInterrupt
        shutil.rmtree(staging_folder, ignore_errors=True)
        if isinstance(error, SafetensorError):
            # It writes through Rust, whose I/O errors arrive as text such as `(os error 28)`. Callers recognize a full
            # disk by an OSError, and wait.
            errno_match = re.search(r"os error (\d+)", str(error))
            error_number = int(errno_match.group(1)) if errno_match else errno.EIO
            raise OSError(error_number, os.strerror(error_number), str(error)) from error
        raise
    # Outside the `try`, whose handler deletes the staging folder: the new checkpoint is complete now, and must survive
    # an error while it replaces the old one.
    _replace_folder(staging_folder, folder)


def group_tensors(tensors: Mapping[str, Tensor], max_bytes: int) -> dict[str, dict[str, Tensor]]:
    """Group tensors by file name, in order, with up to `max_bytes` per file, unless a single tensor is larger.

    Example:
        >>> groups = group_tensors({"a": torch.zeros(2), "b": torch.zeros(1), "c": torch.zeros(2)}, max_bytes=12)
        >>> {file_name: list(group) for file_name, group in groups.items()}
        {'state-00001-of-00002.safetensors': ['a', 'b'], 'state-00002-of-00002.safetensors': ['c']}
    """
    groups: list[dict[str, Tensor]] = [{}]
    group_bytes = 0
    for name, tensor in tensors.items():
        if groups[-1] and group_bytes + tensor.nbytes > max_bytes:
            groups.append({})
            group_bytes = 0
        groups[-1][name] = tensor
        group_bytes += tensor.nbytes
    if len(groups) == 1:
        return {TENSORS_FILE: groups[0]}
    return {f"state-{number:05d}-of-{len(groups):05d}.safetensors": group for number, group in enumerate(groups, 1)}


def _write_files(folder: Path, groups: Mapping[str, Mapping[str, Tensor]], values: Mapping[str, Any]) -> None:
    def write_tensors(name: str) -> str:
        # safetensors accepts neither views with gaps nor tensors that require gradients.
        tensors = {key: tensor.detach().contiguous().cpu() for key, tensor in groups[name].items()}
        save_file(tensors, folder / name)
        fsync_path(folder / name)
        return compute_sha256(folder / name)

    checksums = dict(zip(groups, _map_in_threads(write_tensors, groups), strict=True))
    write_text(folder / VALUES_FILE, json.dumps(values, sort_keys=True))
    # Everything must be on disk before the folder is renamed, or a crash of the machine could keep the new name but
    # lose the contents. `write_text` syncs the file and the folder.
    write_text(folder / CHECKSUMS_FILE, json.dumps({**checksums, VALUES_FILE: compute_sha256(folder / VALUES_FILE)}))


def _map_in_threads(function: Callable[[T], U], items: Iterable[T]) -> list[U]:
    """Call `function` on each item in as many threads as torch has. Raise the first error once running calls ended."""
    items = list(items)
    n_threads = min(len(items), torch.get_num_threads())
    if n_threads <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(n_threads) as executor:
        try:
            return list(executor.map(function, items))
        except BaseException:
            executor.shutdown(cancel_futures=True)
            raise


def _replace_folder(staging_folder: Path, folder: Path) -> None:
    """Rename `staging_folder` to `folder`. At any time, a complete checkpoint exists under a name that is read."""
    old_folder = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        # A folder cannot be renamed onto a non-empty folder, so move the earlier checkpoint away first. If the process
        # dies before the second rename, `read_checkpoint` reads the earlier one from `old_folder`.
        shutil.rmtree(old_folder, ignore_errors=True)
        folder.rename(old_folder)
    staging_folder.rename(folder)
    fsync_path(folder.parent)  # the rename must be on disk before the earlier checkpoint is removed
    shutil.rmtree(old_folder, ignore_errors=True)


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and values of the checkpoint at `folder`.

    If a process died between the two renames of `write_checkpoint`, the earlier checkpoint is read. Raises
    CheckpointError, which names the file, if one is missing or damaged.
    """
    old_folder = folder.with_name(f".{folder.name}.old")
    source = old_folder if not folder.exists() and old_folder.exists() else folder
    try:
        check_path(source.parent, source)
        checksums = _read_checksums(source / CHECKSUMS_FILE)
        _map_in_threads(lambda name: _check_file(source / name, checksums[name]), checksums)
        tensors: dict[str, Tensor] = {}
        for name in checksums:
            if name != VALUES_FILE:
                tensors |= load_file(source / name)
        values = parse_json(read_bytes(source / VALUES_FILE, _MAX_VALUES_BYTES))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{source} is not a complete checkpoint: {error}.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{source / VALUES_FILE} is damaged: it does not hold a JSON object.")
    return tensors, values


def _check_file(path: Path, checksum: str) -> None:
    if compute_sha256(path) != checksum:
        raise CheckpointError(f"{path} is damaged: it does not match its recorded checksum.")


def _read_checksums(path: Path) -> dict[str, str]:
    """Read the SHA-256 of each file of a checkpoint, by file name.

    Raises CheckpointError for other contents, and OSError if `path` cannot be read.
    """
    try:
        checksums: dict[str, str] = parse_json(read_bytes(path))
        names = set(checksums) - {VALUES_FILE}
        count = len(names)
        numbered_names = {f"state-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)}
        # So a name from a folder of unknown origin is never a path to somewhere else.
        if not names or names not in ({TENSORS_FILE}, numbered_names):
            raise ValueError("it does not name the files of a checkpoint")
        return {name: checksums[name] for name in (*sorted(names), VALUES_FILE)}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error


def write_rolling_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    max_to_keep: int,
    best_step: int | None = None,
) -> None:
    """Write the checkpoint after `step` to `folder`/step_<step>, then keep only the newest `max_to_keep` in `folder`.

    best_step: the step of a checkpoint to keep in addition, or None.

    Only checkpoints are removed from `folder`, complete or not. Raises UnsafePathError before anything is written if
    `folder` is a symbolic link.
    """
    check_path(folder.parent, folder)
    write_checkpoint(folder / f"step_{step}", tensors, values)
    # Only now, so that the run can still continue if writing failed. Checkpoints of later steps are removed, too: the
    # run went back, and the next start would take them for the newest.
    steps = (_parse_step(path.name) for path in folder.iterdir())
    newest_steps = sorted(number for number in steps if number is not None and number <= step)[-max_to_keep:]
    remove_checkpoints(folder, {*newest_steps, best_step})


def remove_checkpoints(folder: Path, wanted_steps: Set[int | None]) -> None:
    """Remove the checkpoints in `folder`, complete or not, except complete ones after `wanted_steps`.

    Nothing else in `folder` is removed. Raises UnsafePathError if `folder` is a symbolic link.
    """
    check_path(folder.parent, folder)
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        step = _parse_step(path.name)
        if _PARTIAL_CHECKPOINT.fullmatch(path.name) or (step is not None and step not in wanted_steps):
            shutil.rmtree(path, ignore_errors=True)


def iter_checkpoints(folder: Path) -> Iterator[tuple[int, Path]]:
    """Iterate over (step, folder) of the checkpoints step_<N> and global_step_<N> in `folder`, latest step first.

    Includes unusable checkpoints.
    """
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    # If a process died between the two renames, only `.<name>.old` exists. `read_checkpoint` finds it by <name>.
    checkpoint_names = {
        name.removeprefix(".").removesuffix(".old") if name.endswith(".old") else name for name in names
    }
    checkpoints = [(step, folder / name) for name in checkpoint_names if (step := _parse_step(name)) is not None]
    yield from sorted(checkpoints, reverse=True)


def _parse_step(name: str) -> int | None:
    """Parse the step in a checkpoint's name. None for other names."""
    match = re.fullmatch(r"(?:global_)?step_(\d+)", name)
    return int(match.group(1)) if match else None
