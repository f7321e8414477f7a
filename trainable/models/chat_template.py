"""The format of a model's conversations, from the chat template that its tokenizer comes with.

A template makes a text of a whole conversation. Here conversations grow turn by turn, as exact tokens, so the template
is rendered once with marks for contents and cut into what stands between them. Whether putting these parts together
turn by turn gives what the template gives of the whole is checked, in text and in tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from trainable.envs.chat import CHATML, ChatFormat

Messages = Sequence[Mapping[str, str]]
SYSTEM, REPLY = "what-the-system-says", "<think>what-it-thinks</think><answer>what-it-answers</answer>"
USERS = ("what-user-one-says", "what-user-two-says", "what-user-three-says")
BETWEEN = "\n\n"  # what the system says and the user's message, where they are one


class Unusable(Exception):
    """Why a template cannot be cut."""


def chat_format(folder: Path, tokenizer: Tokenizer, eos_token_id: int, wanted: str = "auto") -> ChatFormat:
    """The format of the model in `folder`: that of its template; ChatML where it has none, or `wanted` is chatml.

    eos_token_id: ends a reply where the template ends it with no token of its own. ChatML begins with what the
    tokenizer puts before every text, if it puts anything. ValueError for a template that cannot be built turn by turn.
    """
    settings = _settings(folder)
    template = own_template(folder) if wanted == "auto" else None
    if template is None:
        return replace(CHATML, start=_before_text(tokenizer) + CHATML.start)
    try:
        found = _cut(_renderer(template, settings), tokenizer, _token(tokenizer, eos_token_id))
        _check_tokens(found, tokenizer)
    except Unusable as error:
        raise ValueError(
            f"The chat template of the model in {folder} {error}. Conversations grow turn by turn here, and what was "
            f"said stays as it was. Type --set model.chat_format=chatml to speak ChatML with it instead."
        ) from None
    return found


def check_template(folder: Path) -> None:
    """ValueError where the model in `folder` has a chat template that cannot be built turn by turn."""
    if own_template(folder) is not None:
        chat_format(folder, Tokenizer.from_file(str(folder / "tokenizer.json")), 0)


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def own_template(folder: Path) -> str | None:
    """The template of the model in `folder`, None where it has none.

    From its own file or from tokenizer_config.json, where it may be one of several by name.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    named = _settings(folder).get("chat_template")
    if isinstance(named, list):
        return next((entry["template"] for entry in named if entry.get("name") == "default"), None)
    return named


def _before_text(tokenizer: Tokenizer) -> str:
    """The tokens that the tokenizer puts before a text of itself, such as <s>."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    return "".join(_token(tokenizer, number) for number in whole[: max(0, _find(whole, plain))])


def _token(tokenizer: Tokenizer, number: int) -> str:
    found: str | None = tokenizer.id_to_token(number)
    return found or ""


def _find(whole: Sequence[int], part: Sequence[int]) -> int:
    starts = range(len(whole) - len(part) + 1)
    return next((start for start in starts if list(whole[start : start + len(part)]) == list(part)), 0)


def _renderer(template: str, settings: Mapping[str, Any]) -> Callable[[Messages], str]:
    """`messages -> text up to the next reply`; it knows no clock, so that a template that tells the date is the same
    every day, and sees nothing but messages and the names of special tokens."""

    def refuse(reason: str) -> NoReturn:
        raise TemplateError(reason)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    specials = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in settings.items() if name.endswith("_token") and isinstance(value, str | dict)
    }  # fmt: skip

    def render(messages: Messages) -> str:
        try:
            return environment.from_string(template).render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None, raise_exception=refuse,
                **specials,
            )  # fmt: skip
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise Unusable(f"does not take such a conversation ({error})") from error

    return render


def _cut(render: Callable[[Messages], str], tokenizer: Tokenizer, eos: str) -> ChatFormat:
    """The parts of a template. What the system says opens the first user message where it has no place of its own."""
    own = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USERS[0]}]
    joined = [{"role": "user", "content": SYSTEM + BETWEEN + USERS[0]}]
    try:
        return _parts(render, own, tokenizer, eos)
    except Unusable:
        return _parts(render, joined, tokenizer, eos)


def _parts(render: Callable[[Messages], str], first: Messages, tokenizer: Tokenizer, eos: str) -> ChatFormat:
    """The parts of a template whose conversations begin with `first`, checked over three turns."""
    opening = render(first)
    start, system, rest = opening.partition(SYSTEM)
    to_user, user, to_reply = rest.partition(USERS[0])
    if not (system and user):
        raise Unusable("does not show a message as it is")
    turns = [*first]
    for later in USERS[1:]:
        turns += [{"role": "assistant", "content": REPLY}, {"role": "user", "content": later}]
    whole = render(turns)
    blank, reply, rest = whole.removeprefix(opening).partition(REPLY)  # a blank may stand before a reply
    if not (whole.startswith(opening) and reply) or blank.strip():
        raise Unusable("tells a conversation's beginning otherwise once it goes on, as one that drops thoughts does")
    between, user, rest = rest.partition(USERS[1])
    if not user or rest != to_reply + blank + REPLY + between + USERS[2] + to_reply:
        raise Unusable("does not put the same text round every turn")
    end, next_user = _end(between, tokenizer, eos)
    return ChatFormat(start, to_user, to_reply + blank, end, next_user, _strips(render, first))


def _end(between: str, tokenizer: Tokenizer, eos: str) -> tuple[str, str]:
    """The special token that `between` begins with, which ends a reply, and what is left of `between`.

    The model's own end where there is none. A token that takes the blanks after it to itself leaves none of them.
    """
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.special and between.startswith(token.content):
            left = between.removeprefix(token.content)
            return token.content, left.lstrip() if token.rstrip else left
    later = between.lstrip()
    if eos and later.startswith(eos):  # a blank stands before it: the model's own end takes the place of both
        return eos, later.removeprefix(eos)
    return eos, between


def _strips(render: Callable[[Messages], str], first: Sequence[Mapping[str, str]]) -> bool:
    """Whether the template takes the blanks round a message away."""
    plain, content = render(first), first[-1]["content"]
    padded = f"\n{content}\n"
    found = render([*first[:-1], {"role": "user", "content": padded}])
    if found not in (plain, plain.replace(content, padded)):
        raise Unusable("changes the blanks round a message in a way of its own")
    return found == plain


def _check_tokens(found: ChatFormat, tokenizer: Tokenizer) -> None:
    """Unusable unless a turn has the same tokens alone, as it is given to the model, and inside the conversation."""

    def tokens(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    turn = found.following("Turn 2:\n#O_\n")
    alone = [*tokens(found.end), *tokens(turn)]
    whole = tokens(f"{found.opening('Play.', 'Turn 1:')}<think>Up</think><answer>Up</answer>{found.end}{turn}")
    if len(tokens(found.end)) != 1 or whole[-len(alone) :] != alone:
        raise Unusable("and its tokenizer cut a turn into other tokens alone than inside the conversation")
