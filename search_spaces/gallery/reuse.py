"""How often can a batch be used before training breaks, by epochs or by mini-batches, and does a KL loss allow more?

The arms cross the epochs over a batch with the mini-batches per epoch, without and with a KL loss of 0.03 (k3), under
PPO with a critic. More reuse is more optimizer steps from the same rollouts. The critic keeps its schedule.
"""

import itertools

from search_spaces.declaration.study import Contrasts, Study, make_arms_axis
from search_spaces.language_model.common import PLAIN_SETTINGS, EpisodeShare, resolve_settings
from search_spaces.language_model.family import PPO
from trainable.families import Settings

EPOCHS = (1, 2, 4, 8)
MINI_BATCHES = (1, 4, 16)
COEFFICIENTS = ("0", "0.03")


def _name_arm(epochs: int, mini_batches: int, coefficient: str) -> str:
    return f"e{epochs}-m{mini_batches}-kl{coefficient}"


_ARMS: dict[str, Settings] = {
    _name_arm(epochs, mini_batches, coefficient): {
        "actor.ppo_epochs": epochs,
        "actor.ppo_mini_batch_size": EpisodeShare(1 / mini_batches),
        "actor.ppo_micro_batch_size_per_gpu": 4,  # divides all of them
        "actor.use_kl_loss": coefficient != "0",
        "actor.kl_loss_coef": float(coefficient),
        "actor.kl_loss_type": "low_var_kl",
    }
    for coefficient, epochs, mini_batches in itertools.product(COEFFICIENTS, EPOCHS, MINI_BATCHES)
}

CONTRASTS: Contrasts = {
    **{
        f"{epochs} epochs against 1, KL {coefficient}": tuple(
            (_name_arm(epochs, number, coefficient), _name_arm(1, number, coefficient)) for number in MINI_BATCHES
        )
        for coefficient in COEFFICIENTS
        for epochs in EPOCHS[1:]
    },
    **{
        f"{number} mini-batches against 1, KL {coefficient}": tuple(
            (_name_arm(epochs, number, coefficient), _name_arm(epochs, 1, coefficient)) for epochs in EPOCHS
        )
        for coefficient in COEFFICIENTS
        for number in MINI_BATCHES[1:]
    },
    "16 mini-batches of 1 epoch against 4 of 4": tuple(
        (_name_arm(1, 16, coefficient), _name_arm(4, 4, coefficient)) for coefficient in COEFFICIENTS
    ),
    "KL 0.03 against 0, 8 epochs": tuple((_name_arm(8, n, "0.03"), _name_arm(8, n, "0")) for n in MINI_BATCHES),
}

STUDY = Study(
    name="reuse",
    family=PPO,
    question=__doc__.splitlines()[0],
    axis=make_arms_axis("epochs x mini-batches x KL coefficient", _ARMS, adapt=resolve_settings),
    fixed_settings=PLAIN_SETTINGS,
    n_seeds=5,
    baseline=_name_arm(1, 4, "0"),
    contrasts=CONTRASTS,
)
