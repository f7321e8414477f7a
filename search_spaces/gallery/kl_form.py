"""Where should a KL penalty stand and which estimator should it use: a loss by k1, k2 or k3, or k1 or k3 in the reward?

The arms cross the form of the penalty with its coefficient, under PPO with a critic. Advantages are whitened, and a
penalty in the reward is whitened with them, so that equal coefficients are not equal weights: forms are compared over
all three coefficients.
"""

from search_spaces.declaration.study import Contrasts, Study, make_arms_axis
from search_spaces.language_model.common import PLAIN_SETTINGS
from search_spaces.language_model.family import PPO
from trainable.families import Settings

FORMS: dict[str, str] = {
    "loss-k1": "actor.kl_loss_type=kl",
    "loss-k2": "actor.kl_loss_type=mse",
    "loss-k3": "actor.kl_loss_type=low_var_kl",
    "reward-k1": "algorithm.kl_penalty=kl",
    "reward-k3": "algorithm.kl_penalty=low_var_kl",
}
"""The setting that selects the estimator of each form."""
COEFFICIENTS = ("0.01", "0.1", "0.3")


def _make_arm(form: str, coefficient: str) -> Settings:
    setting, estimator = FORMS[form].split("=")
    if form.startswith("loss"):
        return {setting: estimator, "actor.use_kl_loss": True, "actor.kl_loss_coef": float(coefficient)}
    return {setting: estimator, "algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": float(coefficient)}


_ARMS: dict[str, Settings] = {
    "none": {"actor.use_kl_loss": False},
    **{f"{form}-{coefficient}": _make_arm(form, coefficient) for form in FORMS for coefficient in COEFFICIENTS},
}


def _pair_forms(first: str, second: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"{first}-{coefficient}", f"{second}-{coefficient}") for coefficient in COEFFICIENTS)


CONTRASTS: Contrasts = {
    "k1 in the reward against k3 as a loss": _pair_forms("reward-k1", "loss-k3"),
    "k2 as a loss against k1 in the reward": _pair_forms("loss-k2", "reward-k1"),
    "k2 as a loss against k3 as a loss": _pair_forms("loss-k2", "loss-k3"),
    "k3 in the reward against k1 in the reward": _pair_forms("reward-k3", "reward-k1"),
    "k1 as a loss against none": tuple((f"loss-k1-{coefficient}", "none") for coefficient in COEFFICIENTS),
}

STUDY = Study(
    name="kl-form",
    family=PPO,
    question=__doc__.splitlines()[0],
    axis=make_arms_axis("form of the KL penalty x coefficient", _ARMS),
    fixed_settings=PLAIN_SETTINGS,
    n_seeds=5,
    baseline="none",
    contrasts=CONTRASTS,
)
