"""Run studies. This is the only package that starts Ray.

Scripts with Ray Tune import from here: the Trainables `PPO`, `UpdateRules`, `Distillation`, `VectorRewards` and
`Pedagogy`, and `param_space`, `make_tuner`, `rules` and `RuleStopper`. `run` does what the command line's `run` does,
with a `RunRequest` and a `LaunchRequest`.
"""

import importlib
from typing import Any

_MODULES = {
    **dict.fromkeys(("run", "RunRequest", "LaunchRequest"), "tune_study.api"),
    "PPO": "trainable.trial",
    "UpdateRules": "sandboxes.update_rules.trial",
    "Distillation": "sandboxes.distillation.trial",
    "VectorRewards": "sandboxes.vector_rewards.trial",
    "Pedagogy": "sandboxes.pedagogy.trial",
    **dict.fromkeys(("make_tuner", "param_space"), "tune_study.tune.tuner"),
    **dict.fromkeys(("RuleStopper", "rules"), "tune_study.tune.stoppers"),
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that the command line starts in a fraction of a second."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_MODULES)
