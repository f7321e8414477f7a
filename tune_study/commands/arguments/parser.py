"""Parse the words of a command; refuse words that would be ignored or misread, and say what to type instead.

Options that several commands share form a group: a dataclass whose fields are annotated with Typer options. A command
receives a group as one argument. In the signature that Typer reads, the group's options replace that argument.
"""

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from search_spaces.declaration.study import Study

VALUES_OPTION = "--values"
"""The option for the values of any study's axis; some studies have a published one in addition."""

_LIST_METAVAR = "LIST"
_PLACE_METAVARS = ("DIR", "FILE", "RUN", "RUN...", "FOLDER...")
_NUMBER_METAVARS = ("N", "S", "H", "V")
_PROGRAM_OPTIONS = {"version": "--version", "help": "--help"}

Command = Callable[..., None]


class StrictGroup(TyperGroup):
    """The program. If `version` or `help` is typed as a command, it names the option to type instead."""

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
            ctx.fail(f"{problem}. {self._get_example()}")
        ctx.allow_extra_args = takes_extra_words
        if extra_words and not takes_extra_words and not ctx.resilient_parsing:
            advice = self._suggest_list(words, extra_words) or self._describe_arguments()
            ctx.fail(f"Too many words: {' '.join(map(repr, extra_words))}. {advice}")
        return extra_words

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
            if parameter.metavar in _NUMBER_METAVARS and any(re.search(r"\d_\d", text or "") for text in texts):
                ctx.fail(f"{typed_name} {value}: type numbers without `_`, like 1000.")

    def _suggest_list(self, words: Sequence[str], extra_words: Sequence[str]) -> str:
        """Suggest what to type if extra words continue a list; return an empty text if they do not."""
        options = {name for parameter in self.params for name in parameter.opts}
        list_options = {
            name for parameter in self.params if parameter.metavar == _LIST_METAVAR for name in parameter.opts
        }
        for position, word in enumerate(words):
            name, sign, first_value = word.partition("=")
            if name not in list_options:
                continue
            values = [first_value] if sign else []
            for value in words[position + 1 :]:
                if value.partition("=")[0] in options:
                    break
                values.append(value)
            values = [value.strip(",") for value in values]
            if len(values) > 1 and set(values) & {extra.strip(",") for extra in extra_words}:
                return f"The values of a list have commas between them and no spaces: type {name} {','.join(values)}"
        return ""

    def _get_example(self) -> str:
        """Return the example at the end of the command's help as a sentence."""
        return " ".join((self.epilog or "").replace("\b", "").split())

    def _describe_arguments(self) -> str:
        """Say in a sentence which arguments the command takes besides options."""
        names = [parameter.metavar for parameter in self.params if isinstance(parameter, TyperArgument)]
        return f"Besides options, {self.name} takes {' and '.join(filter(None, names)) or 'nothing'}."


def expand_groups(command: Command) -> Command:
    """Replace a command's groups (parameters whose types are dataclasses) by their options.

    All parameters become keyword-only, because one with a default may then precede one without.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += [option for _, _, option in _list_options(groups[name])]
        else:
            parameters.append(_make_parameter(name, parameter.default, hints[name]))

    @functools.wraps(command)
    def run_with_groups(**arguments: Any) -> None:
        for name, group in groups.items():
            values: dict[str, Any] = {}
            for field, flag, option in _list_options(group):
                value = arguments.pop(option.name)
                if flag is None:
                    values[field] = value
                else:
                    values.setdefault(field, {})[flag] = value
            arguments[name] = group(**values)
        command(**arguments)

    run_with_groups.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run_with_groups


def _list_options(group: Any) -> Iterator[tuple[str, str | None, inspect.Parameter]]:
    """Yield (field, flag, command parameter) of each option. A field with several options has one value per flag."""
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        (options,) = hints[field.name].__metadata__
        if isinstance(options, dict):
            for flag, option in options.items():
                name = flag.removeprefix("--").replace("-", "_")
                yield field.name, flag, _make_parameter(name, None, Annotated[str | None, option])
        else:
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            yield field.name, None, _make_parameter(field.name, default, hints[field.name])


def _make_parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def make_axis_options(studies: Iterable[Study]) -> dict[str, Any]:
    """Make the options for axis values, by flag: --values, and every flag that one of `studies` declares.

    Each is accepted in both spellings (--kl-values, --kl_values).
    """
    help_text = "Values of the study's axis, for any study; see `list`."
    options = {VALUES_OPTION: typer.Option(VALUES_OPTION, metavar="LIST", help=help_text)}
    studies_by_flag: dict[str, list[Study]] = {}
    for study in studies:
        studies_by_flag.setdefault(study.axis.option, []).append(study)
    for flag, flag_studies in studies_by_flag.items():
        if flag != VALUES_OPTION:
            bare_flag = flag.removeprefix("--")
            spellings = dict.fromkeys([flag, f"--{bare_flag.replace('_', '-')}", f"--{bare_flag.replace('-', '_')}"])
            options[flag] = typer.Option(*spellings, metavar="LIST", help=_format_help(flag_studies))
    return options


def _format_help(studies: list[Study]) -> str:
    """Format the help of a flag: with the axis if one study declares it, else saying that it takes named arms."""
    axis = studies[0].axis
    example = ",".join((*axis.value_groups, *axis.grids["laptop"])[:2])
    if len(studies) == 1:
        return f"Study {studies[0].name}: values of {axis.setting}, for example {example}."
    names = f"{studies[0].name}, {studies[1].name}{', ...' * (len(studies) > 2)}"
    kinds = "arms or groups" if axis.value_groups else "arms"
    return f"Studies {names}: names of {kinds}, for example {example}."
