"""Read a model's conversation format from its tokenizer's chat template.

A template renders a whole conversation as one text. Here conversations grow turn by turn, as exact tokens. So the
template is rendered once with marks in place of messages and split into the text between the marks. Checks make sure
that joining these parts turn by turn gives the same text and tokens as rendering the whole conversation.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from trainable.envs.prompts import CHATML, START_OF_THOUGHT, ChatFormat

Messages = Sequence[Mapping[str, str]]
SYSTEM_MARK, REPLY_MARK = "what-the-system-says", "<think>what-it-thinks</think><answer>what-it-answers</answer>"
USER_MARKS = ("what-user-one-says", "what-user-two-says", "what-user-three-says")
MESSAGE_SEPARATOR = "\n\n"
"""Separates system text and user text if a template has no system role."""


class UnusableTemplateError(Exception):
    """A template cannot be split into parts. The message says why."""


def read_chat_format(folder: Path, tokenizer: Tokenizer, eos_token_id: int, format_name: str = "auto") -> ChatFormat:
    """Read the chat format of the model in `folder` from its template.

    ChatML is used if there is no template or `format_name` is chatml; it starts with the tokens that the tokenizer puts
    before every text, such as <s>. eos_token_id: ends a reply if the template has no token for it. Raise ValueError for
    a template that cannot be built turn by turn.
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
            f"The chat template of the model in {folder} {error}. Conversations grow turn by turn here, and earlier "
            f"turns must not change. To use ChatML instead, type --set model.chat_format=chatml."
        ) from None
    return chat


def check_template(folder: Path) -> None:
    """Raise ValueError if the model in `folder` has a chat template that cannot be built turn by turn."""
    if read_template(folder) is not None:
        read_chat_format(folder, Tokenizer.from_file(str(folder / "tokenizer.json")), eos_token_id=0)


def _read_tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    tokenizer_config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return tokenizer_config


