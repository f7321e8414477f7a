"""Render boards as the published texts."""

from trainable.envs.sokoban.board import Cells, Tile

OBSERVATION_FORMATS = ("grid_coord", "grid", "coord")
SYMBOLS: dict[int, str] = {
    Tile.WALL: "#",
    Tile.FLOOR: "_",
    Tile.TARGET: "O",
    Tile.BOX_ON_TARGET: "√",
    Tile.BOX: "X",
    Tile.PLAYER: "P",
    Tile.PLAYER_ON_TARGET: "S",
}

# A target is listed even if a box or the player is on it, so such a cell appears in two lines.
_COORDINATE_LINES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("Targets", (int(Tile.TARGET), int(Tile.BOX_ON_TARGET), int(Tile.PLAYER_ON_TARGET))),
    ("Boxes", (int(Tile.BOX),)),
    ("Boxes on target", (int(Tile.BOX_ON_TARGET),)),
    ("Player", (int(Tile.PLAYER),)),
    ("Player on target", (int(Tile.PLAYER_ON_TARGET),)),
)


def render(cells: Cells, observation_format: str) -> str:
    """Render a board as the text that a policy sees.

    grid: one line per row, one symbol per cell. coord: the board's size, then one line for each kind of object on the
    board with its (row, col) positions, counted from 0 at the top left. grid_coord: both, each under a title line.

    cells: int8 (R, C). Source: published code (texts to the byte; both title lines end in a space).
    Raises ValueError for another format.
    """
    if observation_format == "grid":
        return _render_grid(cells)
    if observation_format == "coord":
        return _render_coordinates(cells)
    if observation_format == "grid_coord":
        return f"Coordinates: \n{_render_coordinates(cells)}\nGrid Map: \n{_render_grid(cells)}"
    allowed = ", ".join(OBSERVATION_FORMATS)
    raise ValueError(f"observation_format is {observation_format!r}; choose one of {allowed}")


def _render_grid(cells: Cells) -> str:
    symbols = cells.tobytes().decode("latin-1").translate(SYMBOLS)  # each cell is the character of its code
    return "\n".join([symbols[start : start + cells.shape[1]] for start in range(0, cells.size, cells.shape[1])])


def _render_coordinates(cells: Cells) -> str:
    rows, cols = cells.shape
    codes = cells.reshape(-1).tolist()
    lines = [f"Board size: {rows} rows x {cols} cols (zero-indexed)."]
    for label, kinds in _COORDINATE_LINES:
        places = [f"({cell // cols}, {cell % cols})" for cell, code in enumerate(codes) if code in kinds]
        if places:
            lines.append(f"{label}: {', '.join(places)}")
    return "\n".join(lines)
