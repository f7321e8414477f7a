# %% [markdown]
# # Read a study in Python
#
# Run a study first, for example the one of the README:
#
#     python -m tune_study run kl --preset laptop --seeds 1 --steps 3 --kl-values 0,0.1 --output out
#
# The cells below read its folder and change nothing in it. The file is a Python program; Jupyter (with jupytext),
# VS Code and PyCharm show it as a notebook.

# %%
import numpy as np
import pandas as pd

import analysis
from analysis.report.pages import conclude, draw_figures

frames = analysis.load("out")
print(frames)

# %% [markdown]
# One row per run: how it ended, and success before and after training.

# %%
print(frames.trials[["arm", "seed", "status", "base_val_success", "final_val_success", "reason"]].to_string())

# %% [markdown]
# Settings are columns of their own, by section. These differ between the runs:

# %%
settings = frames.settings
print(settings.loc[:, settings.nunique() > 1].to_string())

# %% [markdown]
# The verdicts of the report and its sentences. One seed says nothing about settings, and they say so.

# %%
conclusion = conclude(frames)
headings, *rows = conclusion.verdicts
print(pd.DataFrame(rows, columns=headings).to_string(index=False))
for sentence in conclusion.sentences:
    print(sentence)

# %% [markdown]
# Every training step is a row, too. Here is the mean of each arm over its last three steps:

# %%
columns = ["train_success", "entropy", "reward_std", "seconds_step"]
print(frames.steps.groupby("arm").tail(3).groupby("arm")[columns].mean().round(3).to_string())

# %% [markdown]
# The charts of the report: point at a mark for its values, click on a name for it alone.

# %%
chart = frames.plot.curves("train_success")
chart.save("curves.json")
chart  # noqa: B018 (a notebook shows it)

# %% [markdown]
# The figures of the report are charts of Altair: show them in a notebook, change them, save them.

# %%
figures = draw_figures(frames)
print(sorted(figures))
figures["dose_response"].save("success.png")

# %% [markdown]
# What did the policy do in a validation episode that it did not solve?

# %%
episodes = frames.episodes
failed = episodes[~episodes["success"]]
print(f"{len(failed)} of {len(episodes)} recorded episodes failed")
if len(failed):
    print(failed["text"].iloc[0])

# %% [markdown]
# A run can be restored at its last checkpoint, with everything that it trained with: sample with it, measure gradients,
# train on. Nothing of this is written to the study.

# %%
trainer = frames.run("0.1").restore()
levels = trainer.val_levels[:8]
sampled = trainer.roll_out(levels, 4, "sampling")
print(f"success of {len(sampled)} episodes: {np.mean([episode.success for episode in sampled]):.2f}")
trainer.close()
