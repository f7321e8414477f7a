"""Run: the only package that starts Ray.

What a script with Ray Tune uses is importable from here: the Trainables `PPO`, `UpdateRules`, `Distillation`,
`VectorRewards` and `Pedagogy`, `param_space`, `make_tuner`, `rules`, `RuleStopper`, and `run`, as of the command line.
"""

import importlib
from typing import Any

_MODULES = {
    "run": "tune_study.api",
    "PPO": "trainable.trial",
    "UpdateRules": "sandboxes.update_rules.trial",
    "Distillation": "sandboxes.distillation.trial",
    "VectorRewards": "sandboxes.vector_rewards.trial",
    "Pedagogy": "sandboxes.pedagogy.trial",
    **dict.fromkeys(("make_tuner", "param_space"), "tune_study.tune.tuner"),
    **dict.fromkeys(("RuleStopper", "rules"), "tune_study.tune.stoppers"),
}


def __getattr__(name: str) -> Any:
    """A public name, which is imported at its first use: the command line needs a fraction of a second to start."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_MODULES)
