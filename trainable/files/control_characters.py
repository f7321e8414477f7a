"""What makes a text unsafe to show, and how it is shown: one definition for terminals, pages, and names of runs."""

LINE_CHARACTERS = "\n\t"
"""Characters that a text of several lines may have, although they are not printable."""


def is_printable(text: str, allowed: str = "") -> bool:
    """Whether every character of `text`, except those in `allowed`, shows itself and changes nothing around it.

    Others are control characters, those that reverse the direction of writing, separators of lines, and halves of
    surrogate pairs.
    """
    for character in allowed:
        text = text.replace(character, " ")
    return text.isprintable()


def escape_controls(text: str, allowed: str = "") -> str:
    r"""`text` with backslash escapes for all characters that are not printable, except those in `allowed`.

    Texts of a results folder may contain characters that a terminal obeys: they move the cursor, set the title or the
    clipboard, or reverse the direction of writing, which a browser does as well.

    Example:
        >>> print(escape_controls("\x1b[2Jdone"))
        \x1b[2Jdone
    """
    if is_printable(text, allowed):
        return text
    return "".join(
        character if character.isprintable() or character in allowed else ascii(character)[1:-1] for character in text
    )
