"""Read a model's conversation format from the chat template of its tokenizer.

A template renders a whole conversation as one text. Here conversations grow turn by turn, as exact tokens, so the
template is rendered once with marks in place of contents and cut into the text between the marks. Joining these parts
turn by turn must give the text and the tokens that the template gives for the whole conversation. This is checked.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from trainable.envs.prompts import CHATML, ChatFormat

Messages = Sequence[Mapping[str, str]]
SYSTEM_MARK, REPLY_MARK = "what-the-system-says", "<think>what-it-thinks</think><answer>what-it-answers</answer>"
USER_MARKS = ("what-user-one-says", "what-user-two-says", "what-user-three-says")
MESSAGE_SEPARATOR = "\n\n"
"""Stands between system text and user text if a template has no system role."""


class UnusableTemplateError(Exception):
    """A template that cannot be cut into parts, and why."""


def read_chat_format(folder: Path, tokenizer: Tokenizer, eos_token_id: int, format_name: str = "auto") -> ChatFormat:
    """The chat format of the model in `folder`: from its template, or ChatML if it has none or `format_name` is chatml.

    eos_token_id: ends a reply if the template has no token there. A conversation in ChatML begins with the tokens that
    the tokenizer puts before every text, such as <s>. ValueError for a template whose text cannot be built turn by
    turn.
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
    """ValueError if the model in `folder` has a chat template that cannot be built turn by turn."""
    if read_template(folder) is not None:
        read_chat_format(folder, Tokenizer.from_file(str(folder / "tokenizer.json")), eos_token_id=0)


def _read_tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    tokenizer_config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return tokenizer_config


def read_template(folder: Path) -> str | None:
    """The chat template of the model in `folder`, None if it has none.

    The template is a file, or an entry of tokenizer_config.json, where it may be the default of several templates.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _read_tokenizer_config(folder).get("chat_template")
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


def _find_text_prefix(tokenizer: Tokenizer) -> str:
    """The tokens that the tokenizer puts before every text, such as <s>."""
    # Encoding a text with them and without them shows which ones they are.
    plain_ids = tokenizer.encode("a", add_special_tokens=False).ids
    full_ids = tokenizer.encode("a").ids
    starts = range(len(full_ids) - len(plain_ids) + 1)
    start = next((start for start in starts if full_ids[start : start + len(plain_ids)] == plain_ids), 0)
    return "".join(_read_token(tokenizer, number) for number in full_ids[:start])


def _read_token(tokenizer: Tokenizer, token_id: int) -> str:
    token: str | None = tokenizer.id_to_token(token_id)
    return token or ""


def _make_renderer(template: str, tokenizer_config: Mapping[str, Any]) -> Callable[[Messages], str]:
    """A function from messages to the text up to the next reply.

    A template sees only the messages and the special tokens. It has no clock, so that a template with a date gives the
    same text every day. A template is code from a download, so it runs in jinja2's sandbox.
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
            return environment.from_string(template).render(
                messages=messages,
                add_generation_prompt=True,
                tools=None,
                documents=None,
                raise_exception=refuse,
                **special_tokens,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise UnusableTemplateError(f"does not accept such a conversation ({error})") from error

    return render


def _parse_template(render: Callable[[Messages], str], tokenizer: Tokenizer, eos: str) -> ChatFormat:
    """The parts of a template. If it refuses a system message, the first user message begins with the system text."""
    separate_messages = [{"role": "system", "content": SYSTEM_MARK}, {"role": "user", "content": USER_MARKS[0]}]
    merged_messages = [{"role": "user", "content": SYSTEM_MARK + MESSAGE_SEPARATOR + USER_MARKS[0]}]
    try:
        return _parse_parts(render, separate_messages, tokenizer, eos)
    except UnusableTemplateError:
        return _parse_parts(render, merged_messages, tokenizer, eos)


def _parse_parts(
    render: Callable[[Messages], str], first_messages: Messages, tokenizer: Tokenizer, eos: str
) -> ChatFormat:
    """The parts of a template whose conversations begin with `first_messages`, checked over three turns."""
    opening = render(first_messages)
    start, system_mark, remainder = opening.partition(SYSTEM_MARK)
    to_user, user_mark, to_reply = remainder.partition(USER_MARKS[0])
    if not (system_mark and user_mark):
        raise UnusableTemplateError("changes or hides the text of a message")
    messages = [*first_messages]
    for user_text in USER_MARKS[1:]:
        messages += [{"role": "assistant", "content": REPLY_MARK}, {"role": "user", "content": user_text}]
    full_text = render(messages)
    # Some templates put blanks before a reply. They become part of the text before the reply.
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
    """The special token at the start of `between`, which ends a reply, and the remainder of `between`.

    If there is no such token, a reply ends with the end-of-text token `eos`. Some tokens strip the blanks after them
    when text is encoded, so these blanks are not in the remainder.
    """
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.special and between.startswith(token.content):
            remainder = between.removeprefix(token.content)
            return token.content, remainder.lstrip() if token.rstrip else remainder
    stripped_text = between.lstrip()
    if eos and stripped_text.startswith(eos):  # blanks before the end token are dropped, since no reply samples them
        return eos, stripped_text.removeprefix(eos)
    return eos, between


def _strips_blanks(render: Callable[[Messages], str], first_messages: Sequence[Mapping[str, str]]) -> bool:
    """Whether the template strips the blanks around a message. UnusableTemplateError if it changes them otherwise."""
    plain_text, content = render(first_messages), first_messages[-1]["content"]
    padded_content = f"\n{content}\n"
    padded_text = render([*first_messages[:-1], {"role": "user", "content": padded_content}])
    if padded_text not in (plain_text, plain_text.replace(content, padded_content)):
        raise UnusableTemplateError("changes the blanks around a message, but does not strip them")
    return padded_text == plain_text


def _check_tokens(chat: ChatFormat, tokenizer: Tokenizer) -> None:
    """UnusableTemplateError unless a turn has the same tokens alone, as the model gets it, and in the conversation."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    turn = chat.format_next_turn("Turn 2:\n#O_\n")
    turn_tokens = [*encode(chat.end_marker), *encode(turn)]
    conversation_tokens = encode(
        f"{chat.format_first_turn('Play.', 'Turn 1:')}<think>Up</think><answer>Up</answer>{chat.end_marker}{turn}"
    )
    if len(encode(chat.end_marker)) != 1 or conversation_tokens[-len(turn_tokens) :] != turn_tokens:
        raise UnusableTemplateError("and its tokenizer give a turn other tokens alone than inside the conversation")
