"""Malformed command lines and configurations: what hypothesis draws, and what each must be answered.

Every `check_*` draws `examples` of one kind, raises AssertionError with the shortest one that is answered otherwise,
and returns how often each answer was given. No pytest is needed, so that a script can run many more than a test does.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from search_spaces import FAMILIES, STUDIES, SUITES
from search_spaces.declaration.family import Family
from search_spaces.declaration.presets import PRESETS
from search_spaces.declaration.study import Study
from search_spaces.language_model.family import PPO
from trainable.config.aliases import ALIASES
from trainable.config.base_config import BaseRunConfig
from trainable.config.run_config import ConfigError, apply_overrides, list_field_names
from trainable.config.setting_types import MAX_INTEGER
from tune_study.commands.cli import app
from tune_study.plan.study_plan import MAX_SEEDS
from tune_study.tune.run import WANDB_MODES

LONGEST_ANSWER = 4000

T = TypeVar("T")
Words = tuple[str, ...]
Line = st.SearchStrategy[Words]
Check = Callable[[int], "Tally"]


class Tally(NamedTuple):
    """Examples that were drawn, and how often each answer was given."""

    examples: int
    answers: Mapping[str, int]


class Answer(NamedTuple):
    """What a command line gave back. left: what is in the folder that it was typed in."""

    code: int
    out: str
    err: str
    left: Words


def hunt(strategy: st.SearchStrategy[T], check: Callable[[T], str], examples: int, derandomize: bool) -> Tally:
    """`check` on `examples` draws; it gives the answer in a word, or raises."""
    answers: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=derandomize,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def each(example: T) -> None:
        answers[check(example)] += 1

    each()
    return Tally(answers.total(), dict(answers))


def one_kind(kinds: Sequence[st.SearchStrategy[T]]) -> st.SearchStrategy[T]:
    """Each kind as often as any other, however many draws it is made of."""
    return st.sampled_from(kinds).flatmap(lambda kind: kind)


def joined(parts: Sequence[Words]) -> Words:
    return tuple(word for part in parts for word in part)


# What is typed, and what a good refusal looks like.


def type_in(args: Sequence[str], folder: Path) -> Answer:
    """The command line in `folder`, which is also the home folder, on a machine without GPUs and fetched models."""
    environment = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_CACHE": str(folder / "no-such-cache"), "HOME": str(folder)}
    with chdir(folder):
        result = CliRunner(env=environment).invoke(app, list(args), prog_name="python -m tune_study")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(f"a traceback for {list(args)!r}") from result.exception
    left = tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*")))
    return Answer(result.exit_code, result.stdout, result.stderr, left)


def type_in_anywhere(args: Sequence[str]) -> Answer:
    """The command line in an empty folder of its own."""
    with TemporaryDirectory() as folder:
        return type_in(args, Path(folder))


def assert_clear(text: str) -> None:
    """One paragraph that can be read: ours, without control characters and of bounded length, or the parser's own."""
    if "Error: " in text and not text.startswith("tune_study: "):
        return
    assert text.startswith("tune_study: "), text
    assert text.endswith("\n"), text
    assert "\n\n" not in text, text
    assert len(text) < LONGEST_ANSWER, len(text)
    assert all(sign.isprintable() or sign == "\n" for sign in text), text


def assert_refused(args: Sequence[str]) -> str:
    """Exit code 2, one clear paragraph, nothing shown, nothing written. Returns who answered."""
    answer = type_in_anywhere(args)
    assert (answer.code, answer.out, answer.left) == (2, "", ()), (list(args), answer)
    assert_clear(answer.err)
    return "refused by tune_study" if answer.err.startswith("tune_study: ") else "refused by the parser"


def check_line(line: Words) -> str:
    """A line of `run` that is refused with --dry-run, which starts nothing, is then also refused without."""
    assert_refused(["run", "--dry-run", *line])
    return assert_refused(["run", *line])


# Text and numbers as somebody, or some script, might type them. No argument of a process holds a NUL.

