"""Render boards as the published texts."""

from trainable.envs.prompts import format_board
from trainable.envs.sokoban.board import Cells, Tile

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
    """Render a board, int8 (R, C), as the text that a policy sees; see `format_board` for the formats.

    Source: published code (texts to the byte).
    """
    symbols = cells.tobytes().decode("latin-1").translate(SYMBOLS)  # each cell is the character of its code
    grid = "\n".join([symbols[start : start + cells.shape[1]] for start in range(0, cells.size, cells.shape[1])])
    if observation_format == "grid":  # that of every compact prompt, whose boards need no coordinates
        return grid
    codes = cells.reshape(-1).tolist()
    cells_by_label = {
        label: [cell for cell, code in enumerate(codes) if code in kinds] for label, kinds in _COORDINATE_LINES
    }
    return format_board(grid, cells.shape, cells_by_label, observation_format)
