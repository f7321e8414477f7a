"""How the words of a command become its options: what would be lost in silence is refused, with what to type."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperOption

_LIST_METAVAR = "LIST"


class StrictCommand(TyperCommand):
    """A command that refuses an option that is typed twice, of which only the last one would count.

    It also says what to type where spaces separate the values of a list.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`, the words after the command's name. Raise click's UsageError for words without a meaning."""
        words = list(args)
        if not ctx.resilient_parsing:  # of the completion in a shell, whose words are incomplete
            self._refuse_repeated(ctx, words)
        takes_extra_words, ctx.allow_extra_args = ctx.allow_extra_args, True
        extra_words = super().parse_args(ctx, args)
        ctx.allow_extra_args = takes_extra_words
        if extra_words and not takes_extra_words and not ctx.resilient_parsing:
            names = " ".join(map(repr, extra_words))
            ctx.fail(f"{names} belongs to no option. {self._suggest_list(words, extra_words)}".rstrip())
        return extra_words

    def _refuse_repeated(self, ctx: Any, words: list[str]) -> None:
        _, _, typed_parameters = self.make_parser(ctx).parse_args(args=list(words))
        counts = Counter(
            parameter.opts[0]
            for parameter in typed_parameters
            if isinstance(parameter, TyperOption) and not parameter.multiple and not parameter.is_flag
        )
        for name, count in counts.items():
            if count > 1:
                ctx.fail(f"{name} is typed {count} times: type it once.")

    def _suggest_list(self, words: Sequence[str], extra_words: Sequence[str]) -> str:
        """What to type if the last list before an extra word goes on with it; empty if there is no such list."""
        list_options = {
            name for parameter in self.params if parameter.metavar == _LIST_METAVAR for name in parameter.opts
        }
        for position, word in enumerate(words):
            if word not in list_options:
                continue
            values = []
            for value in words[position + 1 :]:
                if value.startswith("--"):
                    break
                values.append(value.strip(","))
            if len(values) > 1 and set(values) & {extra.strip(",") for extra in extra_words}:
                return f"The values of a list have commas between them and no spaces: type {word} {','.join(values)}"
        return ""