signs = st.one_of(st.characters(min_codepoint=1), st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF))
long_texts = ["a" * 5000, "[" * 5000, "9" * 5000, "[" + "9" * 5000 + "]"]
any_text = st.one_of(
    st.text(signs, max_size=20),
    st.text(st.sampled_from("\n\r\t\x1b[]{}=,.-_'\"%/~:\\ 0a"), max_size=20),
    st.sampled_from([*long_texts, "~nobody-of-that-name", "\x1b[2J", "٣"]),
)
odd_numbers = ["", " ", "many", "1e", "0x10", "1,5", "½", "٣", "None", "[1", "1 2", "--", "1__0", "٣.٥", "\udcff"]
no_numbers = st.one_of(
    st.sampled_from(odd_numbers),
    st.text(st.characters(categories=["L", "P", "Zl", "Cc"], exclude_characters="\0"), min_size=3),
).filter(lambda text: not _is_number(text))
no_finite_numbers = st.one_of(no_numbers, st.sampled_from(["nan", "inf", "-inf", "1e999", "-Infinity", "9" * 400]))
no_whole_numbers = st.one_of(no_numbers, st.sampled_from(["1.5", "1e3", "nan", "inf", "9" * 5000, "1e-1"]))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def outside(schema: Mapping[str, Any]) -> st.SearchStrategy[str]:
    """Text that a field does not take, by its part of the JSON schema."""
    if "enum" in schema:
        return any_text.filter(lambda text: text.strip() not in schema["enum"])
    no_lists = ["", "0.9", "[2", "['console', 'x']", "['\n']", "[[[0.9]]]", "[nan, 0.9, -1]", "[" * 5000]
    kinds: dict[str, st.SearchStrategy[str]] = {
        "boolean": st.sampled_from(["", "maybe", "2", "-1", "None", "[true]", "[", "truefalse", "0.5", "\udcff"]),
        "array": st.sampled_from(no_lists),
        "string": st.sampled_from(["", " ", "\t", "a\nb", "\x1b[2J", "a" * 1025, "\udcff", "~/\x7f", "x" * 100_000]),
        "integer": beyond(schema),
    }
    wrong = kinds[schema["type"]] if schema["type"] in kinds else st.one_of(no_finite_numbers, beyond(schema))
    return wrong.filter(lambda text: text.strip().lower() not in ("null", "none")) if "anyOf" in schema else wrong


def beyond(schema: Mapping[str, Any]) -> st.SearchStrategy[str]:
    """Numbers below the minimum or above the maximum of a field; for whole numbers also text that is none."""
    least, most = schema.get("minimum", schema.get("ge")), schema.get("maximum")
    if schema["type"] == "integer":
        most, least = most or MAX_INTEGER, -MAX_INTEGER if least is None else least
        wrong = st.one_of(st.integers(max_value=least - 1), st.integers(min_value=most + 1))
        return st.one_of(no_whole_numbers, wrong.map(str), wrong.map(lambda number: f"[{number}]"))
    found = []
    if least is not None:
        found.append(st.floats(max_value=least, exclude_max=True))
    if "exclusiveMinimum" in schema:
        found.append(st.floats(max_value=schema["exclusiveMinimum"]))
    if most is not None:
        found.append(st.floats(min_value=most, exclude_min=True))
    return st.one_of(found).map(repr) if found else no_finite_numbers


def fields(kind_of: type[BaseRunConfig], section: str = "", prefix: str = "") -> dict[str, Mapping[str, Any]]:
    """Dotted field of a configuration -> its part of the JSON schema."""
    schema = kind_of.model_json_schema()
    found: dict[str, Mapping[str, Any]] = {}
    for name, field in (schema["$defs"][section] if section else schema)["properties"].items():
        kind = field.get("$ref", "").rsplit("/", 1)[-1]
        # A field that may be null has two forms: the wrong values are those of the other one.
        bounded = {**field, **field["anyOf"][0]} if "anyOf" in field else field
        found |= fields(kind_of, kind, f"{prefix}{name}.") if kind else {prefix + name: bounded}
    return found


# Command lines of `run` without the word; each function returns what makes them malformed, for one study.


def option(name: str, values: st.SearchStrategy[str]) -> Line:
    return values.map(lambda value: (name, value))


def assignment(key: str, values: st.SearchStrategy[str]) -> Line:
    return values.map(lambda value: ("--set", f"{key}={value}"))


