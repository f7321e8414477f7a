"""The shipped tiny policies, by the name under which model.path selects them."""

from collections.abc import Mapping
from pkgutil import resolve_name
from types import MappingProxyType

from trainable.envs.environment import TurnLimits
from trainable.envs.games.frozen_lake import FrozenLake
from trainable.envs.games.mastermind import Mastermind
from trainable.envs.sokoban.game import Sokoban
from trainable.tiny import frozen_lake, mastermind, sokoban
from trainable.tiny.dialogues import Habits
from trainable.tiny.recipe import PolicyRecipe, Recipe, Stage, TinyPolicy

SOKOBAN_TINY = TinyPolicy(
    Sokoban(),
    TurnLimits(turns=5, actions_per_turn=2, actions=10),
    sokoban.make_vocabulary(),
    sokoban.DEMONSTRATOR,
    Recipe(
        stages=(
            Stage(40_000, 3e-3, 2e-4, Habits()),
            Stage(5_000, 1e-3, 1e-4, Habits(detour=0.65, careless=0.3, unfinished=0.1)),
        )
    ),
)

FROZENLAKE_TINY = TinyPolicy(
    FrozenLake(),
    TurnLimits(turns=5, actions_per_turn=2, actions=10),
    frozen_lake.make_vocabulary(),
    frozen_lake.DEMONSTRATOR,
    Recipe(
        stages=(
            Stage(40_000, 3e-3, 2e-4, Habits()),
            Stage(5_000, 1e-3, 1e-4, Habits(detour=0.55, careless=0.3, unfinished=0.1)),
        )
    ),
)

MASTERMIND_TINY = TinyPolicy(
    Mastermind(),
    TurnLimits(turns=5, actions_per_turn=1, actions=5),
    mastermind.make_vocabulary(),
    mastermind.DEMONSTRATOR,
    Recipe(
        stages=(
            # Careless from the start, so that it learns to plan after any guesses, and not only after its own.
            Stage(60_000, 3e-3, 2e-4, Habits(careless=0.5)),
            Stage(5_000, 1e-3, 1e-4, Habits(detour=0.5, careless=0.2, unfinished=0.1)),
        )
    ),
    response_length=32,
)

TURN_POLICIES: Mapping[str, TinyPolicy] = MappingProxyType(
    {"sokoban-tiny": SOKOBAN_TINY, "frozenlake-tiny": FROZENLAKE_TINY, "mastermind-tiny": MASTERMIND_TINY}
)
"""Those of games of turns."""
POLICIES: Mapping[str, PolicyRecipe] = MappingProxyType(
    {**TURN_POLICIES, "papers-tiny": resolve_name("sandboxes.trees.recipe:PAPERS_TINY")}
)
