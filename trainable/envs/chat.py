"""How a system message, user messages and replies become one text: ChatML, or any format of the same parts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ChatFormat:
    """The text between the contents of messages, for conversations that grow turn by turn.

    start: before the system message. to_user: from it to the first user message. to_reply: from a user message to the
    reply. end: what ends a reply; one token, which the model samples. next_user: from there to the next user message.
    strips: whether contents lose blanks at both ends.
    """

    start: str
    to_user: str
    to_reply: str
    end: str
    next_user: str
    strips: bool = False

    def opening(self, system: str, user: str) -> str:
        """The conversation up to its first reply."""
        return f"{self.start}{self._content(system)}{self.to_user}{self._content(user)}{self.to_reply}"

    def following(self, user: str) -> str:
        """What is said between a reply's end and the next reply."""
        return f"{self.next_user}{self._content(user)}{self.to_reply}"

    def _content(self, text: str) -> str:
        return text.strip() if self.strips else text


CHATML = ChatFormat(
    start="<|im_start|>system\n",
    to_user="<|im_end|>\n<|im_start|>user\n",
    to_reply="<|im_end|>\n<|im_start|>assistant\n",
    end="<|im_end|>",
    next_user="\n<|im_start|>user\n",
)
"""What Qwen models expect, and what models get that have no template of their own."""
