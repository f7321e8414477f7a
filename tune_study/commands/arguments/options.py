"""Options that several commands share, with their help texts and the settings that they assign.

Hyphens and underscores of an option are the same, since the published scripts use underscores.
"""

from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Argument, Option

from search_spaces.catalog import STUDIES, SUITES
from search_spaces.declaration.presets import PRESETS
from trainable.config.games import GAMES


class Setting(NamedTuple):
    """Marks an option that assigns its value to the dotted setting `name`. As published, some assign several."""

    name: str


def option(metavar: str, help_text: str, *names: str, **constraints: Any) -> Any:
    """Make an option with a value. Without `names` it has the name of its field, such as --save-freq of `save_freq`."""
    return Option(*names, metavar=metavar, help=help_text, **constraints)


def argument(metavar: str, help_text: str, **constraints: Any) -> Any:
    """Make a positional argument."""
    return Argument(metavar=metavar, help=help_text, **constraints)


def complete_study(incomplete: str) -> list[str]:
    """Complete the name of a study or a suite in a shell."""
    return [name for name in (*STUDIES, *SUITES) if name.startswith(incomplete)]


def complete_preset(incomplete: str) -> list[str]:
    """Complete the name of a preset in a shell."""
    return [name for name in PRESETS if name.startswith(incomplete)]


StudyName = Annotated[
    str,
    argument(
        "STUDY",
        "Name of a study or a suite, see `list`; or a file with your study, lr.py.",
        autocompletion=complete_study,
    ),
]
RunLocation = Annotated[
    str, argument("RUN", "Folder of the study, results/<run>, or its URI in a storage, <storage>/<run>.")
]
Preset = Annotated[
    str | None,
    option(
        "NAME",
        "laptop, stress or paper; default: paper if it fits the GPUs, else laptop.",
        autocompletion=complete_preset,
    ),
]
Env = Annotated[
    str | None,
    option("NAME", f"Game to play: {', '.join(GAMES).replace(',', ' (default),', 1)}, or yours, FILE.py:NAME."),
]
UpdateMicroBatch = Annotated[
    int | None,
    option("N", "Micro-batch size of the policy and critic updates."),
    Setting("actor.ppo_micro_batch_size_per_gpu"),
    Setting("critic.ppo_micro_batch_size_per_gpu"),
]
LogProbMicroBatch = Annotated[
    int | None,
    option("N", "Micro-batch size of the passes without gradients of policy and reference."),
    Setting("rollout.log_prob_micro_batch_size_per_gpu"),
    Setting("rollout.ref_log_prob_micro_batch_size_per_gpu"),
]
Gpus = Annotated[str | None, option("LIST", "GPU ids, like 0,1,2,3; default: all visible GPUs.")]
GpusPerExp = Annotated[
    float | None, option("N", "GPUs per run: 1, 4, or a fraction like 0.5."), Setting("trainer.n_gpus_per_node")
]
RayNumCpus = Annotated[
    int | None, option("N", "CPUs that Ray may use; ignored by `probe`."), Setting("trainer.ray_num_cpus")
]
GpuMemoryUtilization = Annotated[
    float | None, option("V", "Fraction of GPU memory reserved for vLLM."), Setting("rollout.gpu_memory_utilization")
]
Assignments = Annotated[
    list[str] | None, option("KEY=VALUE", "Change any setting, see `settings`; repeatable.", "--set")
]
Code = Annotated[list[str] | None, option("FILE", "A file whose parts the study uses, like my_loss.py; repeatable.")]
AcceptChangedFile = Annotated[
    bool, Option("--accept-changed-file", help="Go on although the file of the study has changed since its start.")
]
Trial = Annotated[
    str | None, option("NAME", "Arm (its smallest seed) or name of a run; not needed if there is only one.")
]
ReadArm = Annotated[str | None, option("A", "Only runs of this arm.")]
ReadSeed = Annotated[int | None, option("S", "Only runs with this seed.")]
Output = Annotated[Path, option("DIR", "Parent folder of results/, logs/ and model_saving/.", "--output", "-o")]
Extend = Annotated[bool, Option("--extend", help="Add new values or seeds to an existing study, or steps to its runs.")]
DryRun = Annotated[bool, Option("--dry-run", help="Print the plan; start and write nothing.")]
