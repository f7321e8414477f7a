"""Malformed command lines and configurations: strategies that draw them, and checks of the answer to each of them.

Every `check_*` draws `examples` of one kind and returns how often each answer was given. It raises AssertionError with
the shortest example that has a wrong answer. It does not need pytest, so a script can draw more examples than a test.
"""

import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seed_examples
from hypothesis import strategies as st

from search_spaces.catalog import FAMILIES, STUDIES, SUITES
from search_spaces.declaration.presets import PRESETS
from search_spaces.declaration.study import Study
from tests.fakes.command_line import type_words
from trainable.config.base_config import BaseRunConfig
from trainable.config.run_config import ConfigError, apply_overrides, list_field_names
from trainable.config.setting_types import MAX_FLOAT, MAX_INTEGER, MIN_FLOAT
from trainable.files.json_values import DamageWarning
from trainable.runs.study_record import MAX_SEEDS
from tune_study.plan.study_plan import WANDB_MODES

LONGEST_ANSWER = 4000

T = TypeVar("T")
Words = tuple[str, ...]
Line = st.SearchStrategy[Words]
Check = Callable[[int], "Tally"]
SeededCheck = Callable[..., "Tally"]


class Tally(NamedTuple):
    """The number of examples that were drawn, and how often each answer was given."""

    examples: int
    answers: Mapping[str, int]


class Answer(NamedTuple):
    """The answer to a command line. files: what the folder contains in which the command was run."""

    code: int
    out: str
    err: str
    files: Words


def check_examples(strategy: st.SearchStrategy[T], check: Callable[[T], str], examples: int, seed: int | None) -> Tally:
    """Run `check` on `examples` draws; it returns the answer as a short text, or raises.

    seed: of the draws; None for those that are the same every time.
    """
    answers: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=seed is None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def check_example(example: T) -> None:
        answers[check(example)] += 1

    if seed is not None:
        check_example = seed_examples(seed)(check_example)
    check_example()
    return Tally(answers.total(), dict(answers))


def draw_equally(strategies: Sequence[st.SearchStrategy[T]]) -> st.SearchStrategy[T]:
    """Draw each strategy with equal probability, also if it consists of several strategies."""
    return st.sampled_from(strategies).flatmap(lambda strategy: strategy)


def join_words(word_groups: Sequence[Words]) -> Words:
    return tuple(word for group in word_groups for word in group)


# Running a command line, and checking that a refusal is clear.


def type_in(args: Sequence[str], folder: Path) -> Answer:
    """Run a command line in `folder`, which is also the home folder, without GPUs and without downloaded models."""
    environment = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_CACHE": str(folder / "no-such-cache"), "HOME": str(folder)}
    with chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore", DamageWarning)  # outside of the tests, a warning is no error
        answer = type_words(*args, **environment)
    files = tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*")))
    return Answer(*answer, files)


def type_in_anywhere(args: Sequence[str]) -> Answer:
    """Run a command line in a new empty folder."""
    with TemporaryDirectory() as folder:
        return type_in(args, Path(folder))


def assert_clear(text: str) -> None:
    """Assert that `text` is an error of the parser, or one paragraph of bounded length without control characters."""
    if "Error: " in text and not text.startswith("tune_study: "):
        return
    assert text.startswith("tune_study: "), text
    assert text.endswith("\n"), text
    assert "\n\n" not in text, text
    assert len(text) < LONGEST_ANSWER, len(text)
    assert all(character.isprintable() or character == "\n" for character in text), text


def assert_refused(args: Sequence[str]) -> str:
    """Assert that a command line is refused, with exit code 2 and one paragraph, and writes nothing; say by whom."""
    answer = type_in_anywhere(args)
    assert (answer.code, answer.out, answer.files) == (2, "", ()), (list(args), answer)
    assert_clear(answer.err)
    return "refused by tune_study" if answer.err.startswith("tune_study: ") else "refused by the parser"


def check_line(line: Words) -> str:
    """Check that a line of `run` is refused with --dry-run, which starts nothing, and only then without it."""
    assert_refused(["run", "--dry-run", *line])
    return assert_refused(["run", *line])


# Text and numbers as a person or a script might type them. An argument of a process cannot contain a NUL character.

