"""At which mismatch of sampler and trainer does success fall, and which importance correction saves it?

An engine that computes less exactly than the trainer samples from a different distribution, and its mismatch grows when
a policy degenerates; so in published runs a collapse and a mismatch are hard to tell apart. Here the mismatch is a
dose: noise, relative to the size of each weight, that every sync adds to the engine's copy. bfloat16 rounds weights by
about 0.001 of their size. Training samples from this copy, and validations from the policy itself. The arms cross the
dose with the corrections of the loss that trainers offer: none, truncated importance sampling of tokens, masks of whole
episodes, and the band of IcePop. The check of a fixed prompt, which ends other runs, only measures here: the column
engine_prompt_mismatch is to be compared with the usual tolerance.
"""

from search_spaces.declaration.study import Contrasts, Study, make_arms_axis
from search_spaces.language_model.common import SWEEP_SETTINGS
from search_spaces.language_model.family import PPO
from trainable.families import Settings

DOSES = ("0.003", "0.03", "0.1")
CORRECTIONS: dict[str, Settings] = {
    "none": {"actor.tis_imp_ratio_cap": None},
    "tis": {"actor.tis_imp_ratio_cap": 2.0},
    "episodemask": {"actor.tis_imp_ratio_cap": 3.0, "actor.tis_mode": "sequence_mask"},
    "icepop": {"actor.tis_imp_ratio_cap": 5.0, "actor.tis_imp_ratio_floor": 0.5, "actor.tis_mode": "token_mask"},
}
"""Settings of each correction by name, with the published caps and floors."""

BASELINE = "noise0-none"


def _name_arm(dose: str, correction: str) -> str:
    return f"noise{dose}-{correction}"


_ARMS: dict[str, Settings] = {
    # With a noise of 0 there would be no copy; this one is lost in float32 rounding.
    BASELINE: {"rollout.weight_noise": 1e-30, **CORRECTIONS["none"]},
    **{
        _name_arm(dose, correction): {"rollout.weight_noise": float(dose), **settings}
        for dose in DOSES
        for correction, settings in CORRECTIONS.items()
    },
}

CONTRASTS: Contrasts = {
    **{f"Noise {dose} against none, uncorrected": ((_name_arm(dose, "none"), BASELINE),) for dose in DOSES},
    **{
        f"Correction {correction} against none, noise {dose}": ((_name_arm(dose, correction), _name_arm(dose, "none")),)
        for dose in DOSES
        for correction in CORRECTIONS
        if correction != "none"
    },
}

STUDY = Study(
    name="mismatch",
    family=PPO,
    question=__doc__.splitlines()[0],
    axis=make_arms_axis("noise of the engine's weights x importance correction", _ARMS),
    fixed_settings={
        **SWEEP_SETTINGS,
        "actor.use_kl_loss": False,
        "actor.kl_loss_coef": 0.0,
        "actor.entropy_coeff": 0.0,
        "filter.rollout_filter_value": 1.0,
        # The check measures without ending runs.
        "rollout.logprob_tolerance": 1000.0,
    },
    n_seeds=3,
    baseline=BASELINE,
    contrasts=CONTRASTS,
)
