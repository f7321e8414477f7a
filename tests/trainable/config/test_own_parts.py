"""Names of parts in settings, the files behind them, and the hash of a configuration that uses them."""

import pytest

from sandboxes.update_rules.config.settings import UpdateRuleConfig
from trainable.config import own_parts
from trainable.config.own_parts import OwnPartError, PartFile, PartName
from trainable.config.run_config import ConfigError, RunConfig, apply_overrides

TEXT = "from math import sqrt\n\ndef loss(new, old, advantages):\n    return old\n\ndef rule(rows):\n    return None\n"


@pytest.fixture(autouse=True)
def _registered() -> None:
    own_parts.register_file(PartFile("folder/first.py", TEXT))


def use_loss(path: str = "first.py") -> RunConfig:
    settings = {"actor.policy_loss": f"{path}:loss", "trainer.own_stop_rules": "[first.py:rule]"}
    return apply_overrides(RunConfig(), settings)


@pytest.mark.parametrize(
    "name", ["ppo_clip", "file.py", "file.py:", "file.txt:name", "a.py:b.c", "a.py:1", 3, None, "a:b.py:c"]
)
def test_other_values_name_no_part(name: object) -> None:
    assert own_parts.parse_part_name(name) is None


def test_a_name_is_read_and_written() -> None:
    part = PartName("some folder/a.py", "b", "0123456789abcdef")
    assert own_parts.parse_part_name(part.format()) == part
    assert part.file_name == "a.py"
    assert own_parts.shorten_part_name("x/a.py:b") == "b"
    assert own_parts.shorten_part_name("top_p") == "top_p"


def test_a_configuration_pins_its_parts_to_the_text_of_their_file() -> None:
    digest = PartFile("first.py", TEXT).digest
    pinned = own_parts.pin_parts(use_loss("elsewhere/first.py"))
    assert pinned.actor.policy_loss == f"first.py:loss#{digest}"
    assert pinned.trainer.own_stop_rules == (f"first.py:rule#{digest}",)
    assert own_parts.pin_parts(pinned) == pinned
    assert set(own_parts.list_parts(pinned)) == {"actor.policy_loss", "trainer.own_stop_rules.0"}
    assert [file.text for file in own_parts.list_part_files(pinned)] == [TEXT]
    # Wherever the file lies; but not another text.
    assert pinned.compute_hash() == own_parts.pin_parts(use_loss()).compute_hash()
    own_parts.register_file(PartFile("first.py", TEXT + "\n"))
    changed = own_parts.pin_parts(use_loss())
    assert changed.compute_hash() != pinned.compute_hash()
    assert RunConfig().compute_hash() not in (changed.compute_hash(), pinned.compute_hash())
    # Both texts stay known, and each configuration finds its own.
    assert own_parts.get_part(pinned.actor.policy_loss) is not own_parts.get_part(changed.actor.policy_loss)
    # Settings that only choices of the package read are not hashed.
    other = apply_overrides(use_loss(), {"actor.clip_ratio_high": 0.5, "actor.tpo_eta": 2})
    assert own_parts.pin_parts(other).compute_hash() == own_parts.pin_parts(use_loss()).compute_hash()


def test_a_file_that_was_not_typed_is_not_used() -> None:
    config = apply_overrides(RunConfig(), {"env.name": "unknown.py:Game"})
    with pytest.raises(OwnPartError, match=r"unknown\.py:Game needs the file unknown\.py, which was not typed"):
        own_parts.pin_parts(config)
    with pytest.raises(OwnPartError, match="was not typed"):
        own_parts.get_part("first.py:loss#0123456789abcdef")


@pytest.mark.parametrize(
    ("name", "message"), [("nothing", "has no nothing"), ("sqrt", "imports sqrt, and only the text of that file")]
)
def test_a_part_is_defined_in_its_file(name: str, message: str) -> None:
    digest = PartFile("first.py", TEXT).digest
    with pytest.raises(OwnPartError, match=message):
        own_parts.get_part(f"first.py:{name}#{digest}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", r"bad\.py cannot be executed: SyntaxError: invalid syntax \(bad\.py, line 1\)"),
        ("a = 1\nb = a / 0\n", r"ZeroDivisionError: division by zero \(bad\.py, line 2: `b = a / 0`\)"),
    ],
)
def test_a_file_that_cannot_be_executed_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(OwnPartError, match=message):
        own_parts.register_file(PartFile("bad.py", text))


def test_a_choice_says_what_is_allowed() -> None:
    message = (
        r"actor\.policy_loss=ppo: must be 'ppo_clip', 'gspo', 'cispo', 'cppo', 'tpo' or a part of yours, FILE\.py:NAME"
    )
    with pytest.raises(ConfigError, match=message):
        apply_overrides(RunConfig(), {"actor.policy_loss": "ppo"})
    with pytest.raises(ConfigError, match=r"own_stop_rules\.0=rule: must be a part of yours"):
        apply_overrides(RunConfig(), {"trainer.own_stop_rules": "[rule]"})
    with pytest.raises(ConfigError, match=r"method=dg: must be 'CE', .* or a part of yours"):
        apply_overrides(UpdateRuleConfig(), {"method": "dg"})


def test_what_is_known_of_parts_of_the_user() -> None:
    filter_settings = {"filter.rollout_filter_strategy": "first.py:rule", "filter.rollout_filter_value": 7}
    config = apply_overrides(use_loss(), filter_settings)
    assert not config.actor.loss.needs_whole_groups
    assert config.filter.strategy.takes_any_value
    estimator = apply_overrides(RunConfig(), {"algorithm.adv_estimator": "first.py:loss"}).algorithm.estimator
    assert (estimator.needs_critic, estimator.is_skill) == (False, False)
    for size in (1, 4):
        config = apply_overrides(UpdateRuleConfig(), {"method": "first.py:rule", "group_size": size})
        assert config.rule.has_groups == (size > 1)
