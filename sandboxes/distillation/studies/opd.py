"""How does one student learn with one loss? Any combination: `--set task=soft_reversal --set method=OPDPG`."""

from sandboxes.distillation.family import make_distillation_study

STUDY = make_distillation_study(
    name="opd",
    question="How does one student learn with one loss?",
    arms={"single": {}},
    baseline="single",
    setting="combination",
    fixed_settings={},
    run_template="opd_{task}_{method}",
)
