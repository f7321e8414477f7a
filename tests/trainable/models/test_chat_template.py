"""Chat formats read from templates: a conversation built turn by turn equals what transformers renders at once."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from tests.fakes.hub_models import (
    DROPS_THOUGHTS_TEMPLATE,
    NO_SYSTEM_TEMPLATE,
    STRIPPING_TEMPLATE,
    make_byte_tokenizer,
    write_tokenizer_config,
)
from trainable.envs.prompts import CHATML, ChatFormat
from trainable.models.chat_template import read_chat_format

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}" + PLAIN
SILENT_ON_SYSTEM = "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}" + PLAIN
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'system' %}{{ m.content }}\n\n{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
NO_MARKS = (
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
BLANK_BEFORE_END = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
DATED = "Today is {% if strftime_now is defined %}{{ strftime_now('%c') }}{% else %}some day{% endif %}.\n" + PLAIN
BLANK_BEFORE_REPLY = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
SYSTEM_IN_THE_LAST = (
    "{% set told = messages[0].content if messages[0].role == 'system' else '' %}"
    "{{ bos_token }}{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
    "[INST] {% if loop.last and told %}{{ told }}\n\n{% endif %}{{ m.content }} [/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# The template, whether it accepts a system message, and the token that ends a reply.
TEMPLATES = {
    "plain": (PLAIN, True, "<|im_end|>"),
    "default system": (DEFAULT_SYSTEM, True, "<|im_end|>"),
    "stripping": (STRIPPING_TEMPLATE, True, "<|end|>"),
    "no system": (NO_SYSTEM_TEMPLATE, False, "<|end|>"),
    "silent on system": (SILENT_ON_SYSTEM, False, "<|im_end|>"),
    "instruct": (INSTRUCT, True, "</s>"),
    "no marks": (NO_MARKS, True, "</s>"),
    "a blank before the reply": (BLANK_BEFORE_REPLY, False, "</s>"),
    "system in the last message": (SYSTEM_IN_THE_LAST, False, "</s>"),
}


def read_format(
    folder: Path, template: object, tokenizer: Tokenizer | None = None, setting: str = "auto"
) -> ChatFormat:
    tokenizer = tokenizer or make_byte_tokenizer()
    return read_chat_format(write_tokenizer_config(folder, template), tokenizer, tokenizer.token_to_id("</s>"), setting)


def render(template: str, messages: list[dict[str, str]]) -> str:
    """Render a conversation up to the next reply with transformers."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make_byte_tokenizer(), bos_token="<s>", eos_token="</s>")
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)


def make_messages(system: str, users: list[str], replies: list[str], has_system: bool) -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if has_system else []
    first_user = users[0] if has_system else f"{system}\n\n{users[0].strip()}"
    conversation = [*first, {"role": "user", "content": first_user}]
    for user, reply in zip(users[1:], replies, strict=True):
        conversation += [{"role": "assistant", "content": reply}, {"role": "user", "content": user}]
    return conversation


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_turn_by_turn_is_what_transformers_renders(name: str, tmp_path: Path) -> None:
    template, has_system, end_marker = TEMPLATES[name]
    chat = read_format(tmp_path, template)
    assert chat.end_marker == end_marker
    users = ["\nTurn 1:\n#O\n" if has_system else "Turn 1:", "Turn 2:\n#X\n", "  three "]
    replies = ["<think>P</think><answer>Up</answer>", "<think>a\n\nb</think> <answer>Left</answer>"]
    text = chat.format_first_turn("Play.", users[0])
    blank = " " if name == "a blank before the reply" else ""
    assert text == render(template, make_messages("Play.", users[:1], [], has_system)) + blank
    for number, (user, reply) in enumerate(zip(users[1:], replies, strict=True), 2):
        text += reply + chat.end_marker + chat.format_next_turn(user)
        expected = render(template, make_messages("Play.", users[:number], replies[: number - 1], has_system)) + blank
        assert text.replace("</s>", "") == expected.replace("</s>", "")
        assert (text == expected) == (name != "no marks")  # a sampled end marker stays in the conversation


