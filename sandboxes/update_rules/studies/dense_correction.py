"""Does correcting a policy along its own prefixes solve a chain of rewards faster than imitating correct sequences?"""

from sandboxes.update_rules.family import REVERSAL_SETTINGS, make_sandbox_study

STUDY = make_sandbox_study(
    name="dense-correction",
    question=__doc__,
    arms={
        "CE": {"method": "CE"},
        "SelfDistillDG": {"method": "SelfDistillDG"},
        "SCOPELite": {"method": "SCOPELite"},
    },
    baseline="CE",
    fixed_settings={
        **REVERSAL_SETTINGS,
        "task": "chain_reversal",
        "trainer.total_training_steps": 1500,
        "trainer.test_freq": 50,
        "trainer.resume_every": 250,
    },
)
