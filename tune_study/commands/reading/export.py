"""The command `export`: write the trained policy of a run as a folder for the hub."""

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from analysis.data.episodes import read_episodes
from analysis.data.schemas import get_family
from search_spaces.catalog import STUDIES
from search_spaces.declaration.study import Axis
from trainable.config.run_config import RunConfig
from trainable.config.setting_types import PromptStyle, format_value
from trainable.envs.prompts import ChatFormat, get_reply_start
from trainable.export.policy import DTYPES, load_trained_policy, write_tokenizer, write_weights
from trainable.families import Settings
from trainable.files.paths import check_path
from trainable.models.lora import write_adapters
from trainable.runs.failures import CheckpointError
from trainable.runs.run_files import METRICS_FILE, find_best_step, read_rows
from trainable.runs.study_record import RUN_FILE, RunRecord, read_record
from tune_study.folder.origin import NOTHING, check_outside_values, find_usable_storage
from tune_study.folder.run_checkpoints import RunCheckpoint, find_run_checkpoint
from tune_study.folder.study_file import read_study
from tune_study.host.console import print_line, show_phases
from tune_study.placement.model_files import check_model
from tune_study.plan.errors import PlanError, as_plan_error
from tune_study.plan.study_plan import RunSpec, StudyPlan, find_changed_settings
from tune_study.plan.typed_settings import find_arm

BEST_STEP = "best"


def find_export(
    run: Path, arm: str, seed: int | None, step: str | None, allowed: frozenset[str] = NOTHING
) -> RunCheckpoint:
    """Find the run of an arm and its checkpoint. Raises PlanError that lists the alternatives if there is none.

    seed: None for the arm's smallest. step: a number, or `best` for the best validation; None for the newest
    checkpoint. allowed: see `plan_from_folder`.
    """
    plan = _plan_from_records(run, allowed)
    arm = find_arm(arm, plan.values)
    specs = {spec.seed: spec for spec in plan.runs if spec.arm == arm}
    if seed is not None and seed not in specs:
        seeds = ", ".join(map(str, sorted(specs)))
        raise PlanError(f"Arm {format_value(arm)} has no run with seed {seed}: type --seed with one of {seeds}.")
    spec = specs[min(specs) if seed is None else seed]
    number = None
    if step == BEST_STEP:
        rows = read_rows(plan.get_run_dir(spec.run_id) / METRICS_FILE)
        number = find_best_step(rows, plan.study.family.primary_metric)
        if number is None:
            raise PlanError(f"--step {BEST_STEP}: {spec.run_id} has no validation yet.")
    elif step is not None:
        if not (step.isascii() and step.isdecimal()):
            raise PlanError(f"--step {format_value(step)} is no step: type a number, or {BEST_STEP}.")
        number = int(step)
    return find_run_checkpoint(plan, spec.run_id, number, None)


def _plan_from_records(folder: Path, allowed: frozenset[str]) -> StudyPlan:
    """Plan a study from the settings that its runs recorded, for reading its checkpoints: nothing is trained."""
    folder = Path(os.path.abspath(folder))
    record = read_study(folder)
    if not get_family(record).is_fine_tuning:
        raise PlanError(f"{format_value(folder, 1000)} fine-tuned no language model: type the folder of another study.")
    specs = []
    for entry in record.runs:
        run_dir = folder / "runs" / entry.run_id
        check_path(folder, run_dir)
        if not (run_dir / RUN_FILE).exists():  # the other runs can still be exported
            continue
        with as_plan_error(ValueError), as_plan_error(OSError):
            config = RunConfig.model_validate(read_record(RunRecord, run_dir).config)
        paths = Path(entry.log), Path(entry.checkpoints)
        if any(path.is_absolute() or ".." in path.parts for path in paths):
            raise PlanError(f"{format_value(folder, 1000)}/study.json names a file outside of the output folder.")
        specs.append(RunSpec(entry.run_id, entry.arm, entry.seed, entry.experiment_name, config, *paths))
    values = record.axis.values
    named_settings: dict[str, Settings] = {value: {} for value in values}  # the runs have the settings of the arms
    axis = Axis(record.axis.setting, {record.preset: values}, record.axis.option, named_settings=named_settings)
    study = replace(STUDIES["kl"], name=record.name, question=record.question, axis=axis)
    storage, _ = find_usable_storage(folder, record.storage, allowed)
    heads = (study, record.preset, record.preset_reason, RunConfig.model_validate(record.settings))
    plan = StudyPlan(*heads, values, record.seeds, folder, record.run, tuple(specs), storage)
    check_outside_values(plan, STUDIES.get(record.name, study), allowed)
    return plan


