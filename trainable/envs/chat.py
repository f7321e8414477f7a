"""How a system message, user messages and replies become one text: ChatML, or any format of the same parts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ChatFormat:
    """The text between the contents of messages, for conversations that grow turn by turn.

    start: before the system message. to_user: from it to the first user message. to_reply: from a user message to the
    reply. end: what ends a reply; one token, which the model samples. next_user: from there to the next user message.
    strips: whether contents lose blanks at both ends.
    """

    system_prefix: str
    first_user_prefix: str
    reply_prefix: str
    end_marker: str
    next_user_prefix: str
    strips_content: bool = False

    def format_first_turn(self, system: str, user: str) -> str:
        """The conversation up to its first reply."""
        return f"{self.system_prefix}{self._format_content(system)}{self.first_user_prefix}{self._format_content(user)}{self.reply_prefix}"

    def format_next_turn(self, user: str) -> str:
        """What is said between a reply's end and the next reply."""
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
"""What Qwen models expect, and what models get that have no template of their own."""
