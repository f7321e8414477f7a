"""Detect and escape characters that are unsafe to show, in terminals, pages and names of runs."""

LINE_CHARACTERS = "\n\t"
"""Unprintable characters that are allowed in multi-line texts."""


def is_printable(text: str, allowed: str = "") -> bool:
    """Check whether all characters of `text` are printable or in `allowed`.

    Unprintable are control characters, characters that change the writing direction, line separators, and lone
    surrogates.
    """
    for character in allowed:
        text = text.replace(character, " ")
    return text.isprintable()


def escape_controls(text: str, allowed: str = "") -> str:
    r"""Replace unprintable characters of `text`, except those in `allowed`, by backslash escapes.

    Texts in a results folder may contain characters that control a terminal: they move the cursor, set the title or the
    clipboard, or reverse the writing direction, also in a browser.

    Example:
        >>> print(escape_controls("\x1b[2Jdone"))
        \x1b[2Jdone
    """
    if is_printable(text, allowed):
        return text
    return "".join(
        character if character.isprintable() or character in allowed else ascii(character)[1:-1] for character in text
    )
