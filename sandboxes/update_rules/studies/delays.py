"""How much staleness does each update rule tolerate?"""

from sandboxes.toys.study import SMOKE_SETTINGS
from sandboxes.update_rules.family import make_sandbox_study
from trainable.families import Settings

RULES = ("REINFORCE", "PG", "ASPO", "TrajPG", "DG", "Kondo")
DELAYS = (0, 1, 3, 10, 30, 100)

ARMS: dict[str, Settings] = {
    f"{rule}-delay{delay}": {"method": rule, "delay": delay} for rule in RULES for delay in DELAYS
}

STUDY = make_sandbox_study(
    name="sandbox-delays",
    question=__doc__,
    arms=ARMS,
    baseline="REINFORCE-delay0",
    fixed_settings={},
    setting="rule and delay",
    run_template="sandbox_delays_{task}",
    # Longer than the largest delay, so that every arm trains on a batch.
    smoke_settings={
        **SMOKE_SETTINGS,
        "trainer.total_training_steps": 102,
        "trainer.test_freq": 102,
        "trainer.resume_every": 102,
    },
)
