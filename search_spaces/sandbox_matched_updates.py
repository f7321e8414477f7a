"""Is TPO ahead of GRPO at equal rollouts and equal optimizer steps, and how does each bear reusing its rollouts?

Arms `NAME-epochsN` train on 300 batches, N optimizer steps each: at one N, both have equal rollouts and equal updates.
Arms `NAME-epochsN-updates1200` make 1200 optimizer steps in all, on 1200 / N batches. DG is there at 300 and at 1200
optimizer steps on the same 300 batches, since the documents compare it at 300 with others at 1200.
"""

from search_spaces.family import Settings
from search_spaces.sandbox import REVERSAL, sandbox_study

EPOCHS = (1, 2, 4, 8)
UPDATES = 1200

ARMS: dict[str, Settings] = {
    **{
        f"{method}-epochs{epochs}": {"method": method, "group_size": 8, "inner_epochs": epochs}
        for method in ("TPO", "GRPO")
        for epochs in EPOCHS
    },
    **{
        f"{method}-epochs{epochs}-updates{UPDATES}": {
            "method": method,
            "group_size": 8,
            "inner_epochs": epochs,
            "trainer.total_training_steps": UPDATES // epochs,
        }
        for method in ("TPO", "GRPO")
        for epochs in EPOCHS
        if UPDATES // epochs != REVERSAL["trainer.total_training_steps"]
    },
    **{f"DG-epochs{epochs}": {"method": "DG", "inner_epochs": epochs} for epochs in (1, 4)},
}

STUDY = sandbox_study(
    name="matched-updates",
    question=__doc__,
    arms=ARMS,
    baseline="GRPO-epochs4",
    setting="rule, inner epochs and batches",
)