def bad_options(study: Study) -> list[Line]:
    """Unknown options, and for each known one what it does not take."""
    bounds = {"--steps": (1, 100_000), "--seeds": (1, MAX_SEEDS), "--ray-num-cpus": (1, None)}
    bounds |= {"--save-freq": (None, None)}
    schemas = {name: {"type": "integer", "minimum": low, "maximum": high} for name, (low, high) in bounds.items()}
    numbers = [option(name, beyond(schema).filter(lambda text: text[:1] != "[")) for name, schema in schemas.items()]
    shares = st.one_of(st.sampled_from(["1.5", "63.5", "65", "1e300", "1e-5", "5e-324", "-0.5"]), no_finite_numbers)
    gpus = st.sampled_from(
        ["", ",", "0,", "0,0", "00", "0,01", "a", "-1", "0;1", "٣", "1.0", "9" * 50, "GPU-1", "0\n1"]
    )
    words = st.text(st.characters(codec="ascii", categories=["L"]), min_size=1)
    others = sorted({other.axis.option for other in STUDIES.values()} - {study.axis.option})
    return [
        *numbers,
        st.from_regex(r"--?no[a-z]{1,20}", fullmatch=True).map(lambda name: (name,)),
        option("--preset", any_text.filter(lambda text: text not in PRESETS)),
        option("--gpus", gpus),
        st.tuples(st.just("--preset"), st.just("paper"), st.just("--gpus"), gpus),
        option("--gpus-per-exp", shares),
        option("--gpu-memory-utilization", st.one_of(no_finite_numbers, st.sampled_from(["0", "-0.5", "1.0001"]))),
        option("--max-concurrent", st.one_of(no_whole_numbers, st.integers(max_value=0).map(str))),
        option("--wandb", words.filter(lambda text: text not in WANDB_MODES)),
        option("--rollout_filter_include_zero", st.sampled_from(["", "maybe", "2", "\n", "tru e", "\udcff", "[true]"])),
        option("--model", outside({"type": "string"})),
        st.sampled_from(others).flatmap(lambda name: option(name, any_text)),
        st.sampled_from(["--steps", "--set", "--model", "--kl-values"]).map(lambda name: (name,)),
        st.text(signs, min_size=1).filter(lambda text: text[0] != "-").map(lambda text: (text,)),
    ]


def bad_axes(study: Study) -> list[Line]:
    """Lists of axis values in which one is no value, one is there twice, or two would share their files."""
    good = st.sampled_from(["0.1", "0.25", "0.5", "1"])
    wrong = st.one_of(
        no_finite_numbers.filter(lambda text: "," not in text and text.strip() not in study.axis.named_settings),
        st.sampled_from(["1_0", "0x1", "[0.1]", "0." + "0" * 300 + "1", "Nofilter"]),
    )
    if study.axis.setting != "actor.entropy_coeff":
        wrong = st.one_of(wrong, st.sampled_from(["-1", "-0.1", "-1e-300"]))
    if study.axis.setting == "filter.rollout_filter_value":
        wrong = st.one_of(wrong, st.sampled_from(["0", "1.01", "2", "-0"]))
    twice = st.sampled_from(["0.1,0.10", "0.1,1e-1", "0.5,.5", "1,1.0", "1,+1", "1e-2,0.01", "0.1,01", "1, 1"])
    one_wrong = st.tuples(st.lists(good, max_size=2, unique=True), wrong).map(
        lambda pair: ",".join([*pair[0], pair[1]])
    )
    return [option(study.axis.option, st.one_of(twice, one_wrong, one_wrong))]


