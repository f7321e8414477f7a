"""How much does a student lose by learning from sampled tokens instead of the exact reverse KL?

Other tasks: `--set task=format_answer --set vocab_size=5 --set seq_len=3`, or `--set task=soft_reversal`.
"""

from sandboxes.distillation.family import EXACT, make_distillation_study
from sandboxes.toys.study import SMOKE_SETTINGS

STUDY = make_distillation_study(
    name="opd-exact-sampled",
    question=__doc__,
    arms={"exact": EXACT, "sampled": {"method": "OPDPG"}},
    baseline="exact",
    setting="loss",
    fixed_settings={
        "batch_size": 64,
        "trainer.total_training_steps": 500,
        "trainer.test_freq": 20,
        "trainer.resume_every": 100,
    },
    smoke_settings=SMOKE_SETTINGS,
)
