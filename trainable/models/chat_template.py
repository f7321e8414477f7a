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
SYSTEM_MARK, REPLY_MARK = "what-the-system-says", "<think>what-it-thinks</think><answer>what-it-answers</answer>"
USER_MARKS = ("what-user-one-says", "what-user-two-says", "what-user-three-says")
MESSAGE_SEPARATOR = "\n\n"  # what the system says and the user's message, where they are one


class UnusableTemplateError(Exception):
    """Why a template cannot be cut."""


def read_chat_format(folder: Path, tokenizer: Tokenizer, eos_token_id: int, format_name: str = "auto") -> ChatFormat:
    """The format of the model in `folder`: that of its template; ChatML where it has none, or `wanted` is chatml.

    eos_token_id: ends a reply where the template ends it with no token of its own. ChatML begins with what the
    tokenizer puts before every text, if it puts anything. ValueError for a template that cannot be built turn by turn.
    """
    tokenizer_config = _read_tokenizer_config(folder)
    template = read_template(folder) if format_name == "auto" else None
    if template is None:
        return replace(CHATML, system_prefix=_find_text_prefix(tokenizer) + CHATML.system_prefix)
    try:
        chat = _parse_template(
            _make_renderer(template, tokenizer_config), tokenizer, _read_token(tokenizer, eos_token_id)
        )
        _check_tokens(chat, tokenizer)
    except UnusableTemplateError as error:
        raise ValueError(
            f"The chat template of the model in {folder} {error}. Conversations grow turn by turn here, and what was "
            f"said stays as it was. Type --set model.chat_format=chatml to speak ChatML with it instead."
        ) from None
    return chat


def check_template(folder: Path) -> None:
    """ValueError where the model in `folder` has a chat template that cannot be built turn by turn."""
    if read_template(folder) is not None:
        read_chat_format(folder, Tokenizer.from_file(str(folder / "tokenizer.json")), 0)


def _read_tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    tokenizer_config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return tokenizer_config