def read_template(folder: Path) -> str | None:
    """Read the chat template of the model in `folder`; return None if it has none.

    The template is a file or an entry of tokenizer_config.json, where it may be the default of several templates.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _read_tokenizer_config(folder).get("chat_template")
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


def _find_text_prefix(tokenizer: Tokenizer) -> str:
    """Find the tokens that the tokenizer puts before every text, such as <s>."""
    plain_ids = tokenizer.encode("a", add_special_tokens=False).ids
    full_ids = tokenizer.encode("a").ids
    starts = range(len(full_ids) - len(plain_ids) + 1)
    start = next((start for start in starts if full_ids[start : start + len(plain_ids)] == plain_ids), 0)
    return "".join(_read_token(tokenizer, number) for number in full_ids[:start])


def _read_token(tokenizer: Tokenizer, token_id: int) -> str:
    token: str | None = tokenizer.id_to_token(token_id)
    return token or ""


def _make_renderer(template: str, tokenizer_config: Mapping[str, Any]) -> Callable[[Messages], str]:
    """Make a function that renders messages as the text up to the next reply, without `START_OF_THOUGHT` at its end.

    A template gets only the messages and the special tokens. It gets no clock, so that templates with a date give the
    same text every day. Templates are downloaded code, so they run in jinja2's sandbox.
    """

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
            text = environment.from_string(template).render(
                messages=messages,
                add_generation_prompt=True,
                tools=None,
                documents=None,
                raise_exception=refuse,
                **special_tokens,
            )
            return text.removesuffix(START_OF_THOUGHT)  # prompts add it, see `make_prompt_template`
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise UnusableTemplateError(f"does not accept such a conversation ({error})") from error

    return render


def _parse_template(render: Callable[[Messages], str], tokenizer: Tokenizer, eos: str) -> ChatFormat:
    """Split a template into parts. If it refuses system messages, the first user message begins with their text."""
    separate_messages = [{"role": "system", "content": SYSTEM_MARK}, {"role": "user", "content": USER_MARKS[0]}]
    merged_messages = [{"role": "user", "content": SYSTEM_MARK + MESSAGE_SEPARATOR + USER_MARKS[0]}]
    try:
        return _parse_parts(render, separate_messages, tokenizer, eos)
    except UnusableTemplateError:
        return _parse_parts(render, merged_messages, tokenizer, eos)


def _parse_parts(
    render: Callable[[Messages], str], first_messages: Messages, tokenizer: Tokenizer, eos: str
) -> ChatFormat:
    """Split a template whose conversations start with `first_messages` into parts, and check them over three turns."""
    opening = render(first_messages)
    start, system_mark, remainder = opening.partition(SYSTEM_MARK)
    to_user, user_mark, to_reply = remainder.partition(USER_MARKS[0])
    if not (system_mark and user_mark):
        raise UnusableTemplateError("changes or hides the text of a message")
    messages = [*first_messages]
    for user_text in USER_MARKS[1:]:
        messages += [{"role": "assistant", "content": REPLY_MARK}, {"role": "user", "content": user_text}]
    full_text = render(messages)
    # Blanks that a template puts before a reply become part of the text before the reply.
    blank, reply_mark, remainder = full_text.removeprefix(opening).partition(REPLY_MARK)
    if not (full_text.startswith(opening) and reply_mark) or blank.strip():
        raise UnusableTemplateError(
            "changes earlier turns when a conversation continues, for example by dropping thoughts"
        )
    between, user_mark, remainder = remainder.partition(USER_MARKS[1])
    if not user_mark or remainder != to_reply + blank + REPLY_MARK + between + USER_MARKS[2] + to_reply:
        raise UnusableTemplateError("does not put the same text around every turn")
    end, next_user = _parse_end_token(between, tokenizer, eos)
    return ChatFormat(start, to_user, to_reply + blank, end, next_user, _strips_blanks(render, first_messages))


def _parse_end_token(between: str, tokenizer: Tokenizer, eos: str) -> tuple[str, str]:
    """Split `between` into the special token at its start, which ends a reply, and the remainder.

    Without such a token, replies end with the end-of-text token `eos`. Blanks after a token that strips them during
    encoding are not part of the remainder.
    """
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.special and between.startswith(token.content):
            remainder = between.removeprefix(token.content)
            return token.content, remainder.lstrip() if token.rstrip else remainder
    stripped_text = between.lstrip()
    if eos and stripped_text.startswith(eos):  # blanks before it are dropped, since no reply samples them
        return eos, stripped_text.removeprefix(eos)
    return eos, between


def _strips_blanks(render: Callable[[Messages], str], first_messages: Sequence[Mapping[str, str]]) -> bool:
    """Check whether the template strips blanks around a message. UnusableTemplateError if it changes them otherwise."""
    plain_text, content = render(first_messages), first_messages[-1]["content"]
    padded_content = f"\n{content}\n"
    padded_text = render([*first_messages[:-1], {"role": "user", "content": padded_content}])
    if padded_text not in (plain_text, plain_text.replace(content, padded_content)):
        raise UnusableTemplateError("changes the blanks around a message, but does not strip them")
    return padded_text == plain_text


def _check_tokens(chat: ChatFormat, tokenizer: Tokenizer) -> None:
    """Raise UnusableTemplateError unless a turn's tokens are the same alone (as the model sees them) as in context."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    turn = chat.format_next_turn("Turn 2:\n#O_\n")
    turn_tokens = [*encode(chat.end_marker), *encode(turn)]
    conversation_tokens = encode(
        f"{chat.format_first_turn('Play.', 'Turn 1:')}<think>Up</think><answer>Up</answer>{chat.end_marker}{turn}"
    )
    if len(encode(chat.end_marker)) != 1 or conversation_tokens[-len(turn_tokens) :] != turn_tokens:
        raise UnusableTemplateError("and its tokenizer give a turn other tokens alone than inside the conversation")