def export(console: Console, target: RunCheckpoint, folder: Path, dtype: str, *, keeps_adapters: bool) -> None:
    """Write the policy to `folder`, which appears only once it is complete.

    dtype: type of the weights, see `write_weights`. keeps_adapters: write only the adapters. Raises PlanError, and
    writes nothing, if the folder is not empty or something cannot be used.
    """
    config = target.spec.ppo_config
    if dtype not in DTYPES:
        raise PlanError(f"--dtype {format_value(dtype)} is not a type: type one of {', '.join(DTYPES)}.")
    if keeps_adapters and not config.model.lora_rank:
        raise PlanError("--adapters belongs to runs with LoRA (model.lora_rank), and this run has none: leave it out.")
    if keeps_adapters and dtype != "auto":
        raise PlanError("--dtype does not belong to --adapters, which are written as they were trained: leave it out.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PlanError(f"{format_value(folder, 1000)} is there already and not empty: type another --to.")
    check_model(config.model.path, os.environ)
    problem = "The checkpoint cannot be used: "
    with (
        as_plan_error(CheckpointError, problem),
        as_plan_error(ValueError, problem),
        show_phases(console, f"loading {config.model.path}"),
    ):
        policy = load_trained_policy(config, target.path)
    card = _make_card(target, config, policy.chat_format)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Written beside the folder, so that a rename makes it appear at once.
        with (
            show_phases(console, "writing the weights"),
            tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temp_dir,
        ):
            staging = Path(temp_dir) / folder.name
            staging.mkdir()
            if keeps_adapters:
                write_adapters(policy.model, config.model, staging)
            else:
                write_weights(policy, staging, dtype)
            write_tokenizer(policy, staging, target.plan.ppo_config.model.prompt_style)
            (staging / "README.md").write_text(card, encoding="utf-8")
            if folder.exists():
                folder.rmdir()  # empty, see above
            staging.rename(folder)
    except OSError as error:
        raise PlanError(f"{format_value(folder, 1000)} cannot be written ({error}): type another --to.") from None
    print_line(console, f"{target.spec.run_id} after step {target.step}: {folder}")


def _make_card(target: RunCheckpoint, config: RunConfig, chat: ChatFormat) -> str:
    """Make README.md of the exported policy: which run it is from, and what is known about it."""
    study, plan, spec = read_study(target.plan.folder), target.plan, target.spec
    base = config.model.path
    own_settings = find_changed_settings(config)
    fields = {
        "study": f"{plan.study.name}: {plan.study.question.strip()}",
        "arm": f"{plan.study.axis.setting} = {spec.arm}",
        "seed": str(spec.seed),
        "step": f"{target.step} of {spec.steps}",
        "base model": Path(base).name if os.path.isabs(base) else base,
        "commit of tune_study": (study.git.commit if study.git else "unknown")[:12],
        "settings that differ from the defaults": ", ".join(
            f"`{name}={json.dumps(value)}`" for name, value in own_settings.items() if not name.endswith("path")
        ),
    }
    cells = {name: value.replace("|", "\\|").replace("\n", " ") for name, value in fields.items()}
    text = (
        f"# {spec.run_id}, step {target.step}\n\nThe policy of one run of a study with tune_study: "
        f"{plan.study.name}, arm {spec.arm}, seed {spec.seed}. One run says nothing of its settings; the report of the "
        "study compares them over seeds. The model speaks the prompts of the game that it was trained on."
    )
    base_line = "" if os.path.isabs(base) or "/" not in base else f"base_model: {base}\n"  # an id of the hub
    lines = "\n".join(f"| {name} | {value} |" for name, value in cells.items())
    return (
        f"---\n{base_line}library_name: transformers\npipeline_tag: text-generation\ntags:\n- reinforcement-learning\n"
        f"- tune_study\n---\n\n{text}\n\n| | |\n|---|---|\n{lines}\n{_format_example(plan, spec, chat)}"
    )


def _format_example(plan: StudyPlan, spec: RunSpec, chat: ChatFormat) -> str:
    """Format the first recorded prompt of a run, and how to make it; empty if none is recorded in turns."""
    turns = (episode.turns[0] for episode in read_episodes(plan.get_run_dir(spec.run_id)) if episode.turns)
    turn = next(turns, None)
    style = spec.ppo_config.model.prompt_style
    opening = None if turn is None else split_first_turn(chat, turn.observation, style)
    if turn is None or opening is None:
        return ""
    messages = [{"role": role, "content": content} for role, content in zip(("system", "user"), opening, strict=True)]
    return (
        "\n## A prompt of the run\n\n```python\n"
        f"messages = {json.dumps(messages, indent=4, ensure_ascii=False)}\n"
        "prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)\n```\n\n"
        f"An answer of the policy during the run was:\n\n```\n{turn.reply}\n```\n"
    )


def split_first_turn(chat: ChatFormat, text: str, style: PromptStyle) -> tuple[str, str] | None:
    """Split the first prompt of an episode into its system and user message; None if it has another form."""
    end = chat.reply_prefix + get_reply_start(style)
    is_whole = text.startswith(chat.system_prefix) and text.endswith(end)
    system, separator, user = text[len(chat.system_prefix) : len(text) - len(end)].partition(chat.first_user_prefix)
    return (system, user) if is_whole and separator else None