def bad_assignments(study: Study) -> list[Line]:
    """--set without a value, with a key that is none, not this study's to set, or given twice."""
    kind = study.family.config_class
    names, aliases = list_field_names(kind), kind.aliases
    tails = Counter(name.rsplit(".", 1)[-1] for name in names)
    keys = {*names, *aliases, *tails}
    swept = study.axis.swept_fields
    free = [name for name in names if name not in swept and name != "seed"]
    misspelt = st.tuples(st.sampled_from(sorted(keys)), st.integers(0, 60), st.sampled_from(["", "x", "_", ".", "é"]))
    near = misspelt.map(lambda found: found[0][: found[1]] + found[2] + found[0][found[1] + 1 :])
    unknown = st.one_of(any_text, near).filter(lambda text: "=" not in text and text.strip() not in keys)
    several = [name for name in tails if tails[name] > 1 and name not in aliases]
    taken = ["seed", *swept, *(key for key, name in aliases.items() if name in swept)]
    value = st.sampled_from(["0", "1", "True", "text"])
    return [
        *([st.sampled_from(several).flatmap(lambda key: assignment(key, value))] if several else []),
        any_text.filter(lambda text: "=" not in text).map(lambda text: ("--set", text)),
        unknown.flatmap(lambda key: assignment(key, value)),
        st.sampled_from(taken).flatmap(lambda key: assignment(key, value)),
        st.sampled_from(free).map(lambda key: ("--set", f"{key}=1", "--set", f" {key} =1")),
        st.just(("--steps", "5", "--set", "trainer.total_training_steps=5")),
    ]


def bad_values(kind: type[BaseRunConfig]) -> list[Line]:
    """For every field of a configuration what it does not take."""
    return [assignment(name, outside(field)) for name, field in fields(kind).items()]


def bad_combinations(family: Family) -> list[Line]:
    """Values each of which is allowed, but not together."""
    if family is not PPO:
        return [st.sampled_from([joined([("--set", pair) for pair in text.split()]) for text in UPDATE_RULES_APART])]
    together = [
        "bi_level_gae=1 adv_estimator=grpo",
        "use_kl_in_reward=yes kl_penalty=full",
        "shared_trunk=1 critic_warmup=2",
        "rollout_filter_strategy=top_k_abs rollout_filter_value=0.5",
        "model_path=sokoban-tiny prompt_style=full",
        "rollout_filter_strategy=min_p rollout_filter_value=1.5",
        "trainer.device=cuda n_gpus_per_node=0",
        "trainer.device=cpu n_gpus_per_node=0.5",
        "n_gpus_per_node=4 ray_num_cpus=3",
    ]
    lines = [joined([("--set", pair) for pair in text.split()]) for text in together]
    lines += [("--preset", "paper", "--gpus", "0,1,2", "--gpus-per-exp", "2")]
    sizes = st.tuples(st.sampled_from(["actor", "critic"]), st.integers(1, 999), st.integers(2, 999))
    uneven = sizes.filter(lambda found: found[1] % found[2] != 0).map(
        lambda found: (
            "--set",
            f"{found[0]}.ppo_mini_batch_size={found[1]}",
            "--set",
            f"{found[0]}.ppo_micro_batch_size_per_gpu={found[2]}",
        )
    )
    return [st.sampled_from(lines), uneven]


UPDATE_RULES_APART = (
    "nhead=3",
    "delay=9 replay_capacity=3",
    "reward_noise=0.1 reward_noise_mode=none",
    "reward_noise=0 reward_noise_mode=label_flip",
)
"""Settings of the update-rule sandbox that no study there can be run with."""


def malformed_lines() -> Line:
    """Lines of `run` that are right but for one fault, which comes last."""
    right = [("--max-concurrent", "2"), ("--extend",), ("--seeds", "2"), ("--save-freq", "5"), ("--preset", "laptop")]
    more = st.lists(st.sampled_from(right), max_size=2).map(joined)
    values = {family.name: st.one_of(bad_values(family.config_class)) for family in FAMILIES.values()}
    together = {family.name: st.one_of(bad_combinations(family)) for family in FAMILIES.values()}
    names = any_text.filter(lambda text: text.replace("_", "-") not in {**STUDIES, **SUITES} and text[:1] != "-")
    unknown = st.tuples(more, names.map(lambda name: (name,)))
    lines = []
    for study in STUDIES.values():
        kinds = map(st.one_of, (bad_options(study), bad_axes(study), bad_assignments(study)))
        start = st.sampled_from(sorted(PRESETS)).map(lambda preset, name=study.name: (name, "--preset", preset))
        family = study.family.name
        faults = one_kind([*kinds, values[family], values[family], together[family]])
        lines.append(st.tuples(start, st.just(("--output", "out")), more, faults))
    return one_kind([unknown, *lines * 5]).map(joined)


def check_command_lines(examples: int, derandomize: bool = True) -> Tally:
    """Lines of `run` that are malformed by construction: each is refused, with --dry-run and without."""
    return hunt(malformed_lines(), check_line, examples, derandomize)


