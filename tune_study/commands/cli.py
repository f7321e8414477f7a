"""The command line.

Modules that need Ray or torch are imported inside the commands that use them, so that the other commands start quickly.
"""

import atexit
import errno
import gc
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial, wraps
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer import Option

from search_spaces.catalog import STUDIES, SUITES, get_declaration
from trainable.config.command_lines import INSTALLED_PROGRAM, PROGRAM, format_command
from trainable.config.own_parts import OwnPartError
from trainable.config.run_config import ConfigError
from trainable.config.setting_types import format_value
from trainable.files.paths import UnsafePathError
from trainable.runs.run_files import is_locked
from tune_study.commands import arguments as opt
from tune_study.commands import cleaning, describe, forking, searching
from tune_study.commands.arguments import (
    Command,
    StrictCommand,
    StrictGroup,
    argument,
    expand_requests,
    hyphenate,
    option,
)
from tune_study.commands.preflight import make_plans_that_fit, start_studies
from tune_study.commands.requests import (
    LaunchRequest,
    ProbeRequest,
    RunRequest,
    SearchRequest,
    StudyRequest,
    TypedAgain,
    find_studies,
    list_assigned_settings,
    plan_from_options,
)
from tune_study.folder import locate, outputs, study_file
from tune_study.host.console import make_console, print_error, print_json, print_line, show_warnings
from tune_study.host.interrupt import make_interrupt
from tune_study.host.terminal import finish_output, protect_output
from tune_study.placement import resources
from tune_study.plan.errors import FAILED_CHECK_CODE, PlanError
from tune_study.plan.own_study import load_own_study, load_typed_files, pin_typed_values, write_study_file
from tune_study.plan.study_plan import StudyPlan
from tune_study.plan.typed_settings import collect_overrides, find_arm, find_study, normalize_study_name
from tune_study.tune.session import write_results

app = typer.Typer(
    cls=StrictGroup,
    name="tune_study",
    help="Run studies of RL fine-tuning: train every arm, stop runs that collapse, report the results.",
    epilog=f"\b\nExample: {PROGRAM} run kl --preset laptop",
    no_args_is_help=True,
    add_completion=PROGRAM == INSTALLED_PROGRAM,  # a shell completes the words of a program, not of `python -m`
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "token_normalize_func": hyphenate,
    },
)


def main() -> None:
    """Entry point of `python -m tune_study` and of the command `tune-study`."""
    # Reports make many objects that live until the end. With Python's default thresholds, garbage collection takes up
    # to a tenth of their time.
    gc.set_threshold(50_000, 20, 20)
    # Without this, a last garbage collection at exit takes up to 0.9 s.
    atexit.register(gc.freeze)
    protect_output()  # before the first line is printed
    show_warnings()
    sys.excepthook = lambda *error: print_error("".join(traceback.format_exception(*error)).rstrip())
    # With `python -m` the first argument is the path of __main__.py, which nobody types.
    try:
        app(prog_name="python -m tune_study" if Path(sys.argv[0]).name == "__main__.py" else None)
    except SystemExit as end:
        # Click ends every command with SystemExit and an integer.
        raise SystemExit(finish_output(end.code if isinstance(end.code, int) else 0)) from None