characters = st.one_of(st.characters(min_codepoint=1), st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF))
long_texts = ["a" * 5000, "[" * 5000, "9" * 5000, "[" + "9" * 5000 + "]"]
any_text = st.one_of(
    st.text(characters, max_size=20),
    st.text(st.sampled_from("\n\r\t\x1b[]{}=,.-_'\"%/~:\\ 0a"), max_size=20),
    st.sampled_from([*long_texts, "~nobody-of-that-name", "\x1b[2J", "٣"]),
)
odd_numbers = ["", " ", "many", "1e", "0x10", "1,5", "½", "٣", "None", "[1", "1 2", "--", "1__0", "٣.٥", "\udcff"]
non_numbers = st.one_of(
    st.sampled_from(odd_numbers),
    st.text(st.characters(categories=["L", "P", "Zl", "Cc"], exclude_characters="\0"), min_size=3),
).filter(lambda text: not _is_number(text))
non_finite_numbers = st.one_of(non_numbers, st.sampled_from(["nan", "inf", "-inf", "1e999", "-Infinity", "9" * 400]))
non_integers = st.one_of(non_numbers, st.sampled_from(["1.5", "1e3", "nan", "inf", "9" * 5000, "1e-1"]))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def draw_invalid_text(schema: Mapping[str, Any]) -> st.SearchStrategy[str]:
    """Draw text that a field with this JSON schema does not accept."""
    if "enum" in schema:
        return any_text.filter(lambda text: text.strip() not in schema["enum"])
    non_lists = ["", "0.9", "[2", "['console', 'x']", "['\n']", "[[[0.9]]]", "[nan, 0.9, -1]", "[" * 5000]
    strategies: dict[str, st.SearchStrategy[str]] = {
        "boolean": st.sampled_from(["", "maybe", "2", "-1", "None", "[true]", "[", "truefalse", "0.5", "\udcff"]),
        "array": st.sampled_from(non_lists),
        "string": st.sampled_from(["", " ", "\t", "a\nb", "\x1b[2J", "a" * 1025, "\udcff", "~/\x7f", "x" * 100_000]),
        "integer": draw_out_of_range(schema),
    }
    invalid_text = (
        strategies[schema["type"]]
        if schema["type"] in strategies
        else st.one_of(non_finite_numbers, draw_out_of_range(schema))
    )
    return (
        invalid_text.filter(lambda text: text.strip().lower() not in ("null", "none"))
        if "anyOf" in schema
        else invalid_text
    )


def draw_out_of_range(schema: Mapping[str, Any]) -> st.SearchStrategy[str]:
    """Draw numbers below the minimum or above the maximum of a field; for integers also text that is not an integer."""
    minimum, maximum = schema.get("minimum", schema.get("ge")), schema.get("maximum")
    if schema["type"] == "integer":
        maximum, minimum = maximum or MAX_INTEGER, -MAX_INTEGER if minimum is None else minimum
        invalid_integers = st.one_of(st.integers(max_value=minimum - 1), st.integers(min_value=maximum + 1))
        return st.one_of(non_integers, invalid_integers.map(str), invalid_integers.map(lambda number: f"[{number}]"))
    ranges = []
    if minimum is not None:
        ranges.append(st.floats(max_value=minimum, exclude_max=True))
    if "exclusiveMinimum" in schema:
        ranges.append(st.floats(max_value=schema["exclusiveMinimum"]))
    if maximum is not None:
        ranges.append(st.floats(min_value=maximum, exclude_min=True))
    # Every number that float32 cannot hold is out of range.
    sizes = st.one_of(
        st.floats(min_value=MAX_FLOAT, exclude_min=True), st.floats(0, MIN_FLOAT, exclude_min=True, exclude_max=True)
    )
    return st.one_of(*ranges, sizes, sizes.map(lambda size: -size)).map(repr)


def list_field_schemas(
    config_class: type[BaseRunConfig], section: str = "", prefix: str = ""
) -> dict[str, Mapping[str, Any]]:
    """Return the JSON schema of every field of a configuration by its dotted name."""
    schema = config_class.model_json_schema()
    field_schemas: dict[str, Mapping[str, Any]] = {}
    for name, field in (schema["$defs"][section] if section else schema)["properties"].items():
        section_name = field.get("$ref", "").rsplit("/", 1)[-1]
        # A field that may be null has two schemas. Invalid values are those of the schema that is not null.
        schema_with_bounds = {**field, **field["anyOf"][0]} if "anyOf" in field else field
        field_schemas |= (
            list_field_schemas(config_class, section_name, f"{prefix}{name}.")
            if section_name
            else {prefix + name: schema_with_bounds}
        )
    return field_schemas


# Command lines of `run` without the word `run`. Each function returns strategies of malformed arguments for one study.


def draw_option(name: str, values: st.SearchStrategy[str]) -> Line:
    return values.map(lambda value: (name, value))


def draw_assignment(key: str, values: st.SearchStrategy[str]) -> Line:
    return values.map(lambda value: ("--set", f"{key}={value}"))


