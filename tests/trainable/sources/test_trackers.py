"""Event files of TensorBoard and offline files of W&B."""

import json
from pathlib import Path

import pytest
from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event

from tests.trainable.sources.logs import read_log
from tests.trainable.sources.trackers import BLOCK_BYTES, EventWriter, frame_event, write_events, write_wandb
from trainable.sources.event_files import MAX_CHECKED_BYTES
from trainable.sources.log_files import list_runs
from trainable.sources.logs import RunLog
from trainable.sources.names import translate_rows


def list_values(log: RunLog, name: str) -> list[tuple[int, float]]:
    return [(row.step, round(row.values[name], 6)) for row in log.rows if name in row.values]


def test_scalars_texts_and_hyper_parameters_of_event_files(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    writer.add_text("args", json.dumps({"seed": 3, "optim": {"lr": 1e-6}}))
    writer.add_text("note", "no settings" * MAX_CHECKED_BYTES)
    writer.add_hparams({"beta": 0.5, "name": "a"}, {"metric": 1.0})
    for step in (1, 2):
        writer.add_scalar("reward", step / 4, step)
        writer.add_histogram("weights", [1.0, 2.0], step)
    writer.close()
    (files,) = list_runs([tmp_path])
    assert len(files) == 2, "tensorboardX writes hyper-parameters to a folder of their own"
    log = read_log(*files)
    assert list_values(log, "reward") == [(1, 0.25), (2, 0.5)]
    assert log.settings == {"seed": 3, "optim.lr": 1e-6, "beta": 0.5, "name": "a"}
    assert not log.notes


def test_tensors_without_dimensions_are_scalars(tmp_path: Path) -> None:
    event_file = write_events(tmp_path, [(1, {"reward": 1.0})])
    content = event_file.read_bytes()
    for step, fields in ((2, {"dtype": 1, "float_val": [0.5]}), (3, {"dtype": 2, "tensor_content": bytes(7) + b"@"})):
        event = Event(step=step, wall_time=100 + step)
        value = event.summary.value.add(tag="reward")
        value.tensor.dtype = fields["dtype"]
        value.tensor.float_val.extend(fields.get("float_val", []))
        value.tensor.tensor_content = fields.get("tensor_content", b"")
        content += frame_event(event)
    event_file.write_bytes(content)
    assert list_values(read_log(event_file), "reward") == [(1, 1.0), (2, 0.5), (3, 2.0)]


def test_rule_5_a_resumed_run_has_two_event_files_of_which_the_later_counts(tmp_path: Path) -> None:
    write_events(tmp_path, [(step, {"train/reward": step / 8}) for step in range(1, 6)])
    write_events(tmp_path, [(step, {"train/reward": 1.0}) for step in range(4, 8)], start=100)
    (files,) = list_runs([tmp_path])
    log = read_log(*files)
    assert list_values(log, "train/reward") == [(1, 0.125), (2, 0.25), (3, 0.375), *((step, 1) for step in range(4, 8))]
    assert log.notes == ["At line 6 the step goes back from 5 to 4: the run was resumed, and its later rows count."]


def test_rule_5_processes_that_write_at_their_own_pace_are_no_resumed_run(tmp_path: Path) -> None:
    rollout, trainer = EventWriter(tmp_path, 0), EventWriter(tmp_path, 0.5)
    for step in range(1, 5):
        rollout.write(step, {"reward": step / 8})
        if step > 2:
            trainer.write(step - 2, {"loss": step / 8})
    rollout.close()
    trainer.close()
    (files,) = list_runs([tmp_path])
    log = read_log(*files)
    assert list_values(log, "reward") == [(step, step / 8) for step in range(1, 5)]
    assert list_values(log, "loss") == [(1, 0.375), (2, 0.5)]
    assert not log.notes


@pytest.mark.parametrize("kind", ["events", "W&B"])
def test_rule_5_slime_has_three_counters_of_which_rollouts_count(tmp_path: Path, kind: str) -> None:
    """Two optimizer steps a rollout, counted from 0, and a validation before training and after the second rollout."""
    rows = [("eval/step", 0, {"eval/math": 0.1, "eval/math-truncated_ratio": 0.9})]
    for rollout in (0, 1):
        rows.append(("rollout/step", rollout, {"rollout/raw_reward": 0.5 + rollout}))
        rows += [("train/step", 2 * rollout + step, {"train/grad_norm": rollout + step / 2}) for step in (0, 1)]
    rows.append(("eval/step", 1, {"eval/math": 0.4}))
    if kind == "events":
        file = write_events(tmp_path, [(step, {**values, axis: float(step)}) for axis, step, values in rows])
    else:
        entries = [{**values, axis: step, "_step": number} for number, (axis, step, values) in enumerate(rows)]
        file = write_wandb(tmp_path / "run-a.wandb", entries)
    log = read_log(file)
    translated = translate_rows(log)
    columns = ("step", "base_val_success", "train_reward", "actor_grad_norm", "val_success")
    values = [[row.get(column) for column in columns] for row in translated]
    assert values == [[1, pytest.approx(0.1), 0.5, 0.5, None], [2, None, 1.5, 1.5, pytest.approx(0.4)]]
    assert log.notes == ["The log counts steps from 0, and these rows from 1."]


def test_an_event_file_ends_before_its_first_damaged_byte(tmp_path: Path) -> None:
    event_file = write_events(tmp_path, [(1, {"train/reward": 0.5})])
    start = event_file.stat().st_size
    event_file.unlink()
    event_file = write_events(tmp_path, [(step, {"train/reward": 0.5}) for step in (1, 2)])
    content = event_file.read_bytes()
    for position in range(start, len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1
        for changed in (damaged, content[:position]):
            event_file.write_bytes(changed)
            log = read_log(event_file)
            assert list_values(log, "train/reward") == [(1, 0.5)]
            is_between = len(changed) == start
            note = f"{event_file} is cut or damaged after byte {start}: the rest was not read."
            assert log.notes == ([] if is_between else [note])


def test_config_and_history_of_wandb(tmp_path: Path) -> None:
    rows = [
        {"_step": step, "_timestamp": float(step), "reward": step / 4, "env.turns": 2, "text": "a", "kl": float("nan")}
        for step in (1, 2)
    ]
    config = {"_wandb": {"t": 1}, "seed": 3, "algorithm": {"kl_coef": 0.1}}
    log = read_log(write_wandb(tmp_path / "run-a.wandb", rows, config))
    assert [(row.step, row.values) for row in log.rows] == [
        (1, {"reward": 0.25, "env.turns": 2}),
        (2, {"reward": 0.5, "env.turns": 2}),
    ]
    assert log.settings == {"seed": 3, "algorithm.kl_coef": 0.1}
    assert not log.notes


def test_records_of_wandb_over_several_blocks(tmp_path: Path) -> None:
    rows = [{"_step": step, "reward": step / 4, "text": "x" * (BLOCK_BYTES // 3 * step)} for step in range(1, 8)]
    log = read_log(write_wandb(tmp_path / "run-a.wandb", rows))
    assert list_values(log, "reward") == [(step, step / 4) for step in range(1, 8)]


def test_a_killed_run_of_wandb_has_no_end_and_gives_what_is_whole(tmp_path: Path) -> None:
    rows = [{"_step": step, "reward": 0.5} for step in range(1, 5)]
    file = write_wandb(tmp_path / "run-a.wandb", rows, has_ended=False)
    ending = "The run has no record of its end: it was killed, or still writes."
    assert read_log(file).notes == [ending]
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    log = read_log(file)
    assert [row.step for row in log.rows] == [1, 2, 3]
    assert "is cut or damaged after byte" in log.notes[0]
    assert log.notes[1] == ending
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 1
    file.write_bytes(damaged)
    assert len(read_log(file).rows) < 4