# Lines of right and wrong pieces in any order, and settings from Python: whatever comes, an answer and no traceback.

GOOD = {
    "--preset": "laptop paper",
    "--model": "sokoban-tiny",
    "--steps": "1 60",
    "--seeds": "1 3",
    "--save-freq": "-1 5",
    "--kl-values": "0 0,0.1",
    "--entropy-values": "0.1",
    "--rollout_filter_value": "0.9,nofilter 1",
    "--gpus": "0 0,1",
    "--gpus-per-exp": "0 0.5 1",
    "--ray-num-cpus": "1 16",
    "--gpu-memory-utilization": "0.5",
    "--max-concurrent": "2",
    "--rollout_filter_include_zero": "True no",
    "--set": "actor.lr=1 gamma=0.9 env.env_groups=[8] actor.betas=[0,1]",
}
"""Options of `run`, and values that each takes in some study."""


def lines_of_pieces() -> Line:
    """Options, studies, keys and values, mostly right ones, beside any text."""
    right = st.sampled_from([(name, value) for name, values in GOOD.items() for value in values.split()])
    plain = st.sampled_from([("--extend",), ("--wandb", "off"), ("--wandb", "on"), ("--output", "out")])
    values = st.one_of(st.sampled_from([word for words in GOOD.values() for word in words.split()]), any_text)
    pair = st.tuples(st.sampled_from([*list_field_names(), *ALIASES]), values).map(
        lambda found: ("--set", "=".join(found))
    )
    wrong = st.tuples(st.sampled_from([*GOOD, "--extend", "-h", "--"]), values)
    pieces = one_kind([*[right] * 8, plain, pair, wrong, st.tuples(values)])
    start = [*[("run", "--dry-run", name) for name in STUDIES] * 2, ("run", "--dry-run"), ("resume", "--dry-run")]
    return st.tuples(st.sampled_from(start), st.lists(pieces, max_size=3).map(joined)).map(joined)


def check_any_line(args: Words) -> str:
    answer = type_in_anywhere(args)
    assert answer.code in (0, 2), answer
    assert answer.left == (), answer
    if answer.code == 0:
        return "planned"
    assert_clear(answer.err)
    return "refused"


def check_arbitrary_lines(examples: int, derandomize: bool = True) -> Tally:
    """Any dry run is planned or refused, and writes nothing."""
    return hunt(lines_of_pieces(), check_any_line, examples, derandomize)


huge = st.sampled_from([10, 20, 400, 5000]).map(lambda digits: 10**digits)
texts = st.one_of(st.text(st.characters(), max_size=10), any_text)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts, huge)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)


Overrides = tuple[type[BaseRunConfig], dict[str, object]]


def overrides(kind: type[BaseRunConfig]) -> st.SearchStrategy[Overrides]:
    """Dotted keys of a configuration, most of them right, with values that are right now and then."""
    choices = [choice for field in fields(kind).values() for choice in field.get("enum", ())]
    right = st.one_of(st.integers(0, 64), st.floats(0, 1), st.booleans(), st.sampled_from(choices))
    keys = one_kind([*[st.sampled_from([*list_field_names(kind), *kind.aliases])] * 9, texts])
    changes = st.dictionaries(keys, one_kind([right, right, right, json_values]), max_size=3)
    return st.tuples(st.just(kind), changes)


def check_settings(found: Overrides) -> str:
    """A configuration that JSON keeps as it is, or ConfigError with a message for one line."""
    kind, changes = found
    try:
        config = apply_overrides(kind.model_validate({}), changes)
    except ConfigError as error:
        assert_clear(f"tune_study: {error}\n")
        return "ConfigError"
    written = json.dumps(config.model_dump(mode="json"), allow_nan=False).encode()
    again = kind.model_validate(json.loads(written))
    assert (again, again.compute_hash()) == (config, config.compute_hash())
    return "a configuration"


def check_configurations(examples: int, derandomize: bool = True) -> Tally:
    """Any keys and values from Python give a configuration or a ConfigError."""
    kinds = one_kind([overrides(family.config_class) for family in FAMILIES.values()])
    return hunt(kinds, check_settings, examples, derandomize)
