"""Command-line options for the axis values of every study, under the flags that the studies declare."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from typer import Option

from search_spaces.declaration.study import Study

VALUES_OPTION = "--values"
"""The option for the values of any study's axis; some studies have a published one in addition."""


def add_axis_options(studies: Iterable[Study]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a command an option for every flag that one of `studies` declares for its axis.

    The command receives all of these options as one argument `axes`: for each flag, the text that was typed, or
    None. In the help they appear at the position of `axes` among the parameters. Each has both spellings (--kl-values,
    --kl_values).
    """
    studies_by_flag: dict[str, list[Study]] = {}
    for study in studies:
        if study.axis.option != VALUES_OPTION:  # --values is an option of the command itself
            studies_by_flag.setdefault(study.axis.option, []).append(study)
    parameter_names = {flag: flag.strip("-").replace("-", "_") for flag in studies_by_flag}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run_with_axes(**arguments: Any) -> None:
            command(axes={flag: arguments.pop(name) for flag, name in parameter_names.items()}, **arguments)

        options = []
        for flag, name in parameter_names.items():
            option = Option(*_make_spellings(flag), metavar="LIST", help=_format_help(studies_by_flag[flag]))
            annotation = Annotated[str | None, option]
            options.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
        # Typer reads the options of a command from its signature, in which the options take the place of `axes`. All
        # parameters become keyword-only, because one with a default may then precede one without.
        signature = inspect.signature(command)
        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in signature.parameters.values()
        ]
        position = [parameter.name for parameter in parameters].index("axes")
        parameters[position : position + 1] = options
        run_with_axes.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run_with_axes

    return decorate


def _make_spellings(flag: str) -> list[str]:
    """The flag as declared, with hyphens, and with underscores; each spelling once."""
    bare_flag = flag.removeprefix("--")
    return list(dict.fromkeys([flag, f"--{bare_flag.replace('_', '-')}", f"--{bare_flag.replace('-', '_')}"]))


def _format_help(studies: list[Study]) -> str:
    """Help text of a flag: the axis if one study declares it, else that it takes named arms."""
    axis = studies[0].axis
    example = ",".join((*axis.value_groups, *axis.grids["laptop"])[:2])
    if len(studies) == 1:
        return f"Study {studies[0].name}: values of {axis.setting}, for example {example}."
    names = f"{studies[0].name}, {studies[1].name}{', ...' * (len(studies) > 2)}"
    kinds = "arms or groups" if axis.value_groups else "arms"
    return f"Studies {names}: names of {kinds}, for example {example}."
