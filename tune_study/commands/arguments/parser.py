"""Parse the words of a command; refuse words that would be ignored or misread, and say what to type instead."""

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

_LIST_METAVAR = "LIST"
_PLACE_METAVARS = ("DIR", "FILE", "RUN", "RUN...", "FOLDER...")
_NUMBER_METAVARS = ("N", "S", "H", "V")
_PROGRAM_OPTIONS = {"version": "--version", "help": "--help"}
_SECTIONS = {
    "trials": "What to search",
    "preset": "What to run",
    "values": "Arms and seeds",
    "gpus_per_exp": "Placement",
    "gpus": "Placement",
    "max_hours": "Start and end",
    "output": "Files",
    "help": "Help",
}
"""The sections of a long help, each with the options from one of these on."""
_LONG_HELP = 20
"""Number of parameters from which on a help has sections."""

Command = Callable[..., None]


class StrictGroup(TyperGroup):
    """The program. If `version` or `help` is typed as a command, it names the option to type instead."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the whole summary of each command, under the heading of its `rich_help_panel`."""
        width = max(map(len, self.commands))
        groups: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            assert isinstance(command, StrictCommand)
            groups.setdefault(command.rich_help_panel or "", []).append((name.ljust(width), command.help or ""))
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that `args` begin with. Raises click's UsageError if there is none."""
        if args and args[0] in _PROGRAM_OPTIONS and args[0] not in self.commands:
            ctx.fail(f"There is no command '{args[0]}': type {ctx.command_path} {_PROGRAM_OPTIONS[args[0]]}.")
        return super().resolve_command(ctx, args)


class StrictCommand(TyperCommand):
    """A command that refuses words that would be misread.

    It refuses an option that is typed twice, since only the last one would count; an empty path, which would mean the
    current folder; and a number with `_`. If spaces separate the values of a list, it says what to type.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`, the words after the command's name. Raises click's UsageError for words that it cannot use."""
        words = list(args)
        # Shell completion passes incomplete words, and a request for help is always answered.
        if not ctx.resilient_parsing and not set(words) & set(ctx.help_option_names):
            self._refuse_misread(ctx, words)
        takes_extra_words, ctx.allow_extra_args = ctx.allow_extra_args, True
        try:
            extra_words = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            # Pydantic checks the values, and its messages say "input".
            problem = error.format_message().replace("Input should be", "must be").rstrip(".")
            example = " ".join((self.epilog or "").replace("\b", "").split())
            ctx.fail(f"{problem}. {example}")
        ctx.allow_extra_args = takes_extra_words
        if extra_words and not takes_extra_words and not ctx.resilient_parsing:
            names = [str(parameter.metavar) for parameter in self.params if isinstance(parameter, TyperArgument)]
            takes = f"Besides options, {self.name} takes {' and '.join(names) or 'nothing'}."
            advice = self._suggest_list(words, extra_words) or takes
            ctx.fail(f"Too many words: {' '.join(map(repr, extra_words))}. {advice}")
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
            if typed_name == "--seeds" and re.fullmatch(r"\d+(,\d+)+", str(value)):
                count = str(value).count(",") + 1
                seeds = ",".join(map(str, range(count)))
                ctx.fail(f"--seeds {value}: type a number of seeds, like --seeds {count} for {seeds}.")
            if parameter.metavar in _NUMBER_METAVARS and any(re.search(r"\d_\d", text or "") for text in texts):
                ctx.fail(f"{typed_name} {value}: type numbers without `_`, like 1000.")

    def _suggest_list(self, words: Sequence[str], extra_words: Sequence[str]) -> str:
        """Suggest what to type if extra words continue a list; return an empty text if they do not."""
        options = {hyphenate(name): parameter for parameter in self.params for name in parameter.opts}
        names = [hyphenate(word.partition("=")[0]) for word in words]
        for position, word in enumerate(words):
            name, sign, first_value = word.partition("=")
            if names[position] not in options or options[names[position]].metavar != _LIST_METAVAR:
                continue
            end = next((later for later in range(position + 1, len(words)) if names[later] in options), len(words))
            following = words[position + 1 : end]
            values = [value.strip(",") for value in (*([first_value] if sign else []), *following)]
            if len(values) > 1 and set(values) & {extra.strip(",") for extra in extra_words}:
                return f"The values of a list have commas between them and no spaces: type {name} {','.join(values)}"
        return ""


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
