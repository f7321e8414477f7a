"""Is TPO better than GRPO at equal rollouts and optimizer steps, and how well does each tolerate reusing rollouts?

Arms `NAME-epochsN` train on 300 batches with N optimizer steps each: at the same N, both rules have equal rollouts and
equal updates. Arms `NAME-epochsN-updates1200` take 1200 optimizer steps in total, on 1200 / N batches. DG is included
at 300 and at 1200 optimizer steps on the same 300 batches, because the documents compare it at 300 steps with other
rules at 1200.
"""

from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.family import make_sandbox_study
from search_spaces.declaration.study import Contrasts
from trainable.families import Settings

EPOCHS = (1, 2, 4, 8)
UPDATES, BATCHES = 1200, 300  # the published condition: 300 batches with 4 optimizer steps each

_GROUPED: dict[str, Settings] = {
    f"{method}-epochs{epochs}": {"method": method, "group_size": 8, "inner_epochs": epochs}
    for method in ("TPO", "GRPO")
    for epochs in EPOCHS
}
ARMS: dict[str, Settings] = {
    **_GROUPED,
    **{
        f"{name}-updates{UPDATES}": {**arm, "trainer.total_training_steps": UPDATES // int(str(arm["inner_epochs"]))}
        for name, arm in _GROUPED.items()
        if not name.endswith("epochs4")  # which takes 1200 steps anyway
    },
    **{f"DG-epochs{epochs}": {"method": "DG", "inner_epochs": epochs} for epochs in (1, 4)},
}

CONTRASTS: Contrasts = {
    "TPO against GRPO at equal rollouts and updates": tuple(
        (f"TPO-epochs{epochs}", f"GRPO-epochs{epochs}") for epochs in EPOCHS
    ),
    **{
        f"TPO against GRPO, inner epochs {epochs}": ((f"TPO-epochs{epochs}", f"GRPO-epochs{epochs}"),)
        for epochs in EPOCHS
    },
    "TPO against GRPO at 1200 updates, inner epochs 1, 2, 8": tuple(
        (f"TPO-epochs{epochs}-updates{UPDATES}", f"GRPO-epochs{epochs}-updates{UPDATES}") for epochs in (1, 2, 8)
    ),
    "TPO, eight inner epochs against one": (("TPO-epochs8", "TPO-epochs1"),),
    "GRPO, eight inner epochs against one": (("GRPO-epochs8", "GRPO-epochs1"),),
    "TPO with one inner epoch against DG": (("TPO-epochs1", "DG-epochs1"),),
    "DG, four inner epochs against one": (("DG-epochs4", "DG-epochs1"),),
}


def scale_training_steps(settings: Settings, base: UpdateRuleConfig) -> Settings:
    """Scale an arm's number of batches to the study's length; `--steps` would shorten only arms that declare none."""
    arm_steps = settings.get("trainer.total_training_steps")
    if not isinstance(arm_steps, int):
        return settings
    return {**settings, "trainer.total_training_steps": arm_steps * base.trainer.total_training_steps // BATCHES}


STUDY = make_sandbox_study(
    name="matched-updates",
    question=__doc__,
    arms=ARMS,
    baseline="GRPO-epochs4",
    contrasts=CONTRASTS,
    adapt=scale_training_steps,
    setting="rule, inner epochs and batches",
)
