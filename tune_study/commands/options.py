"""The options of the command line: names in every spelling, and help."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

StudyName = Annotated[str, Argument(metavar="STUDY", help="Name of the study, or of a suite; see `list`.")]
SettingsStudy = Annotated[
    str, Argument(metavar="[STUDY]", help="A study; those of a sandbox have settings of their own.")
]
AllSettings = Annotated[bool, Option("--all", help="List every setting, not only those that are changed most.")]
RunFolder = Annotated[Path, Argument(metavar="RUN", help="The study's folder results/<run>.")]
RunLocation = Annotated[
    str, Argument(metavar="RUN", help="The study's folder results/<run>, or its URI in a storage: <storage>/<run>.")
]
Address = Annotated[
    str | None,
    Option("--address", metavar="A", help="Run on the Ray cluster there (host:port, or auto); default: here."),
]
Storage = Annotated[
    str | None,
    Option("--storage", metavar="URI", help="Keep rows and checkpoints there too: s3://, gs://, a shared path."),
]

Preset = Annotated[
    str | None, Option("--preset", metavar="NAME", help="laptop or paper; default: paper where it fits the GPUs.")
]
Model = Annotated[str | None, Option("--model", metavar="PATH", help="sokoban-tiny, a folder, or a hub id.")]
Steps = Annotated[int | None, Option("--steps", metavar="N", help="Training steps a run.")]
Values = Annotated[
    str | None, Option("--values", metavar="LIST", help="Values of the study's axis, whichever it is; see list.")
]
IncludeZero = Annotated[
    str | None,
    Option(
        "--rollout_filter_include_zero",
        "--rollout-filter-include-zero",
        metavar="BOOL",
        help="Studies kl and entropy: keep groups whose rewards are all equal (default True).",
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
        help="Studies smoke and smoke-all: top_p (default), top_k (a count of groups), min_p or top_f.",
    ),
]
SkipStatuses = Annotated[
    str,
    Option(
        "--skip-statuses",
        "--skip_statuses",
        metavar="LIST",
        help="Runs that are not tried again; failed and interrupted may be added.",
    ),
]
UpdateMicroBatch = Annotated[
    int | None,
    Option(
        "--ppo-micro-batch-size-per-gpu",
        "--ppo_micro_batch_size_per_gpu",
        metavar="N",
        help="Sequences whose loss is averaged together, of policy and critic.",
    ),
]
LogProbMicroBatch = Annotated[
    int | None,
    Option(
        "--log-prob-micro-batch-size-per-gpu",
        "--log_prob_micro_batch_size_per_gpu",
        metavar="N",
        help="Sequences a pass without gradients, of policy and reference.",
    ),
]
Gpus = Annotated[str | None, Option("--gpus", metavar="LIST", help="GPU ids, like 0,1,2,3; default: all visible.")]
GpusPerExp = Annotated[
    float | None,
    Option("--gpus-per-exp", "--gpus_per_exp", metavar="N", help="GPUs a run: 1, 4, or a fraction like 0.5."),
]
RayNumCpus = Annotated[
    int | None,
    Option("--ray-num-cpus", "--ray_num_cpus", metavar="N", help="CPUs that Ray may use; a probe needs no Ray."),
]
GpuMemoryUtilization = Annotated[
    float | None,
    Option("--gpu-memory-utilization", "--gpu_memory_utilization", metavar="V", help="GPU share of the sampler."),
]
GpuMemoryGib = Annotated[
    float | None,
    Option(
        "--gpu-memory-gib",
        "--gpu_memory_gib",
        metavar="N",
        help="Plan for cards of N GiB; default: the visible ones, else 80.",
    ),
]
SaveFreq = Annotated[
    int | None, Option("--save-freq", "--save_freq", metavar="N", help="Keep a checkpoint every N steps; -1: none.")
]
Seeds = Annotated[int | None, Option("--seeds", metavar="N", help="Seeds 0 to N-1 of every arm.")]
Assignments = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="Any setting; may be given again. See `settings`.")
]
Thresholds = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="A threshold, early_stop.…; may be given again.")
]
Trial = Annotated[
    str | None, Option("--trial", metavar="NAME", help="Name of the run, or its arm; not needed where there is one.")
]
ProbeAlgo = Annotated[
    str | None, Option("--algo", metavar="NAME", help="Of study gradient-analysis: the run of PPO or of GRPO.")
]
CheckpointStep = Annotated[
    int | None,
    Option("--checkpoint-step", "--checkpoint_step", metavar="N", help="Step of the checkpoint; default: the newest."),
]
CheckpointRoot = Annotated[
    Path | None,
    Option(
        "--checkpoint-root", "--checkpoint_root", metavar="DIR", help="Folder of global_step_<N>; default: the run's."
    ),
]
ResumeFromPath = Annotated[
    Path | None,
    Option("--resume-from-path", "--resume_from_path", metavar="DIR", help="The very folder global_step_<N>."),
]
WithVal = Annotated[bool, Option("--with-val", "--with_val", help="Validate first, sampled and greedy.")]
ListSteps = Annotated[bool, Option("--list-steps", "--list_steps", help="Print what was analysed; draw nothing.")]
AnalysedSteps = Annotated[
    list[str] | None, Option("--step", metavar="N", help="Analysed step, or some like 1,51; may be given again.")
]
PlotDir = Annotated[
    Path | None,
    Option("--output-dir", "--output_dir", metavar="DIR", help="Default: RUN/figures/gradients/<run>."),
]
Source = Annotated[
    str | None, Option("--source", metavar="NAME", help="train or probe: while training, or of a checkpoint.")
]
Output = Annotated[Path, Option("--output", metavar="DIR", help="Where results/, logs/ and model_saving/ go.")]
Extend = Annotated[bool, Option("--extend", help="Add new values or seeds to the study there.")]
MaxConcurrent = Annotated[
    int | None, Option("--max-concurrent", "--max_concurrent", metavar="N", help="Runs at once at most.")
]
Smoke = Annotated[
    bool, Option("--smoke", help="Try the study out: one seed, a few steps on small batches, which show nothing.")
]
DryRun = Annotated[bool, Option("--dry-run", "--dry_run", help="Print the plan; start and write nothing.")]
Wandb = Annotated[
    str | None,
    Option(
        "--wandb",
        metavar="MODE",
        help="offline, sync (offline, each run uploaded as it ends), online or off; default: offline if trainer.logger "
        "has wandb.",
    ),
]
