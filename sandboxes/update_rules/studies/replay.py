"""When all samples are old, what breaks learning from a replay buffer: the samples' age or the buffer's capacity?"""

from sandboxes.toys.study import SMOKE_SETTINGS
from sandboxes.update_rules.family import REVERSAL_SETTINGS, make_sandbox_study

STUDY = make_sandbox_study(
    name="replay",
    question=__doc__,
    arms={
        "DG": {"method": "DG"},
        "ReplayDG-5": {"method": "ReplayDG", "replay_capacity": 5},
        "FreshDG-5": {"method": "FreshDG", "replay_capacity": 5},
        "ReplayDG-32": {"method": "ReplayDG", "replay_capacity": 32},
        "FreshDG-32": {"method": "FreshDG", "replay_capacity": 32},
        "FreshDG-32-decay0.5": {"method": "FreshDG", "replay_capacity": 32, "replay_age_decay": 0.5},
    },
    baseline="DG",
    setting="rule and buffer",
    fixed_settings={**REVERSAL_SETTINGS, "delay": 4},
    # Longer than the delay of 4, since a delay without effect is rejected.
    smoke_settings={**SMOKE_SETTINGS, "trainer.total_training_steps": 7},
)
