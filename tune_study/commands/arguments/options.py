"""The options of the command line: their spellings and help texts.

The published scripts spell options with underscores, so both spellings are accepted.
"""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from search_spaces import STUDIES, SUITES
from search_spaces.declaration.presets import PRESETS
from trainable.config.games import GAMES


def complete_study(incomplete: str) -> list[str]:
    """The names of studies and suites that begin with `incomplete`, for the completion in a shell."""
    return [name for name in (*STUDIES, *SUITES) if name.startswith(incomplete)]


def complete_preset(incomplete: str) -> list[str]:
    """The names of presets that begin with `incomplete`, for the completion in a shell."""
    return [name for name in PRESETS if name.startswith(incomplete)]


Version = Annotated[bool, Option("--version", help="Print the version and exit.")]
Json = Annotated[bool, Option("--json", help="Print JSON: an object with `studies` and `suites`.")]
StudyName = Annotated[
    str,
    Argument(
        metavar="STUDY",
        help="Name of a study or a suite, see `list`; or a file with your study, lr.py.",
        autocompletion=complete_study,
    ),
]
StudyFile = Annotated[
    str | None, Option("--study", metavar="FILE", help="The file of a study that was run from a file, like lr.py.")
]
Code = Annotated[
    list[str] | None,
    Option("--code", metavar="FILE", help="A file whose parts the study uses, like my_loss.py; repeatable."),
]
Allow = Annotated[
    list[str] | None,
    Option(
        "--allow",
        metavar="KEY=VALUE",
        help="An address, environment variable, file or model that the folder of somebody else names and that may be "
        "used, as the command prints it; repeatable.",
    ),
]
NewStudyName = Annotated[str, Argument(metavar="NAME", help="Name of the new study, like my-lr.")]
VariedSettings = Annotated[
    list[str] | None,
    Option("--vary", metavar="KEY=VALUES", help="A setting and its values, like actor.lr=1e-4,3e-4; repeatable."),
]
NewStudyFile = Annotated[Path | None, Option("--to", metavar="FILE", help="File to write; default: NAME.py here.")]
AcceptChangedFile = Annotated[
    bool, Option("--accept-changed-file", help="Go on although the file of the study has changed since its start.")
]
ListedStudy = Annotated[
    str | None,
    Argument(metavar="STUDY", help="Name of the study; default: all.", autocompletion=complete_study),
]
SettingsStudy = Annotated[
    str,
    Argument(
        metavar="[STUDY|WORD]",
        help="Name of the study; sandbox studies have different settings. Or a word, to look for settings of kl.",
        autocompletion=complete_study,
    ),
]
AllSettings = Annotated[bool, Option("--all", help="List every setting, not only the most common ones.")]
RunLocation = Annotated[
    str, Argument(metavar="RUN", help="Folder of the study, results/<run>, or its URI in a storage, <storage>/<run>.")
]
Address = Annotated[
    str | None,
    Option("--address", metavar="A", help="Ray cluster to run on (host:port, or auto); default: this machine."),
]
Storage = Annotated[
    str | None,
    Option("--storage", metavar="URI", help="Also copy results and checkpoints to s3://, gs://, or a shared path."),
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
Model = Annotated[
    str | None, Option("--model", metavar="PATH", help="Model to train: sokoban-tiny, a folder, or a hub id.")
]
Env = Annotated[
    str | None,
    Option(
        "--env",
        metavar="NAME",
        help=f"Game to play: {', '.join(GAMES).replace(',', ' (default),', 1)}, or yours, FILE.py:NAME.",
    ),
]
Steps = Annotated[int | None, Option("--steps", metavar="N", help="Training steps per run.")]
Values = Annotated[
    str | None, Option("--values", metavar="LIST", help="Values of the study's axis, for any study; see `list`.")
]
IncludeZero = Annotated[
    str | None,
    Option(
        "--rollout_filter_include_zero",
        "--rollout-filter-include-zero",
        metavar="BOOL",
        help="In the studies kl and entropy: keep groups whose rewards are all equal (default: True).",
    ),
]
KLType = Annotated[
    str | None, Option("--kl-type", "--kl_type", metavar="NAME", help="Study smoke: low_var_kl (default), kl or mse.")
]
FilterStrategy = Annotated[
    str | None,
    Option(
        "--rollout_filter_strategy",
        "--rollout-filter-strategy",
        metavar="NAME",
        help="Studies smoke and smoke-all: top_p (default), top_k (takes a count of groups), min_p or top_f.",
    ),
]
SkipStatuses = Annotated[
    str,
    Option(
        "--skip-statuses",
        "--skip_statuses",
        metavar="LIST",
        help="Skip runs that already have one of these statuses; the list may also include failed and interrupted.",
    ),
]
UpdateMicroBatch = Annotated[
    int | None,
    Option(
        "--ppo-micro-batch-size-per-gpu",
        "--ppo_micro_batch_size_per_gpu",
        metavar="N",
        help="Micro-batch size of the policy and critic updates.",
    ),
]
LogProbMicroBatch = Annotated[
    int | None,
    Option(
        "--log-prob-micro-batch-size-per-gpu",
        "--log_prob_micro_batch_size_per_gpu",
        metavar="N",
        help="Micro-batch size of the passes without gradients of policy and reference.",
    ),
]
Gpus = Annotated[str | None, Option("--gpus", metavar="LIST", help="GPU ids, like 0,1,2,3; default: all visible GPUs.")]
GpusPerExp = Annotated[
    float | None,
    Option("--gpus-per-exp", "--gpus_per_exp", metavar="N", help="GPUs per run: 1, 4, or a fraction like 0.5."),
]
RayNumCpus = Annotated[
    int | None,
    Option("--ray-num-cpus", "--ray_num_cpus", metavar="N", help="CPUs that Ray may use; ignored by `probe`."),
]
GpuMemoryUtilization = Annotated[
    float | None,
    Option(
        "--gpu-memory-utilization",
        "--gpu_memory_utilization",
        metavar="V",
        help="Fraction of GPU memory reserved for vLLM.",
    ),
]
GpuMemoryGib = Annotated[
    float | None,
    Option(
        "--gpu-memory-gib",
        "--gpu_memory_gib",
        metavar="N",
        help="Plan for GPUs with N GiB of memory; default: the memory of the visible GPUs, else 80.",
    ),
]
SaveFreq = Annotated[
    int | None, Option("--save-freq", "--save_freq", metavar="N", help="Save a checkpoint every N steps; -1: never.")
]
KeepBest = Annotated[
    bool,
    Option("--keep-best", help="Also keep the checkpoint of each run's best validation, for `export --step best`."),
]
Seeds = Annotated[int | None, Option("--seeds", metavar="N", help="Number of seeds per arm: seeds 0 to N-1.")]
BaselineSeeds = Annotated[
    int | None, Option("--baseline-seeds", metavar="N", help="Least number of seeds of the baseline arm.")
]
UntilResolved = Annotated[
    bool, Option("--until-resolved", help="Add seeds to open arms and the baseline until every arm has a verdict.")
]
MaxSeeds = Annotated[
    int | None, Option("--max-seeds", metavar="N", help="Seeds per arm at which --until-resolved ends; default 20.")
]
Assignments = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="Change any setting; repeatable. See `settings`.")
]
ConfigFiles = Annotated[
    list[Path] | None,
    Option(
        "--config", metavar="FILE", help="A file with a line KEY=VALUE per setting, repeatable; --set takes precedence."
    ),
]
Thresholds = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="Change a threshold of early_stop; repeatable.")
]
Trial = Annotated[
    str | None,
    Option(
        "--trial", metavar="NAME", help="Arm (its smallest seed) or name of a run; not needed if there is only one."
    ),
]
StudyFolders = Annotated[
    list[Path], Argument(metavar="FOLDER...", help="Output folders, or folders results/<run>, whose studies to read.")
]
NumPoints = Annotated[
    int, Option("--trials", metavar="N", min=2, help="Number of points to try; the first is the default settings.")
]
SearchSpace = Annotated[
    list[str] | None,
    Option(
        "--vary",
        metavar="SPEC",
        help="A setting to change: KEY=LOW:HIGH (:log or :linear), KEY=VALUE,VALUE, or KEY alone; 'SPEC if KEY=VALUE' "
        "for a setting that depends on another; repeatable. Default: rate, KL, entropy, clip range and filter.",
    ),
]
Objectives = Annotated[
    str, Option("--objective", metavar="LIST", help="success, or success,cost (cost: tokens) for a Pareto front.")
]
PointsPerRound = Annotated[
    int, Option("--points-per-round", metavar="N", min=1, help="Points that are drawn from the same results.")
]
SearchSeed = Annotated[int, Option("--search-seed", metavar="S", min=0, help="Seed of the draws of points.")]
Asha = Annotated[
    int | None,
    Option(
        "--asha",
        metavar="N",
        min=1,
        help="Successive halving: at steps N, 3N, 9N, ... stop runs that are not in the best third. They are censored: "
        "their points have no outcome.",
    ),
]
ConfirmSeeds = Annotated[
    int,
    Option(
        "--confirm-seeds",
        metavar="N",
        min=0,
        help="Fresh seeds with which the best point is compared with the default at the end; 0: no comparison.",
    ),
]
ConfirmedArm = Annotated[str, Option("--arm", metavar="A", help="The arm whose result is confirmed.")]
ComparedArm = Annotated[
    str | None, Option("--baseline", metavar="B", help="The arm to compare with; default: the baseline of the study.")
]
FreshSeeds = Annotated[int, Option("--seeds", metavar="N", help="Number of fresh seeds for each of the two arms.")]
ComparedRuns = Annotated[
    list[str], Argument(metavar="RUN...", help="Folders results/<run> or URIs of two studies or more of one family.")
]
ComparisonFile = Annotated[Path, Option("--to", metavar="FILE", help="Where the page is written.")]
FirstTestSeed = Annotated[
    int, Option("--first-test-seed", metavar="S", min=0, help="Choose alarms on lower seeds, score them from S on.")
]
ReadArm = Annotated[str | None, Option("--arm", metavar="A", help="Only runs of this arm.")]
ReadSeed = Annotated[int | None, Option("--seed", metavar="S", help="Only runs with this seed.")]
ReadStep = Annotated[
    int | None, Option("--step", metavar="N", help="Episodes of the validation after step N; default: the last one.")
]
Port = Annotated[int, Option("--port", metavar="N", min=0, max=65535, help="Port on 127.0.0.1; default: a free one.")]
Failed = Annotated[bool, Option("--failed", help="Only episodes without success.")]
Trained = Annotated[
    bool,
    Option("--trained", help="Episodes that were trained on, with their advantages (trainer.log_train_generations)."),
]
Solved = Annotated[bool, Option("--solved", help="Only episodes with success.")]
ProbeAlgo = Annotated[
    str | None,
    Option("--algo", metavar="NAME", help="Study gradient-analysis: choose the run of PPO or of GRPO."),
]
CheckpointStep = Annotated[
    int | None,
    Option("--checkpoint-step", "--checkpoint_step", metavar="N", help="Step of the checkpoint; default: the newest."),
]
CheckpointRoot = Annotated[
    Path | None,
    Option(
        "--checkpoint-root",
        "--checkpoint_root",
        metavar="DIR",
        help="Folder that contains global_step_<N>; default: the run's.",
    ),
]
ResumeFromPath = Annotated[
    Path | None,
    Option(
        "--resume-from-path", "--resume_from_path", metavar="DIR", help="Path of the checkpoint folder global_step_<N>."
    ),
]
WithVal = Annotated[bool, Option("--with-val", "--with_val", help="First validate the run, sampled and greedy.")]
ListSteps = Annotated[bool, Option("--list-steps", "--list_steps", help="List the analyses; plot nothing.")]
AnalyzedSteps = Annotated[
    list[str] | None, Option("--step", metavar="N", help="Analyzed step, or a list like 1,51; repeatable.")
]
PlotDir = Annotated[
    Path | None,
    Option(
        "--output-dir",
        "--output_dir",
        metavar="DIR",
        help="Folder for the figures; default: RUN/figures/gradients/<run>.",
    ),
]
Source = Annotated[
    str | None,
    Option("--source", metavar="NAME", help="train (analyses during training) or probe (of a checkpoint)."),
]
Output = Annotated[
    Path, Option("--output", "-o", metavar="DIR", help="Parent folder of results/, logs/ and model_saving/.")
]
Extend = Annotated[bool, Option("--extend", help="Add new values or seeds to an existing study, or steps to its runs.")]
MaxConcurrent = Annotated[
    int | None, Option("--max-concurrent", "--max_concurrent", metavar="N", help="Maximum number of concurrent runs.")
]
MaxHours = Annotated[
    float | None,
    Option(
        "--max-hours",
        metavar="H",
        min=0,
        max=10_000,
        help="Stop after H hours, like Ctrl-C: steps are saved.",
    ),
]
ExportedArm = Annotated[str, Option("--arm", metavar="A", help="The arm whose policy is written.")]
ExportedSeed = Annotated[int | None, Option("--seed", metavar="S", help="Seed of the run; default: the smallest one.")]
ExportedStep = Annotated[
    str | None,
    Option("--step", metavar="N", help="Step of a checkpoint, or `best` (of a run with --keep-best); default: newest."),
]
DemoFolder = Annotated[
    Path, Option("--output", "-o", metavar="DIR", help="The folder in which the recorded study is unpacked.")
]
ExportFolder = Annotated[Path, Option("--to", metavar="DIR", help="The folder to write, new or empty.")]
Adapters = Annotated[bool, Option("--adapters", help="Write LoRA adapters alone; default: merged into the weights.")]
ExportDtype = Annotated[
    str, Option("--dtype", metavar="TYPE", help="auto (that of the base model), float32, bfloat16 or float16.")
]
Yes = Annotated[bool, Option("--yes", help="Do not ask before anything is removed.")]
StoppedArm = Annotated[str | None, Option("--arm", metavar="A", help="Stop only the runs of this arm.")]
Smoke = Annotated[
    bool, Option("--smoke", help="Smoke run: one seed, a few steps, small batches. Results are meaningless.")
]
DryRun = Annotated[bool, Option("--dry-run", "--dry_run", help="Print the plan; start and write nothing.")]
Wandb = Annotated[
    str | None,
    Option(
        "--wandb",
        metavar="MODE",
        help="offline (to disk), online, or off; default: as the study was last started, or offline if trainer.logger "
        "contains wandb, else off.",
    ),
]
WandbProject = Annotated[
    str | None,
    Option(
        "--wandb-project",
        metavar="NAME",
        help="Project in W&B; default: that of the last start, WANDB_PROJECT, or that of the study.",
    ),
]
