from tests.oracles.sokoban import generate_level, parse_grid
from trainable.envs.sokoban.game import render

GRID_123 = "######\n######\n#O####\n#XP###\n#__###\n######"
COORDINATES_123 = "Board size: 6 rows x 6 cols (zero-indexed).\nTargets: (2, 1)\nBoxes: (3, 1)\nPlayer: (3, 2)"


def test_published_level_123_in_all_formats():
    cells = generate_level(123).cells
    assert render(cells, "grid") == GRID_123
    assert render(cells, "coord") == COORDINATES_123
    assert render(cells, "grid_coord") == f"Coordinates: \n{COORDINATES_123}\nGrid Map: \n{GRID_123}"


def test_every_kind_of_thing_is_listed_in_order():
    cells = parse_grid("#######\n#S√X__#\n#OX___#\n#_√_O_#\n#__X__#\n#######")
    assert render(cells, "coord") == (
        "Board size: 6 rows x 7 cols (zero-indexed).\n"
        "Targets: (1, 1), (1, 2), (2, 1), (3, 2), (3, 4)\n"
        "Boxes: (1, 3), (2, 2), (4, 3)\n"
        "Boxes on target: (1, 2), (3, 2)\n"
        "Player on target: (1, 1)"
    )