def read_template(folder: Path) -> str | None:
    """The template of the model in `folder`, None where it has none.

    From its own file or from tokenizer_config.json, where it may be one of several by name.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _read_tokenizer_config(folder).get("chat_template")
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


def _find_text_prefix(tokenizer: Tokenizer) -> str:
    """The tokens that the tokenizer puts before a text of itself, such as <s>."""
    plain_ids = tokenizer.encode("a", add_special_tokens=False).ids
    full_ids = tokenizer.encode("a").ids
    return "".join(_read_token(tokenizer, number) for number in full_ids[: max(0, _find_start(full_ids, plain_ids))])


def _read_token(tokenizer: Tokenizer, token_id: int) -> str:
    token: str | None = tokenizer.id_to_token(token_id)
    return token or ""


def _find_start(sequence: Sequence[int], subsequence: Sequence[int]) -> int:
    starts = range(len(sequence) - len(subsequence) + 1)
    return next((start for start in starts if list(sequence[start : start + len(subsequence)]) == list(subsequence)), 0)


def _make_renderer(template: str, tokenizer_config: Mapping[str, Any]) -> Callable[[Messages], str]:
    """`messages -> text up to the next reply`; it knows no clock, so that a template that tells the date is the same
    every day, and sees nothing but messages and the names of special tokens."""

    def refuse(reason: str) -> NoReturn:
        raise TemplateError(reason)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    special_tokens = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in tokenizer_config.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }

    def render(messages: Messages) -> str:
        try:
            return environment.from_string(template).render(
                messages=messages,
                add_generation_prompt=True,
                tools=None,
                documents=None,
                raise_exception=refuse,
                **special_tokens,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise UnusableTemplateError(f"does not take such a conversation ({error})") from error

    return render


def _parse_template(render: Callable[[Messages], str], tokenizer: Tokenizer, eos: str) -> ChatFormat:
    """The parts of a template. What the system says opens the first user message where it has no place of its own."""
    separate_messages = [{"role": "system", "content": SYSTEM_MARK}, {"role": "user", "content": USER_MARKS[0]}]
    merged_messages = [{"role": "user", "content": SYSTEM_MARK + MESSAGE_SEPARATOR + USER_MARKS[0]}]
    try:
        return _parse_parts(render, separate_messages, tokenizer, eos)
    except UnusableTemplateError:
        return _parse_parts(render, merged_messages, tokenizer, eos)


def _parse_parts(
    render: Callable[[Messages], str], first_messages: Messages, tokenizer: Tokenizer, eos: str
) -> ChatFormat:
    """The parts of a template whose conversations begin with `first`, checked over three turns."""
    opening = render(first_messages)
    start, system_mark, remainder = opening.partition(SYSTEM_MARK)
    to_user, user_mark, to_reply = remainder.partition(USER_MARKS[0])
    if not (system_mark and user_mark):
        raise UnusableTemplateError("does not show a message as it is")
    messages = [*first_messages]
    for user_text in USER_MARKS[1:]:
        messages += [{"role": "assistant", "content": REPLY_MARK}, {"role": "user", "content": user_text}]
    full_text = render(messages)
    blank, reply_mark, remainder = full_text.removeprefix(opening).partition(
        REPLY_MARK
    )  # a blank may stand before a reply
    if not (full_text.startswith(opening) and reply_mark) or blank.strip():
        raise UnusableTemplateError(
            "tells a conversation's beginning otherwise once it goes on, as one that drops thoughts does"
        )
    between, user_mark, remainder = remainder.partition(USER_MARKS[1])
    if not user_mark or remainder != to_reply + blank + REPLY_MARK + between + USER_MARKS[2] + to_reply:
        raise UnusableTemplateError("does not put the same text round every turn")
    end, next_user = _parse_end_token(between, tokenizer, eos)
    return ChatFormat(start, to_user, to_reply + blank, end, next_user, _strips_blanks(render, first_messages))


def _parse_end_token(between: str, tokenizer: Tokenizer, eos: str) -> tuple[str, str]:
    """The special token that `between` begins with, which ends a reply, and what is left of `between`.

    The model's own end where there is none. A token that takes the blanks after it to itself leaves none of them.
    """
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.special and between.startswith(token.content):
            remainder = between.removeprefix(token.content)
            return token.content, remainder.lstrip() if token.rstrip else remainder
    stripped_text = between.lstrip()
    if eos and stripped_text.startswith(eos):  # a blank stands before it: the model's own end takes the place of both
        return eos, stripped_text.removeprefix(eos)
    return eos, between


def _strips_blanks(render: Callable[[Messages], str], first_messages: Sequence[Mapping[str, str]]) -> bool:
    """Whether the template takes the blanks round a message away."""
    plain_text, content = render(first_messages), first_messages[-1]["content"]
    padded_content = f"\n{content}\n"
    padded_text = render([*first_messages[:-1], {"role": "user", "content": padded_content}])
    if padded_text not in (plain_text, plain_text.replace(content, padded_content)):
        raise UnusableTemplateError("changes the blanks round a message in a way of its own")
    return padded_text == plain_text


def _check_tokens(chat: ChatFormat, tokenizer: Tokenizer) -> None:
    """Unusable unless a turn has the same tokens alone, as it is given to the model, and inside the conversation."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    turn = chat.format_next_turn("Turn 2:\n#O_\n")
    turn_tokens = [*encode(chat.end_marker), *encode(turn)]
    conversation_tokens = encode(
        f"{chat.format_first_turn('Play.', 'Turn 1:')}<think>Up</think><answer>Up</answer>{chat.end_marker}{turn}"
    )
    if len(encode(chat.end_marker)) != 1 or conversation_tokens[-len(turn_tokens) :] != turn_tokens:
        raise UnusableTemplateError("and its tokenizer cut a turn into other tokens alone than inside the conversation")
