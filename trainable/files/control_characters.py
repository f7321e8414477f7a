"""Show control characters of a text from a folder of unknown origin."""


def escape_controls(text: str, allowed: str = "") -> str:
    r"""`text` with backslash escapes for all characters that are not printable, except those in `allowed`.

    Texts of a results folder may contain characters that a terminal obeys: they move the cursor, set the title or the
    clipboard, or reverse the direction of writing.

    Example:
        >>> print(escape_controls("\x1b[2Jdone"))
        \x1b[2Jdone
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in allowed else ascii(character)[1:-1] for character in text
    )
