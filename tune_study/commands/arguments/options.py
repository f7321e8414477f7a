"""Options that several commands share, with their help texts and the settings that they assign.

Hyphens and underscores of an option are the same: the published scripts use underscores.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

from typer import Argument, Option

from search_spaces.catalog import STUDIES, SUITES
from search_spaces.declaration.presets import PRESETS
from trainable.config.games import GAMES


class Setting(NamedTuple):
    """Marks an option that assigns its value to the dotted setting `name`. As published, some assign several."""

    name: str


def list_assigned_settings(request: object) -> Iterator[tuple[str, str, Any]]:
    """Yield (option, setting, value) for each setting that a typed option of a request assigns."""
    for name, hint in get_type_hints(type(request), include_extras=True).items():
        option, *markers = hint.__metadata__
        value = getattr(request, name)
        if value is not None and value is not False:
            # Inside Annotated, Typer takes the first argument for the default until it reads the signature.
            yield from ((option.default, marker.name, value) for marker in markers)


def complete_study(incomplete: str) -> list[str]:
    """Complete the name of a study or a suite in a shell."""
    return [name for name in (*STUDIES, *SUITES) if name.startswith(incomplete)]


def complete_preset(incomplete: str) -> list[str]:
    """Complete the name of a preset in a shell."""
    return [name for name in PRESETS if name.startswith(incomplete)]


StudyName = Annotated[
    str,
    Argument(
        metavar="STUDY",
        help="Name of a study or a suite, see `list`; or a file with your study, lr.py.",
        autocompletion=complete_study,
    ),
]
RunLocation = Annotated[
    str, Argument(metavar="RUN", help="Folder of the study, results/<run>, or its URI in a storage, <storage>/<run>.")
]
Preset = Annotated[
    str | None,
    Option(
        "--preset",
        metavar="NAME",
        help="laptop, stress or paper; default: paper if it fits the GPUs, else laptop.",
        autocompletion=complete_preset,
    ),
]
Env = Annotated[
    str | None,
    Option(
        "--env",
        metavar="NAME",
        help=f"Game to play: {', '.join(GAMES).replace(',', ' (default),', 1)}, or yours, FILE.py:NAME.",
    ),
]
UpdateMicroBatch = Annotated[
    int | None,
    Option("--ppo-micro-batch-size-per-gpu", metavar="N", help="Micro-batch size of the policy and critic updates."),
    Setting("actor.ppo_micro_batch_size_per_gpu"),
    Setting("critic.ppo_micro_batch_size_per_gpu"),
]
LogProbMicroBatch = Annotated[
    int | None,
    Option(
        "--log-prob-micro-batch-size-per-gpu",
        metavar="N",
        help="Micro-batch size of the passes without gradients of policy and reference.",
    ),
    Setting("rollout.log_prob_micro_batch_size_per_gpu"),
    Setting("rollout.ref_log_prob_micro_batch_size_per_gpu"),
]
Gpus = Annotated[str | None, Option("--gpus", metavar="LIST", help="GPU ids, like 0,1,2,3; default: all visible GPUs.")]
GpusPerExp = Annotated[
    float | None,
    Option("--gpus-per-exp", metavar="N", help="GPUs per run: 1, 4, or a fraction like 0.5."),
    Setting("trainer.n_gpus_per_node"),
]
RayNumCpus = Annotated[
    int | None,
    Option("--ray-num-cpus", metavar="N", help="CPUs that Ray may use; ignored by `probe`."),
    Setting("trainer.ray_num_cpus"),
]
GpuMemoryUtilization = Annotated[
    float | None,
    Option("--gpu-memory-utilization", metavar="V", help="Fraction of GPU memory reserved for vLLM."),
    Setting("rollout.gpu_memory_utilization"),
]
Assignments = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="Change any setting; repeatable. See `settings`.")
]
Code = Annotated[
    list[str] | None,
    Option("--code", metavar="FILE", help="A file whose parts the study uses, like my_loss.py; repeatable."),
]
AcceptChangedFile = Annotated[
    bool, Option("--accept-changed-file", help="Go on although the file of the study has changed since its start.")
]
Trial = Annotated[
    str | None,
    Option(
        "--trial", metavar="NAME", help="Arm (its smallest seed) or name of a run; not needed if there is only one."
    ),
]
ReadArm = Annotated[str | None, Option("--arm", metavar="A", help="Only runs of this arm.")]
ReadSeed = Annotated[int | None, Option("--seed", metavar="S", help="Only runs with this seed.")]
Output = Annotated[
    Path, Option("--output", "-o", metavar="DIR", help="Parent folder of results/, logs/ and model_saving/.")
]
Extend = Annotated[bool, Option("--extend", help="Add new values or seeds to an existing study, or steps to its runs.")]
DryRun = Annotated[bool, Option("--dry-run", help="Print the plan; start and write nothing.")]
