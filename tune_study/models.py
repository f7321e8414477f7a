"""Are the model and the Trainable there? Answered without loading them, before anything starts."""

import glob
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from tune_study.plan import PlanError

SHIPPED = "sokoban-tiny"


def hub_cache(environ: Mapping[str, str]) -> Path:
    """The folder in which the model hub's client keeps what it fetched."""
    for name, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if environ.get(name):
            return Path(environ[name]).expanduser() / below
    home = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".cache")
    return home / "huggingface" / "hub"


def absolute_model(path: str) -> str:
    """`path`, made absolute if it is a folder here: workers run in folders of their own."""
    return str(Path(path).expanduser().absolute()) if Path(path).expanduser().is_dir() else path


def check_model(path: str, environ: Mapping[str, str]) -> None:
    """PlanError unless `path` is the shipped model, a folder with a config.json, or a hub id that was fetched."""
    if path == SHIPPED:
        return
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise PlanError(
                f"The folder {path} is no model: it has no config.json. Type --model with a folder that holds one, "
                f"a hub id, or {SHIPPED}."
            )
        return
    cache = hub_cache(environ)
    if not any(cache.glob(f"models--{glob.escape(path.replace('/', '--'))}/snapshots/*/config.json")):
        raise PlanError(
            f"The model {path} is not here: it is neither {SHIPPED} nor a folder, and the hub cache {cache} does not "
            f"hold it. Fetch it with `hf download {path}`, or type --model {SHIPPED} or a folder."
        )


def check_trainable(name: str) -> None:
    """PlanError unless "module:Class" names a module that is there; it is not imported."""
    module, _, attribute = name.partition(":")
    try:
        is_there = bool(attribute) and find_spec(module) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise PlanError(f"The Trainable {name} cannot be found: name it as module:Class, importable from here.")
