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
    source=Sokoban(),
    limits=TurnLimits(turns=5, actions_per_turn=2, actions=10),
    vocabulary=sokoban.make_vocabulary(),
    demonstrator=sokoban.DEMONSTRATOR,
    recipe=Recipe(
        stages=(
            Stage(40_000, 3e-3, 2e-4, Habits()),
            Stage(5_000, 1e-3, 1e-4, Habits(detour=0.65, careless=0.3, unfinished=0.1)),
        )
    ),
)

FROZENLAKE_TINY = TinyPolicy(
    source=FrozenLake(),
    limits=TurnLimits(turns=5, actions_per_turn=2, actions=10),
    vocabulary=frozen_lake.make_vocabulary(),
    demonstrator=frozen_lake.DEMONSTRATOR,
    recipe=Recipe(
        stages=(
            Stage(40_000, 3e-3, 2e-4, Habits()),
            Stage(5_000, 1e-3, 1e-4, Habits(detour=0.55, careless=0.3, unfinished=0.1)),
        )
    ),
)

MASTERMIND_TINY = TinyPolicy(
    source=Mastermind(),
    limits=TurnLimits(turns=5, actions_per_turn=1, actions=5),
    vocabulary=mastermind.make_vocabulary(),
    demonstrator=mastermind.DEMONSTRATOR,
    recipe=Recipe(
        stages=(
            # Careless from the start, to learn to plan after any guesses and not only after its own.
            Stage(60_000, 3e-3, 2e-4, Habits(careless=0.5)),
            Stage(5_000, 1e-3, 1e-4, Habits(detour=0.5, careless=0.2, unfinished=0.1)),
        )
    ),
    response_length=32,
)

TURN_POLICIES: Mapping[str, TinyPolicy] = MappingProxyType(
    {"sokoban-tiny": SOKOBAN_TINY, "frozenlake-tiny": FROZENLAKE_TINY, "mastermind-tiny": MASTERMIND_TINY}
)
"""The policies for turn-based games."""
POLICIES: Mapping[str, PolicyRecipe] = MappingProxyType(
    {**TURN_POLICIES, "papers-tiny": resolve_name("sandboxes.trees.recipe:PAPERS_TINY")}
)
