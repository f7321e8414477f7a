"""How much does a student lose by learning from sampled tokens instead of the exact reverse KL, on each task?"""

from search_spaces.companions.distillation import SMOKE_SETTINGS, make_distillation_study
from search_spaces.declaration.presets import Settings
from search_spaces.declaration.study import Contrasts

METHODS = {"exact": "OPDReverseKL", "sampled": "OPDPG"}
TASKS: dict[str, Settings] = {
    "reversal": {"task": "reversal", "vocab_size": 2, "seq_len": 10},
    "soft_reversal": {"task": "soft_reversal", "vocab_size": 8, "seq_len": 8},
    "format_answer": {"task": "format_answer", "vocab_size": 5, "seq_len": 3},
}
CONTRASTS: Contrasts = {
    "sampled against exact, all tasks": tuple((f"{task}-sampled", f"{task}-exact") for task in TASKS),
    **{f"sampled against exact, {task}": ((f"{task}-sampled", f"{task}-exact"),) for task in TASKS},
}

STUDY = make_distillation_study(
    name="opd-exact-sampled",
    question=__doc__,
    arms={
        f"{task}-{name}": {**settings, "method": method}
        for task, settings in TASKS.items()
        for name, method in METHODS.items()
    },
    baseline="reversal-exact",
    setting="task and loss",
    fixed_settings={
        "batch_size": 64,
        "trainer.total_training_steps": 500,
        "trainer.test_freq": 20,
        "trainer.resume_every": 100,
    },
    smoke_settings=SMOKE_SETTINGS,
    contrasts=CONTRASTS,
)