def list_bad_options(study: Study) -> list[Line]:
    """List unknown options, and for each known option values that it does not accept."""
    bounds = {"--steps": (1, 100_000), "--seeds": (1, MAX_SEEDS), "--ray-num-cpus": (1, None)}
    bounds |= {"--save-freq": (None, None)}
    schemas = {
        name: {"type": "integer", "minimum": minimum, "maximum": maximum} for name, (minimum, maximum) in bounds.items()
    }
    numbers = [
        draw_option(name, draw_out_of_range(schema).filter(lambda text: text[:1] != "["))
        for name, schema in schemas.items()
    ]
    gpu_shares = st.one_of(
        st.sampled_from(["1.5", "63.5", "65", "1e300", "1e-5", "5e-324", "-0.5"]), non_finite_numbers
    )
    gpus = st.sampled_from(
        ["", ",", "0,", "0,0", "00", "0,01", "a", "-1", "0;1", "٣", "1.0", "9" * 50, "GPU-1", "0\n1"]
    )
    words = st.text(st.characters(codec="ascii", categories=["L"]), min_size=1)
    other_options = sorted({other_study.axis.option for other_study in STUDIES.values()} - {study.axis.option})
    return [
        *numbers,
        st.from_regex(r"--?no[a-z]{1,20}", fullmatch=True).map(lambda name: (name,)),
        draw_option("--preset", any_text.filter(lambda text: text not in PRESETS)),
        draw_option("--gpus", gpus),
        st.tuples(st.just("--preset"), st.just("paper"), st.just("--gpus"), gpus),
        draw_option("--gpus-per-exp", gpu_shares),
        draw_option(
            "--gpu-memory-utilization", st.one_of(non_finite_numbers, st.sampled_from(["0", "-0.5", "1.0001"]))
        ),
        draw_option("--max-concurrent", st.one_of(non_integers, st.integers(max_value=0).map(str))),
        draw_option("--wandb", words.filter(lambda text: text not in WANDB_MODES)),
        draw_option(
            "--rollout_filter_include_zero", st.sampled_from(["", "maybe", "2", "\n", "tru e", "\udcff", "[true]"])
        ),
        draw_option("--model", draw_invalid_text({"type": "string"})),
        st.sampled_from(other_options).flatmap(lambda name: draw_option(name, any_text)),
        st.sampled_from(["--steps", "--set", "--model", "--kl-values"]).map(lambda name: (name,)),
        st.text(characters, min_size=1).filter(lambda text: text[0] != "-").map(lambda text: (text,)),
    ]


def list_bad_axes(study: Study) -> list[Line]:
    """List axis values of which one is invalid, one is repeated, or two would share their files."""
    valid_values = st.sampled_from(["0.1", "0.25", "0.5", "1"])
    invalid_values = st.one_of(
        non_finite_numbers.filter(lambda text: "," not in text and text.strip() not in study.axis.named_settings),
        st.sampled_from(["0x1", "[0.1]", "0." + "0" * 300 + "1", "Nofilter"]),
    )
    if study.axis.setting != "actor.entropy_coeff":
        invalid_values = st.one_of(invalid_values, st.sampled_from(["-1", "-0.1", "-1e-300"]))
    if study.axis.setting == "filter.rollout_filter_value":
        invalid_values = st.one_of(invalid_values, st.sampled_from(["0", "1.01", "2", "-0"]))
    repeated_values = st.sampled_from(
        ["0.1,0.10", "0.1,1e-1", "0.5,.5", "1,1.0", "1,+1", "1e-2,0.01", "0.1,01", "1, 1"]
    )
    lists_with_one_invalid = st.tuples(st.lists(valid_values, max_size=2, unique=True), invalid_values).map(
        lambda pair: ",".join([*pair[0], pair[1]])
    )
    return [draw_option(study.axis.option, st.one_of(repeated_values, lists_with_one_invalid, lists_with_one_invalid))]


def list_bad_assignments(study: Study) -> list[Line]:
    """List uses of --set without a value, or with a key that is unknown, reserved for the study, or repeated."""
    config_class = study.family.config_class
    names, aliases = list_field_names(config_class), config_class.aliases
    last_words = Counter(name.rsplit(".", 1)[-1] for name in names)
    keys = {*names, *aliases, *last_words}
    swept = study.axis.swept_fields
    settable_names = [name for name in names if name not in swept and name != "seed"]
    misspellings = st.tuples(
        st.sampled_from(sorted(keys)), st.integers(0, 60), st.sampled_from(["", "x", "_", ".", "é"])
    )
    misspelled_keys = misspellings.map(lambda typo: typo[0][: typo[1]] + typo[2] + typo[0][typo[1] + 1 :])
    unknown_keys = st.one_of(any_text, misspelled_keys).filter(
        lambda text: "=" not in text and text.strip() not in keys
    )
    ambiguous_keys = [name for name in last_words if last_words[name] > 1 and name not in aliases]
    reserved_keys = ["seed", *swept, *(key for key, name in aliases.items() if name in swept)]
    values = st.sampled_from(["0", "1", "True", "text"])
    return [
        *(
            [st.sampled_from(ambiguous_keys).flatmap(lambda key: draw_assignment(key, values))]
            if ambiguous_keys
            else []
        ),
        any_text.filter(lambda text: "=" not in text).map(lambda text: ("--set", text)),
        unknown_keys.flatmap(lambda key: draw_assignment(key, values)),
        st.sampled_from(reserved_keys).flatmap(lambda key: draw_assignment(key, values)),
        st.sampled_from(settable_names).map(lambda key: ("--set", f"{key}=1", "--set", f" {key} =1")),
        st.just(("--steps", "5", "--set", "trainer.total_training_steps=5")),
    ]


