"""Published tables as they are printed, for tests that type them a second time."""


def read_printed_tables(text: str) -> dict[tuple[str, str, str], tuple[float, float] | None]:
    """The mean and the spread by study, arm and column of printed tables, or None where "n/a" is printed.

    The first line of a table is its study and its columns, separated by ` | `; blank lines separate tables.
    """
    cells: dict[tuple[str, str, str], tuple[float, float] | None] = {}
    for table in text.strip().split("\n\n"):
        head, *lines = table.splitlines()
        study, *columns = head.split(" | ")
        for line in lines:
            arm, *words = line.replace("+/- ", "").split()
            for column in columns:
                if words[0] == "n/a":
                    cells[study, arm, column] = None
                    words = words[1:]
                else:
                    cells[study, arm, column] = (float(words[0]), float(words[1]))
                    words = words[2:]
            assert not words
    return cells
