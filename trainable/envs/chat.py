"""Chat formats: how a system message, user messages and replies become one text, in ChatML or a similar format."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ChatFormat:
    """The text between the contents of messages, for conversations that grow turn by turn.

    system_prefix: before the system message. first_user_prefix: from the system message to the first user message.
    reply_prefix: from a user message to the reply. end_marker: ends a reply; it is one token, which the model samples.
    next_user_prefix: from the end marker to the next user message. strips_content: whether blanks at both ends of
    contents are stripped.
    """

    system_prefix: str
    first_user_prefix: str
    reply_prefix: str
    end_marker: str
    next_user_prefix: str
    strips_content: bool = False

    def format_first_turn(self, system: str, user: str) -> str:
        """The conversation up to its first reply."""
        opening = f"{self.system_prefix}{self._format_content(system)}{self.first_user_prefix}"
        return f"{opening}{self._format_content(user)}{self.reply_prefix}"

    def format_next_turn(self, user: str) -> str:
        """The text between the end of a reply and the next reply."""
        return f"{self.next_user_prefix}{self._format_content(user)}{self.reply_prefix}"

    def _format_content(self, text: str) -> str:
        return text.strip() if self.strips_content else text


CHATML = ChatFormat(
    system_prefix="<|im_start|>system\n",
    first_user_prefix="<|im_end|>\n<|im_start|>user\n",
    reply_prefix="<|im_end|>\n<|im_start|>assistant\n",
    end_marker="<|im_end|>",
    next_user_prefix="\n<|im_start|>user\n",
)
"""The format that Qwen models expect; also used for models without a chat template."""