def list_bad_values(config_class: type[BaseRunConfig]) -> list[Line]:
    """List assignments of invalid values to every field of a configuration."""
    return [
        draw_assignment(name, draw_invalid_text(schema)) for name, schema in list_field_schemas(config_class).items()
    ]


def draw_malformed_lines() -> Line:
    """Draw lines of `run` that are valid except for one fault, which comes last."""
    valid_options = [
        ("--max-concurrent", "2"),
        ("--extend",),
        ("--seeds", "2"),
        ("--save-freq", "5"),
        ("--preset", "laptop"),
    ]
    extra_options = st.lists(st.sampled_from(valid_options), max_size=2).map(join_words)
    bad_values = {family.name: st.one_of(list_bad_values(family.config_class)) for family in FAMILIES.values()}
    unknown_names = any_text.filter(
        lambda text: text.replace("_", "-") not in {**STUDIES, **SUITES} and text[:1] != "-"
    )
    unknown_lines = st.tuples(extra_options, unknown_names.map(lambda name: (name,)))
    lines = []
    for study in STUDIES.values():
        fault_groups = map(st.one_of, (list_bad_options(study), list_bad_axes(study), list_bad_assignments(study)))
        start = st.sampled_from(sorted(study.family.presets)).map(
            lambda preset, name=study.name: (name, "--preset", preset)
        )
        bad_value = bad_values[study.family.name]
        faults = draw_equally([*fault_groups, bad_value, bad_value])
        lines.append(st.tuples(start, st.just(("--output", "out")), extra_options, faults))
    return draw_equally([unknown_lines, *lines * 5]).map(join_words)


def check_command_lines(examples: int, seed: int | None = None) -> Tally:
    """Check lines of `run` that are malformed by construction: each is refused, with --dry-run and without it."""
    return check_examples(draw_malformed_lines(), check_line, examples, seed)


def check_any_line(args: Words) -> str:
    """Check that a dry run is planned or refused, and writes nothing; say which."""
    answer = type_in_anywhere(args)
    assert answer.code in (0, 2, 3), answer
    assert answer.files == (), answer
    # A plan that needs more disk or memory than this machine has says so first.
    if answer.code == 3:
        assert answer.out, answer
    if answer.code != 2:
        return "planned"
    assert_clear(answer.err)
    return "refused"


huge_numbers = st.sampled_from([10, 20, 400, 5000]).map(lambda digits: 10**digits)
texts = st.one_of(st.text(st.characters(), max_size=10), any_text)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts, huge_numbers)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)


Overrides = tuple[type[BaseRunConfig], dict[str, object]]


def draw_overrides(config_class: type[BaseRunConfig]) -> st.SearchStrategy[Overrides]:
    """Draw dotted keys of a configuration, most of which are valid, with values that are sometimes valid."""
    choices = [choice for field in list_field_schemas(config_class).values() for choice in field.get("enum", ())]
    valid_values = st.one_of(st.integers(0, 64), st.floats(0, 1), st.booleans())
    if choices:  # the settings of commands have none
        valid_values |= st.sampled_from(choices)
    keys = draw_equally([*[st.sampled_from([*list_field_names(config_class), *config_class.aliases])] * 9, texts])
    changes = st.dictionaries(keys, draw_equally([valid_values, valid_values, valid_values, json_values]), max_size=3)
    return st.tuples(st.just(config_class), changes)


def check_settings(example: Overrides) -> str:
    """Check that overrides give a configuration that JSON preserves, or a ConfigError with a message of one line."""
    config_class, changes = example
    try:
        config = apply_overrides(config_class.model_validate({}), changes)
    except ConfigError as error:
        assert_clear(f"tune_study: {error}\n")
        return "ConfigError"
    serialized_config = json.dumps(config.model_dump(mode="json"), allow_nan=False).encode()
    reloaded_config = config_class.model_validate(json.loads(serialized_config))
    assert (reloaded_config, reloaded_config.compute_hash()) == (config, config.compute_hash())
    return "a configuration"


def check_configurations(examples: int, seed: int | None = None) -> Tally:
    """Check that any keys and values from Python give a configuration or a ConfigError."""
    family_overrides = draw_equally([draw_overrides(family.config_class) for family in FAMILIES.values()])
    return check_examples(family_overrides, check_settings, examples, seed)
