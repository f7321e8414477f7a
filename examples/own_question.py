# %% [markdown]
# # A question of your own, asked from Python
#
# Does a larger learning rate of the policy learn more in the same number of steps? A study is the question, the
# settings that vary, and the arm that the others are compared with. This one is small, so that it ends in half a
# minute: three steps and one seed answer nothing. Take out the settings in `QUICK`, and it trains for real.

# %%
import tune_study
from analysis.report.pages import conclude
from search_spaces.declaration.study import Axis, Study
from search_spaces.language_model.common import PLAIN_SETTINGS
from search_spaces.language_model.family import PPO

STUDY = Study(
    name="my-lr",
    family=PPO,
    question="Does a larger learning rate of the policy learn more in the same number of steps?",
    axis=Axis("actor.lr", {"laptop": ("1e-4", "1e-3")}),
    fixed_settings=PLAIN_SETTINGS,
    baseline="1e-4",
)

# %%
QUICK = {"trainer.total_training_steps": 3, "env.val_env_groups": 16, "env.test_env_groups": 16}

frames = tune_study.run(STUDY, "laptop", seeds=1, settings=QUICK, output="my_question")

# %% [markdown]
# The same call again trains nothing: what has ended is read. With more seeds, the call adds them.

# %%
print(frames.trials[["arm", "seed", "status", "final_val_success"]].to_string())
for sentence in conclude(frames).sentences:
    print(sentence)

# %% [markdown]
# `report.html` in the folder of the results has the figures, and says what this study cannot claim. To keep the study
# as a file with which the command line works, type `python -m tune_study new my-lr --vary actor.lr=1e-4,1e-3`.