def report_errors(command: Command) -> Command:
    """Decorate a command: print invalid input as a paragraph on stderr; exit with 2, or 3 if a study does not fit."""

    @wraps(command)
    def run_command(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (ConfigError, PlanError, OwnPartError, UnsafePathError) as error:
            print_error(f"tune_study: {error}")
            raise typer.Exit(getattr(error, "exit_code", PlanError.exit_code)) from None
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG or error.filename is None:
                raise
            # Any word may be used as the name of a file or a folder.
            name = format_value(str(error.filename), 80)
            print_error(f"tune_study: {name} is longer than a name of a file may be: type a shorter word.")
            raise typer.Exit(2) from None

    return run_command


MAIN, READ, FOLLOW, FILES = "Run a study", "Read a study", "Ask further questions", "Machine and files"
"""The headings of the commands in the help of the program."""


def command(heading: str, name: str, example: str) -> Callable[[Command], Command]:
    """Return a decorator that registers a function as a command with an example in its help, and reports its errors."""

    def add_command(function: Command) -> Command:
        epilog = f"\b\nExample: {PROGRAM} {name} {example}".rstrip()
        register = app.command(name, cls=StrictCommand, epilog=epilog, rich_help_panel=heading)
        return register(report_errors(expand_requests(function)))

    return add_command


@app.callback(invoke_without_command=True)
def show_version(version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False) -> None:
    """Print the version if it was asked for."""
    if version:
        typer.echo(f"tune_study {metadata.version('tune-study')}")
        raise typer.Exit


@command(MAIN, "list", "")
def list_studies(
    study: Annotated[str | None, argument("STUDY", "Name of the study; default: all.")] = None,
) -> None:
    """List the studies and their questions, or the axis and values of STUDY."""
    suite = None if study is None else normalize_study_name(study)
    if study is None:
        describe.print_studies(make_console(), [*STUDIES.values()], SUITES)
    elif suite in SUITES:
        describe.print_studies(make_console(), [STUDIES[name] for name in SUITES[suite]], {suite: SUITES[suite]})
    else:
        describe.print_study(make_console(), find_study(study))


@command(MAIN, "settings", "'learning rate' --preset laptop")
def settings(
    words: Annotated[
        list[str] | None,
        argument("WORD", "Name of the study (default: kl), then words to search for in names and meanings."),
    ] = None,
    preset: Annotated[str | None, option("NAME", "List the values of this preset; default: of all.")] = None,
    list_all: Annotated[bool, Option("--all", help="List every setting, not only the most common ones.")] = False,
) -> None:
    """List the main settings for --set, or those with words of yours."""
    names = [word for word in (words or [])[:1] if get_declaration(normalize_study_name(word))]
    study = find_study(names[0] if names else "kl")
    wanted = " ".join((words or [])[len(names) :])
    describe.print_settings(make_console(), study, wanted, preset, with_all=list_all)


@command(READ, "status", "results/kl_sweep_sokoban-tiny")
def status(run: opt.RunLocation, as_json: opt.Json = False) -> None:
    """Show the progress of each run in RUN, and why it ended."""
    with locate.open_for_reading(run) as (folder, is_running):
        answer = describe.read_status(folder, run, study_file.read_study(folder), is_running)
    if as_json:
        print_json("status", answer)
    else:
        describe.print_status(make_console(), answer)


@command(FOLLOW, "new", "my-lr --vary actor.lr=1e-4,3e-4,1e-3")
def new(
    name: Annotated[str, argument("NAME", "Name of the new study, like my-lr.")],
    vary: Annotated[
        list[str] | None, option("KEY=VALUES", "A setting and its values, like actor.lr=1e-4,3e-4; repeatable.")
    ] = None,
    to: Annotated[Path | None, option("FILE", "File to write; default: NAME.py here.")] = None,
    command: Annotated[
        str | None,
        option("TEXT", "Train with a command of yours: one that you have run, in quotes; --vary names its flags."),
    ] = None,
    logs: Annotated[
        Path | None, option("PATH", "Log, or folder with logs, that this command wrote; default: its output folder.")
    ] = None,
) -> None:
    """Write a Python file that declares a study of your own."""
    path, run_command = write_study_file(name, vary or [], to, command, logs)
    print_line(make_console(), f"Wrote {path}. Run it with:")
    print_line(make_console(), f"  {run_command}")


@command(MAIN, "run", "kl --kl-values 0,0.01,0.1 --steps 60 --seeds 3 --output out")
def run(study: opt.StudyName, request: RunRequest, launch: LaunchRequest, as_json: opt.Json = False) -> None:
    """Run a study or a suite, or continue it if the output folder contains it."""
    if as_json and not request.dry_run:
        raise PlanError("--json prints a plan: type it with --dry-run, or after the runs `report RUN --json`.")
    load_typed_files(request.code or [])
    make_plan = partial(plan_from_options, request=request)
    plans = make_plans_that_fit(make_plan, find_studies(study, request), request, launch)
    json_command = "run" if as_json else ""
    raise typer.Exit(start_studies(plans, launch, request.dry_run, make_console(), json_command=json_command))


@command(FOLLOW, "search", "kl --preset stress --trials 24 --seeds 2 --output out")
def search(study: opt.StudyName, search_request: SearchRequest, request: StudyRequest, launch: LaunchRequest) -> None:
    """Search for the best settings under which no run collapses, and confirm them with fresh seeds."""
    load_typed_files(request.code or [])
    make_plan = partial(searching.plan_search, request=search_request, study_request=request)
    (plan,) = make_plans_that_fit(make_plan, [searching.find_study(study, request)], request, launch)
    raise typer.Exit(searching.run_and_confirm(plan, launch, request.dry_run, make_console()))


@command(MAIN, "resume", "results/kl_sweep_sokoban-tiny")
def resume(
    run: opt.RunLocation,
    gpus_per_exp: opt.GpusPerExp = None,
    dry_run: opt.DryRun = False,
    *,
    typed_again: TypedAgain,
    launch: LaunchRequest,
) -> None:
    """Continue the study in RUN, all but its finished runs."""
    placement_overrides = {} if gpus_per_exp is None else {"trainer.n_gpus_per_node": gpus_per_exp}
    own_study = typed_again.load()
    plan = locate.plan_resume(run, placement_overrides, own_study, is_real=not dry_run, allowed=typed_again.allowed)
    raise typer.Exit(searching.run_and_confirm(plan, launch, dry_run, make_console()))


@command(FOLLOW, "confirm", "results/kl_sweep_sokoban-tiny --arm 0.01 --seeds 5")
def confirm(
    run: opt.RunLocation,
    arm: Annotated[str, option("A", "The arm whose result is confirmed.")],
    baseline: Annotated[str | None, option("B", "The arm to compare with; default: the baseline of the study.")] = None,
    seeds: Annotated[int, option("N", "Number of fresh seeds for each of the two arms.")] = searching.CONFIRMING_SEEDS,
    extend: opt.Extend = False,
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
    *,
    typed_again: TypedAgain,
    launch: LaunchRequest,
) -> None:
    """Run one arm of RUN and the baseline again, with seeds that RUN never used: that number is the result."""
    own_study = typed_again.load()
    plan = searching.plan_confirmation(run, arm, baseline, seeds, own_study, extend, typed_again.allowed)
    _run_beside(plan, "confirm", launch, dry_run, as_json)


@command(FOLLOW, "fork", "results/kl_sweep_sokoban-tiny --arm 0 --from-step 20,40 --remedy actor.lr=1e-5")
def fork(
    run: opt.RunLocation,
    arm: Annotated[str, option("A", "The arm whose runs are continued.")],
    from_step: Annotated[str, option("LIST", "Steps after which a state was kept (trainer.save_freq), such as 20,40.")],
    remedy: Annotated[
        list[str],
        option(
            "TEXT", "What to change from there: KEY=VALUE, or 'NAME: KEY=VALUE KEY=VALUE'; repeatable, an arm each."
        ),
    ],
    seed: Annotated[
        list[int] | None, option("S", "A seed of the arm; repeatable. Default: all with a state after every step.")
    ] = None,
    steps: Annotated[int | None, option("N", "Last training step; default: that of RUN.")] = None,
    extend: opt.Extend = False,
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
    *,
    typed_again: TypedAgain,
    launch: LaunchRequest,
) -> None:
    """Continue the runs of an arm of RUN from kept states, as before and with remedies: until when is one in time?"""
    own_study = typed_again.load()
    plan = forking.plan_fork(
        run, arm, from_step, remedy, seed, steps, own_study, extend=extend, allowed=typed_again.allowed
    )
    _run_beside(plan, "fork", launch, dry_run, as_json)


def _run_beside(plan: StudyPlan, name: str, launch: LaunchRequest, dry_run: bool, as_json: bool) -> NoReturn:
    """Run the study that the command `name` has planned beside another one, and exit."""
    console, json_command = (make_console(sys.stderr), name) if as_json else (make_console(), "")
    exit_code = start_studies([plan], launch, dry_run, console, json_command=json_command)
    if as_json and not dry_run:
        from tune_study.commands.reading import results

        print_json(name, results.read_results(plan.folder))
    raise typer.Exit(exit_code)


@command(FILES, "stop", "results/kl_sweep_sokoban-tiny --arm 1")
def stop(
    run: opt.RunLocation, arm: Annotated[str | None, option("A", "Stop only the runs of this arm.")] = None
) -> None:
    """Ask the process that runs RUN to stop, or one arm: steps are finished and saved."""
    folder = Path(run)
    study = study_file.read_study(folder)
    if not is_locked(folder):
        raise PlanError(
            f"No process runs {format_value(folder, 1000)}: there is nothing to stop. "
            f"`{format_command('status', folder)}` shows its runs."
        )
    interrupt = make_interrupt(folder)
    path, what = interrupt.path, "The study stops"
    if arm is not None:
        arm = find_arm(arm, study.axis.values)
        path, what = interrupt.get_arm_path(arm), f"The runs of arm {arm} stop"
    try:
        path.touch()
    except OSError as error:
        raise PlanError(f"{format_value(folder, 1000)} cannot be written ({error.strerror}).") from None
    next_command = format_command("resume", folder)
    print_line(make_console(), f"{what} after the steps under way, which are saved. To continue: {next_command}")


@command(FILES, "clean", "results/kl_sweep_sokoban-tiny --yes")
def clean(
    run: opt.RunLocation, yes: Annotated[bool, Option("--yes", help="Do not ask before anything is removed.")] = False
) -> None:
    """Free the disk space that ended runs of RUN no longer need."""
    cleaning.clean(make_console(), run, yes)


@command(MAIN, "report", "results/kl_sweep_sokoban-tiny")
def report(
    run: opt.RunLocation,
    study: Annotated[str | None, option("FILE", "A file of yours whose study has sections of its report.")] = None,
    fail_on: Annotated[
        str | None, option("LIST", "Exit with 4 if an arm is worse or a run collapsed: worse, collapsed, or both.")
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Write the tables and the report of RUN again from its rows."""
    from tune_study.commands.reading import results

    conditions = () if fail_on is None else results.parse_conditions(fail_on)
    folder = _make_absolute(locate.fetch_for_writing(run))
    sections = load_own_study(study).study.sections if study else ()
    outputs.check_writable(folder, "RUN", "copy the study to a folder that you may write, and type that one")
    console = make_console(quiet=as_json)
    problems = write_results(folder, console, own_sections=sections), locate.push_results(folder, run)
    if any(problems):
        print_error(" ".join(filter(None, problems)))
        raise typer.Exit(1)
    if not (as_json or conditions):
        return
    answer = results.read_results(folder)
    if as_json:
        print_json("report", answer)
    if failure := results.describe_failures(answer, conditions):
        print_error(f"tune_study: {failure}")
        raise typer.Exit(FAILED_CHECK_CODE)


@command(READ, "import", "logs/*.log --output imported --arm actor_rollout_ref.actor.kl_loss_coef")
def import_runs(
    logs: Annotated[
        list[Path] | None, argument("LOGS", "Logs of other trainers, one per run, or folders with them.")
    ] = None,
    output: Annotated[Path, option("DIR", "Folder for results/NAME.")] = Path("imported"),
    study: Annotated[str, option("NAME", "Name of the study.")] = "imported",
    arm: Annotated[list[str] | None, option("KEY", "A setting whose values are the arms; repeatable.")] = None,
    seed: opt.LogSeed = None,
    column: opt.LogColumns = None,
    columns: Annotated[list[Path] | None, option("FILE", "A file with a line OURS=THEIRS per measurement.")] = None,
    runs: Annotated[
        Path | None,
        option("FILE", "A CSV file with the columns log, arm and seed, in place of LOGS or of runs in W&B's charts."),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Read the logs of other trainers as a study: verl, TRL, prime-rl, tinker and others."""
    from tune_study.commands.reading import importing, results

    console, folder = make_console(quiet=as_json), output / "results" / study
    names, step = importing.parse_columns(column or [], columns or [])
    notes = importing.import_study(logs or [], folder, arm or [], seed, names, step, runs)
    for note in notes:
        print_line(console, note)
    folder = _make_absolute(folder)
    if problem := write_results(folder, console):
        print_error(problem)
        raise typer.Exit(1)
    if as_json:
        answer = results.read_results(folder)
        print_json("import", {**answer, "notes": [*notes, *answer["notes"]]})


@command(READ, "noise-floor", "logs/seed-*.log")
def noise_floor(
    sources: Annotated[
        list[str], argument("LOGS", "Logs of one setting with several seeds, as `import` reads them; or a RUN.")
    ],
    arm: Annotated[str | None, option("A", "The arm whose runs are read; default: the baseline of RUN.")] = None,
    seed: opt.LogSeed = None,
    column: opt.LogColumns = None,
    as_json: opt.Json = False,
) -> None:
    """Estimate from runs of one setting which difference a number of seeds can detect."""
    from tune_study.commands.reading import importing, noise_floor

    frames, is_study = noise_floor.read_frames(sources, seed, *importing.parse_columns(column or [], []))
    answer = noise_floor.estimate_floors(frames, noise_floor.choose_arm(frames, arm, has_baseline=is_study))
    if as_json:
        print_json("noise-floor", answer)
    else:
        noise_floor.print_floors(make_console(), answer)


@command(READ, "findings", "collapse")
def findings(
    words: Annotated[list[str] | None, argument("WORD", "Words to search for, or the name of a page.")] = None,
) -> None:
    """Print what recorded studies answer to common questions, such as which remedy stops a collapse."""
    from tune_study.commands.reading import findings as gallery

    gallery.print_findings(make_console(), words or [])


@command(MAIN, "explain", "results/kl_sweep_sokoban-tiny --arm 0 --seed 1")
def explain(run: opt.RunLocation, arm: opt.ReadArm = None, seed: opt.ReadSeed = None) -> None:
    """Tell what changed before the collapse in runs of RUN, and when."""
    from tune_study.commands.reading import explain as explanation

    with locate.open_for_reading(run) as (folder, is_running):
        frames = explanation.read_frames(folder, is_running)
        explanation.print_explanation(make_console(), folder, run, frames, arm, seed)


@command(READ, "transcripts", "results/kl_sweep_sokoban-tiny --arm 0 --seed 1 --failed")
def transcripts(
    run: opt.RunLocation,
    arm: opt.ReadArm = None,
    seed: opt.ReadSeed = None,
    step: Annotated[int | None, option("N", "Episodes of the validation after step N; default: the last one.")] = None,
    failed: Annotated[bool, Option("--failed", help="Only episodes without success.")] = False,
    solved: Annotated[bool, Option("--solved", help="Only episodes with success.")] = False,
    trained: Annotated[
        bool, Option("--trained", help="Episodes of the training, with advantages (trainer.log_train_generations).")
    ] = False,
) -> None:
    """Print episodes of RUN: what the policy saw and said, and its rewards."""
    from tune_study.commands.reading import transcripts as reading

    if failed and solved:
        raise PlanError("--failed and --solved exclude each other: type one of them, or none for both kinds.")
    choice = reading.EpisodeChoice(arm, seed, step, None if failed == solved else solved, trained)
    with locate.open_for_reading(run) as (folder, _):
        reading.print_transcripts(make_console(), folder, choice, run)


@command(FILES, "demo", "--output demo")
def demo(
    output: Annotated[
        Path, option("DIR", "The folder in which the recorded study is unpacked.", "--output", "-o")
    ] = Path("demo"),
) -> None:
    """Show a recorded study and its report; nothing is trained."""
    from tune_study.commands.demo import show_demo

    if problem := show_demo(make_console(), output):
        print_error(problem)
        raise typer.Exit(1)


@command(READ, "watch", "results/kl_sweep_sokoban-tiny")
def watch(run: opt.RunLocation) -> None:
    """Show the report of RUN in a browser while it runs."""
    from tune_study.commands.reading import watch as watching

    watching.watch(make_console(), run)


@command(READ, "compare", "a/results/kl_sweep_sokoban-tiny b/results/kl_sweep_sokoban-tiny")
def compare(
    runs: Annotated[
        list[str],
        argument("RUN...", "Folders results/<run> or URIs of two studies or more of one family."),
    ],
    to: Annotated[Path, option("FILE", "Where the page is written.")] = Path("comparison.html"),
    as_json: opt.Json = False,
) -> None:
    """Compare studies: which settings differ, and how common arms do."""
    from tune_study.commands.reading import compare as comparing

    comparison = comparing.read_comparison(runs)
    page = comparing.write_page(comparison, _make_absolute(to))
    if as_json:
        print_json("compare", comparing.summarize_comparison(comparison, page))
    else:
        comparing.print_comparison(make_console(), comparison, page)


@command(READ, "alarms", "out --first-test-seed 3")
def alarms(
    folders: Annotated[
        list[Path],
        argument("FOLDER...", "Output folders, or folders results/<run>, whose studies to read."),
    ],
    first_test_seed: Annotated[int, option("S", "Choose alarms on lower seeds, score them from S on.", min=0)] = 5,
    others: Annotated[bool, Option("--others", help="Also score the detectors of other tools, in a minute.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Show which thresholds would have announced the collapses in FOLDER, and how often wrongly."""
    from tune_study.commands.reading import alarms as recorded_alarms

    answer = recorded_alarms.score_alarms(recorded_alarms.read_studies(folders), first_test_seed, others)
    if as_json:
        print_json("alarms", answer)
    else:
        recorded_alarms.print_alarms(make_console(), answer)


@command(READ, "replay-stoppers", "results/kl_sweep_sokoban-tiny --set early_stop.variance_ratio=0.2")
def replay_stoppers(
    run: opt.RunLocation,
    assignments: Annotated[
        list[str] | None, option("KEY=VALUE", "Change a threshold of early_stop; repeatable.", "--set")
    ] = None,
) -> None:
    """Show when each stop rule would have fired in RUN, and whether rightly."""
    from tune_study.commands.reading import alarms as recorded_alarms

    with locate.open_for_reading(run) as (folder, _):
        recorded_alarms.print_replay(make_console(), folder, assignments or [])


@command(FOLLOW, "probe", "results/gradient_analysis_sokoban_sokoban-tiny --with-val")
def probe(run: opt.RunLocation, request: ProbeRequest, typed_again: TypedAgain) -> None:
    """Measure the gradients of a checkpoint of RUN; nothing is trained."""
    if request.gpus is not None:
        # Set before torch is imported below, which reads this variable once.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(resources.parse_gpus(request.gpus))
    from tune_study.commands import probe as probing
    from tune_study.folder import run_checkpoints
    from tune_study.folder.study_file import plan_from_folder

    step = request.checkpoint_step
    path = run_checkpoints.find_checkpoint_path(request.checkpoint_root, step, request.resume_from_path)
    # Only now, since this may download rows: a wrong path should be reported at once.
    folder = locate.fetch_for_writing(run)
    own_study = typed_again.load()
    allowed = typed_again.allowed | locate.list_typed_storage(run)
    plan = plan_from_folder(folder, own_study=own_study, allowed=allowed)
    target = run_checkpoints.find_run_checkpoint(plan, request.trial, step, path, request.algo)
    options = {setting: value for _, setting, value in list_assigned_settings(request)}
    overrides = collect_overrides(target.plan.study, options, request.assignments or [], is_axis_free=True)
    probing.probe(target, pin_typed_values(overrides), request.with_val, make_console())
    if problem := locate.push_results(folder, run):
        print_error(problem)
        raise typer.Exit(1)


@command(FOLLOW, "export", "results/kl_sweep_sokoban-tiny --arm 0.01 --to my-policy")
def export(
    run: opt.RunLocation,
    arm: Annotated[str, option("A", "The arm whose policy is written.")],
    to: Annotated[Path, option("DIR", "The folder to write, new or empty.")],
    seed: Annotated[int | None, option("S", "Seed of the run; default: the smallest one.")] = None,
    step: Annotated[
        str | None, option("N", "Step of a checkpoint, or `best` (of a run with --keep-best); default: newest.")
    ] = None,
    adapters: Annotated[
        bool, Option("--adapters", help="Write LoRA adapters alone; default: merged into the weights.")
    ] = False,
    dtype: Annotated[str, option("TYPE", "auto (that of the base model), float32, bfloat16 or float16.")] = "auto",
    allow: opt.Allow = None,
) -> None:
    """Write the policy of one run of RUN as a model folder that transformers and vLLM load."""
    from tune_study.commands.reading import export as exporting  # imports torch

    allowed = frozenset(allow or ()) | locate.list_typed_storage(run)
    target = exporting.find_export(locate.fetch_for_writing(run), arm, seed, step, allowed)
    exporting.export(make_console(), target, _make_absolute(to), dtype, keeps_adapters=adapters)


@command(READ, "plot-gradients", "results/gradient_analysis_sokoban_sokoban-tiny --step 1,51,101")
def plot_gradients(
    run: opt.RunLocation,
    list_steps: Annotated[bool, Option("--list-steps", help="List the analyses; plot nothing.")] = False,
    steps: Annotated[list[str] | None, option("N", "Analyzed step, or a list like 1,51; repeatable.", "--step")] = None,
    output_dir: Annotated[
        Path | None, option("DIR", "Folder for the figures; default: RUN/figures/gradients/<run>.")
    ] = None,
    trial: opt.Trial = None,
    source: Annotated[
        str | None, option("NAME", "train (analyses during training) or probe (of a checkpoint).")
    ] = None,
) -> None:
    """Plot the gradient analyses of RUN, with their numbers."""
    folder = locate.fetch_for_writing(run)
    from tune_study.commands.reading import plot_gradients  # imports Altair

    frames = plot_gradients.read_analyses(folder)
    table = plot_gradients.select_steps(frames, trial, source, plot_gradients.parse_steps(steps or []))
    if list_steps:
        plot_gradients.print_steps(make_console(), table)
    else:
        plot_gradients.write_plots(make_console(), folder, frames, table, output_dir)


@command(FILES, "doctor", "--output out")
def doctor(output: opt.Output = Path(), preset: opt.Preset = None) -> None:
    """Train one step of a study on this machine, and say what went wrong."""
    from tune_study.commands.doctor import diagnose

    raise typer.Exit(diagnose(make_console(), _make_absolute(output), preset))


def _make_absolute(path: Path) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))
