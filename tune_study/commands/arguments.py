"""The words of a command line: options that several commands share, and a parser that refuses words it would misread.

Hyphens and underscores of an option are the same, since the published scripts use underscores.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, NewType, get_type_hints

import typer
from typer import Argument, Option
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from trainable.config.games import GAMES

_PLACE_METAVARS = ("DIR", "FILE", "RUN", "RUN...", "FOLDER...", "LOGS")
_SECTIONS = {
    "trials": "What to search",
    "preset": "What to run",
    "values": "Arms and seeds",
    "gpus_per_exp": "Placement",
    "gpus": "Placement",
    "max_hours": "Start and end",
    "output": "Files",
    "as_json": "Files",
    "help": "Help",
}
"""The sections of a long help, each with the options from one of these on."""
_LONG_HELP = 21
"""Number of parameters from which on a help has sections."""


Command = Callable[..., None]


Setting = NewType("Setting", str)
"""Marks an option that assigns its value to this dotted setting. As published, some assign several."""


def option(metavar: str, help_text: str, *names: str, **constraints: Any) -> Any:
    """Make an option with a value. Without `names` it has the name of its field, such as --save-freq of `save_freq`."""
    return Option(*names, metavar=metavar, help=help_text, **constraints)


def argument(metavar: str, help_text: str, **constraints: Any) -> Any:
    """Make a positional argument."""
    return Argument(metavar=metavar, help=help_text, **constraints)


StudyName = Annotated[
    str,
    argument("STUDY", "Name of a study or a suite, see `list`; or a file with your study, lr.py."),
]
RunLocation = Annotated[
    str, argument("RUN", "Folder of the study, results/<run>, or its URI in a storage, <storage>/<run>.")
]
Preset = Annotated[
    str | None,
    option(
        "NAME",
        "laptop, small, stress or paper; default: paper if it fits the GPUs, else laptop, or what `list STUDY` says.",
    ),
]
Env = Annotated[
    str | None,
    option(
        "NAME",
        f"Game: {', '.join(GAMES).replace(',', ' (default),', 1)}; a data set, FILE.jsonl; or yours, FILE.py:NAME.",
    ),
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
Allow = Annotated[
    list[str] | None,
    option(
        "KEY=VALUE",
        "An address, environment variable, file or model that the folder of somebody else names and that may "
        "be used, as the command prints it; repeatable.",
    ),
]
Trial = Annotated[
    str | None, option("NAME", "Arm (its smallest seed) or name of a run; not needed if there is only one.")
]
ReadArm = Annotated[str | None, option("A", "Only runs of this arm.")]
ReadSeed = Annotated[int | None, option("S", "Only runs with this seed.")]
Output = Annotated[Path, option("DIR", "Parent folder of results/, logs/ and model_saving/.", "--output", "-o")]
Extend = Annotated[bool, Option("--extend", help="Add new values or seeds to an existing study, or steps to its runs.")]
DryRun = Annotated[bool, Option("--dry-run", help="Print the plan; start and write nothing.")]
Json = Annotated[bool, Option("--json", help="Print one JSON object instead, for other programs.")]
LogSeed = Annotated[str | None, option("KEY", "The setting that is the seed.", "--seed")]
LogColumns = Annotated[
    list[str] | None,
    option("OURS=THEIRS", "A measurement that the tables do not know, or the `step`; repeatable.", "--column"),
]


class StrictGroup(TyperGroup):
    """The program, whose help has the commands under the heading of their `rich_help_panel`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the whole summary of each command."""
        width = max(map(len, self.commands))
        groups: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            assert isinstance(command, StrictCommand)
            groups.setdefault(command.rich_help_panel or "", []).append((name.ljust(width), command.help or ""))
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


class StrictCommand(TyperCommand):
    """A command that refuses words that would be misread.

    It refuses an option that is typed twice, since only the last one would count, and an empty path, which would mean
    the current folder. Of further words it says that spaces may separate the values of a list.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`, the words after the command's name. Raises click's UsageError for words that it cannot use."""
        words = list(args)
        # Shell completion passes incomplete words, and a request for help is always answered.
        if not ctx.resilient_parsing and not set(words) & set(ctx.help_option_names):
            self._refuse_misread(ctx, words)
        ctx.allow_extra_args = True  # they are refused below
        try:
            extra_words = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            # Pydantic checks the values, and its messages say "input".
            problem = error.format_message().replace("Input should be", "must be").rstrip(".")
            example = " ".join((self.epilog or "").replace("\b", "").split())
            ctx.fail(f"{problem}. {example}")
        if extra_words and not ctx.resilient_parsing:
            names = [str(parameter.metavar) for parameter in self.params if isinstance(parameter, TyperArgument)]
            ctx.fail(
                f"Too many words: {' '.join(map(repr, extra_words))}. Besides options, {self.name} takes "
                f"{' and '.join(names) or 'nothing'}. The values of a list have commas between them and no spaces, "
                "like --kl-values 0,0.1."
            )
        return extra_words

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options; those of a long help in sections."""
        if len(self.params) < _LONG_HELP:
            super().format_options(ctx, formatter)
            return
        sections: dict[str, list[Any]] = {heading: [] for heading in ("Arguments", *_SECTIONS.values())}
        heading = "Arguments"
        for parameter in self.get_params(ctx):
            heading = _SECTIONS.get(parameter.name or "", heading)
            sections[heading].append(parameter.get_help_record(ctx))
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def _refuse_misread(self, ctx: Any, words: list[str]) -> None:
        values, _, typed_parameters = self.make_parser(ctx).parse_args(args=list(words))
        counts = Counter(
            parameter.opts[0]
            for parameter in typed_parameters
            if isinstance(parameter, TyperOption) and not parameter.multiple and not parameter.is_flag
        )
        for name, count in counts.items():
            if count > 1:
                ctx.fail(f"{name} is typed {count} times: type it once.")
        for parameter in typed_parameters:
            value = values.get(parameter.name)
            texts = value if isinstance(value, list | tuple) else [value]
            typed_name = parameter.opts[0] if isinstance(parameter, TyperOption) else parameter.metavar
            if parameter.metavar in _PLACE_METAVARS and "" in texts:
                ctx.fail(f"{typed_name} is empty, as an unset variable is: type a path, or . for the current folder.")


def hyphenate(word: str) -> str:
    """Write an option or a command with hyphens instead of underscores; both spellings are accepted."""
    return word.replace("_", "-")


def expand_requests(command: Command) -> Command:
    """Let a command take requests (dataclasses of options): Typer reads a signature with their fields instead.

    All parameters become keyword-only, because one with a default may then precede one without.
    """
    hints = get_type_hints(command, include_extras=True)
    requests: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in requests:
            types = get_type_hints(requests[name], include_extras=True)
            options = inspect.signature(requests[name]).parameters.values()
            parameters += [option.replace(annotation=types[option.name]) for option in options]
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    @functools.wraps(command)
    def run_command(**arguments: Any) -> None:
        for name, request in requests.items():
            arguments[name] = request(**{field.name: arguments.pop(field.name) for field in fields(request)})
        command(**arguments)

    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    run_command.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    return run_command