def test_ends_that_take_blanks_with_them(tmp_path: Path) -> None:
    chat = read_format(tmp_path, BLANK_BEFORE_END)
    assert (chat.end_marker, chat.next_user_prefix) == ("</s>", "<s>[INST] ")
    tokenizer = make_byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<|close|>", special=True, normalized=False, rstrip=True)])
    chat = read_format(tmp_path, PLAIN.replace("<|im_end|>", "<|close|>"), tokenizer)
    assert (chat.end_marker, chat.next_user_prefix) == ("<|close|>", "<|im_start|>user\n")


def test_the_template_of_qwen_is_the_default_format(tmp_path: Path) -> None:
    assert read_format(tmp_path, PLAIN) == read_format(tmp_path, DEFAULT_SYSTEM) == CHATML


def test_a_template_has_no_access_to_the_clock(tmp_path: Path) -> None:
    assert read_format(tmp_path, DATED).system_prefix == "Today is some day.\n<|im_start|>system\n"


@pytest.mark.parametrize("template", [None, PLAIN])
def test_without_a_template_it_is_chatml_after_what_the_tokenizer_puts_first(
    tmp_path: Path, template: str | None
) -> None:
    setting = "auto" if template is None else "chatml"
    assert read_format(tmp_path, template, make_byte_tokenizer(), setting) == CHATML
    chat = read_format(tmp_path, template, make_byte_tokenizer(adds_start=True), setting)
    assert chat.system_prefix == "<s>" + CHATML.system_prefix


def test_the_templates_own_file_goes_first_and_a_list_has_a_default(tmp_path: Path) -> None:
    assert read_chat_format(tmp_path, make_byte_tokenizer(), 0) == CHATML
    templates = [{"name": "tool_use", "template": NO_MARKS}, {"name": "default", "template": PLAIN}]
    assert read_format(tmp_path, templates) == CHATML
    (tmp_path / "chat_template.jinja").write_text(STRIPPING_TEMPLATE)
    assert read_format(tmp_path, templates).strips_content


OPENS_THOUGHTS = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
COUNTS_TURNS = PLAIN.replace(
    "{{ m['content'] }}", "{% if m.role == 'user' %}{{ loop.index }} {% endif %}{{ m['content'] }}"
)
LAST_IS_OTHER = PLAIN.replace("{{ m['content'] }}", "{{ m['content'] }}{% if loop.last %}!{% endif %}")
REFUSED = {
    "drops thoughts": (DROPS_THOUGHTS_TEMPLATE, "changes earlier turns when a conversation continues"),
    "opens thoughts": (OPENS_THOUGHTS, "changes earlier turns when a conversation continues"),
    "counts turns": (COUNTS_TURNS, "does not put the same text around every turn"),
    "last is other": (LAST_IS_OTHER, "changes earlier turns when a conversation continues"),
    "refuses replies": ("{{ raise_exception('never') }}", r"does not accept such a conversation \(never\)"),
    "hides users": ("hello", "changes or hides the text of a message"),
    "wrong syntax": ("{% for %}", "does not accept such a conversation"),
    "strips one side": (PLAIN.replace("m['content']", "m['content'].lstrip()"), "changes the blanks around a message"),
    "reaches out": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "does not accept such a conversation"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_template_that_does_not_grow_is_refused_with_what_to_type(name: str, tmp_path: Path) -> None:
    template, reason = REFUSED[name]
    with pytest.raises(ValueError, match=rf"The chat template .* {reason}.*--set model\.chat_format=chatml"):
        read_format(tmp_path, template)
    assert read_format(tmp_path, template, setting="chatml") == CHATML


def test_a_tokenizer_that_cuts_turns_otherwise_is_refused(tmp_path: Path) -> None:
    tokenizer = make_byte_tokenizer()
    # This tokenizer adds a blank before every text, but not before every part of a text.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="_", prepend_scheme="first")
    with pytest.raises(ValueError, match="give a turn other tokens alone than inside the conversation"):
        read_format(tmp_path, NO_MARKS, tokenizer)
