"""The PPO trainer: one `step` is the published step, in its published order."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from trainable.algo.batching import adjust_copy
from trainable.algo.filters import filter_loss_scale
from trainable.algo.kl_control import AdaptiveKL
from trainable.algo.losses import kl_estimate
from trainable.algo.reductions import masked_mean
from trainable.backend.make import make_backends
from trainable.backend.meter import Meter
from trainable.backend.world import ALONE, World, in_order, my_block, skipped_children
from trainable.config.run_config import RunConfig
from trainable.config.seeds import stream
from trainable.envs.sokoban.generate import Room
from trainable.envs.sokoban.prompt import Observation, make_protocol
from trainable.envs.sokoban.room_sets import room_keys, test_rooms, training_rooms, validation_rooms
from trainable.models.interface import Critic, LanguageModel
from trainable.models.load import Policy, make_codec, pick_device
from trainable.models.lora import check_base
from trainable.models.networks import make_networks
from trainable.ppo.evaluation import Evaluation, collected_columns, number_classes, summarise, trained_columns
from trainable.ppo.filtering import Kept, filter_episodes
from trainable.ppo.flops import matrix_rate, rollout_flops, training_flops, utilisation
from trainable.ppo.targets import make_targets
from trainable.ppo.update import ActorUpdate, Targets, TokenFunction, at_trained_tokens, update_critic
from trainable.rollout.batch import Batch, collate, update_order
from trainable.rollout.engine import make_engine
from trainable.rollout.episode import Episode
from trainable.rollout.play import Rules, check_first_turn, play
from trainable.rollout.sampler import SamplingParams
from trainable.runs.failures import NonFiniteError
from trainable.runs.nonfinite import check_finite
from trainable.runs.state import shapes_of

SHARED_VALUE_WEIGHT = 0.01  # rewards reach 10.9: the weight brings the squared error to the policy loss's size
TOTALS = ("optimizer_steps", "env_steps", "sampled_tokens", "trained_tokens")
Row = dict[str, Any]
T = TypeVar("T")


class Step(NamedTuple):
    """What one step gave: its row, its evaluations, and the lines of its gradient analysis, if it had one."""

    row: Row
    evaluations: list[Evaluation]
    gradients: list[Row]


class Prepared(NamedTuple):
    """A batch that is ready for losses."""

    batch: Batch
    targets: Targets


class Diagnostics(NamedTuple):
    """What is measured of a training step beside training; it changes neither weights nor what is sampled later.

    collapse: given the trainer and the step's episodes, the columns that it measured, or none where none are due.
    gradients: given the same at the steps at which the configuration asks for it, the lines for gradients.jsonl.
    """

    collapse: Callable[["PPOTrainer", Sequence[Episode]], Row] = lambda trainer, episodes: {}
    gradients: Callable[["PPOTrainer", list[Episode]], list[Row]] = lambda trainer, episodes: []


NO_DIAGNOSTICS = Diagnostics()


class PPOTrainer:
    """Policy, critic, reference and rooms of one run. `step()` trains once and returns the step's row.

    All randomness comes from (config.seed, purpose, step): a trainer whose state was restored after step t goes on
    exactly as one that never stopped.
    """

    def __init__(self, config: RunConfig, world: World = ALONE, diagnostics: Diagnostics = NO_DIAGNOSTICS) -> None:
        self.config, self.world, self.diagnostics = config, world, diagnostics
        self.device = pick_device(config.trainer.device, config.trainer.n_gpus_per_node)
        policy, self.reference, self.critic, self.head, self.base = make_networks(config, self.device)
        self.model = policy.model
        self.codec, self.stop_token = make_codec(policy.tokenizer), policy.stop_token
        self.backends = make_backends(config, world, self.model, self.head, self.critic)
        control = config.algorithm.kl_ctrl
        horizon = control.horizon if control.type == "adaptive" else None
        self.kl_control = AdaptiveKL(control.kl_coef, control.target_kl, horizon)
        self.step_index = self.empty_in_a_row = self.nonfinite_in_a_row = 0
        self.seconds_total = 0.0
        self.collapse_averages: Mapping[str, Mapping[str, float]] = {}
        self.totals = dict.fromkeys(TOTALS, 0)
        self._set_up_game(policy)

    def _set_up_game(self, policy: Policy) -> None:
        """Protocol, limits, and every room of the run, made ahead: a step never waits for a room."""
        config, env = self.config, self.config.env
        style = config.model.prompt_style
        self.protocol = make_protocol(style, env.observation_format, env.max_actions_per_traj, policy.chat)
        own = self.model.shape.max_position_embeddings
        context = min(own, config.rollout.max_model_len or own)
        self.rules = Rules(
            env.max_turn, env.max_actions_per_turn, env.max_actions_per_traj, env.format_penalty, context
        )
        opening = Observation(1, validation_rooms(1, env.seed_val)[0].cells, env.max_actions_per_traj)
        check_first_turn(opening, self.protocol, self.codec, context, config.rollout.response_length)
        prompt = self.codec.encode([self.protocol.opening(opening)])[0]
        self.engine = make_engine(config, policy, self.device, prompt, context, self.backends["actor"].whole)
        self.test_rooms = test_rooms(env.test_env_groups)
        self.val_rooms = validation_rooms(env.val_env_groups, env.seed_val)
        skip = room_keys(self.test_rooms)
        steps = range(1, config.trainer.total_training_steps + 1)
        self.rooms = [training_rooms(config.seed, step, env.env_groups, env.seed_train, skip=skip) for step in steps]
        trained = room_keys(room for rooms in self.rooms for room in rooms)
        self.val_unseen = [room.key not in trained for room in self.val_rooms for _ in range(env.val_group_size)]

    # ------------------------------------------------------------------ the step

    def step(self) -> Step:
        """Train once. The row holds every column that this step has a number for."""
        started, cpu = time.perf_counter(), time.process_time()
        row: Row = {}
        evaluations: list[Evaluation] = []
        if self.step_index == 0 and self.config.trainer.val_before_train:  # 0 validate the base policy
            evaluations += self._timed(row, "seconds_validation", lambda: self.validate_base(row))
        self.step_index += 1
        episodes = self._timed(row, "seconds_rollout", self._collect)  # 1 roll out P x G episodes
        size = self.config.env.group_size
        row |= collected_columns(episodes, size) | self.engine.compared(episodes, self.step_index)
        row |= self._utilisation({"rollout": rollout_flops(self.model.shape, episodes)}, row)
        row |= self.diagnostics.collapse(self, episodes)
        kept = filter_episodes(episodes, self.config.filter, size)  # 2 drop groups of little spread
        self.empty_in_a_row = 0 if kept.groups else self.empty_in_a_row + 1
        row |= {**kept.row, "empty_steps_in_a_row": self.empty_in_a_row}
        gradients = self._update(episodes, kept, row)  # 3-8 values, advantages, critic, analysis, policy
        if kept.episodes and self._validates():  # 9 validate
            evaluations += self._timed(row, "seconds_validation", lambda: self.validate(row))
        self._count(row, episodes)
        row["seconds_step"] = time.perf_counter() - started
        row["cpu_seconds_step"] = time.process_time() - cpu
        self.seconds_total += row["seconds_step"]
        row["seconds_total"] = self.seconds_total
        return Step(row, evaluations, gradients)

    def _collect(self) -> list[Episode]:
        rooms = self.rooms[self.step_index - 1]
        return self.roll_out(rooms, self.config.env.group_size, stream(self.config.seed, "sampling", self.step_index))

    def roll_out(self, rooms: Sequence[Room], group_size: int, draws: np.random.Generator) -> list[Episode]:
        """Training episodes: `group_size` of each room, in the rooms' order."""
        return self._play(rooms, group_size, self.config.rollout.temperature, draws, is_trained=True)

    def _play(
        self, rooms: Sequence[Room], copies: int, temperature: float, draws: np.random.Generator,
        is_trained: bool = False,
    ) -> list[Episode]:  # fmt: skip
        """Every room `copies` times. Ranks play some rooms each, with the draws that one rank alone would give them."""
        block = my_block(len(rooms), self.world)
        mine = [rooms[number] for number in block]
        draws, sampling = skipped_children(draws, block.start * copies), self._sampling(temperature)
        with self.engine.sampling():
            played = play(
                mine, copies, self.engine.sampler, self.protocol, self.codec, self.rules, sampling, draws
            ) if mine else []  # fmt: skip
        if is_trained:
            self.engine.rest()  # what follows are passes of the trainer
            played = self.engine.reread(played)
        return [*in_order(self.world.gather(
            [episode._replace(group=episode.group + block.start) for episode in played]
        ))]  # fmt: skip

    def _sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature, self.config.rollout.response_length, self.stop_token)

    def _update(self, episodes: list[Episode], kept: Kept, row: Row) -> list[Row]:
        """Make the batch, its targets, and all optimizer steps; the lines of the gradient analysis, where it is due."""
        config, due = self.config, self.config.trainer.analyses_gradients(self.step_index)
        if not kept.episodes:
            return self._analyse(row, episodes) if due else []
        draws = stream(config.seed, "duplicates", self.step_index)
        batch, targets = self.prepare(kept.episodes, kept.groups, config.env.env_groups, draws, row)  # 3-6
        meters: list[Meter] = []
        row |= trained_columns(batch, targets, kept.episodes, config.algorithm.adv_estimator == "gae")
        order = update_order(batch, config.actor.keeps_groups)
        only = config.trainer.gradient_analysis_mode and config.trainer.gradient_analysis_only
        if self.critic is not None and not only:  # 7 critic
            backend = self.backends["critic"]
            critic, mode = cast(Critic, backend.networks["critic"]), config.actor.loss_agg_mode
            meters.append(self._timed(row, "seconds_update_critic", lambda: update_critic(
                critic, backend, batch, targets, order, config.critic, mode)))  # fmt: skip
        found = self._analyse(row, episodes) if due else []
        leaves = only or (due and config.trainer.exit_after_gradient_analysis)
        if config.trainer.critic_warmup <= self.step_index and not leaves:  # 8 policy
            meter = self._timed(row, "seconds_update_actor", lambda: self.actor_update().run(batch, targets, order))
            row["optimizer_steps"] = meter.optimizer_steps - meter.skipped
            meters.append(meter)
        for meter in meters:
            row |= meter.means()
        row |= self._utilisation(training_flops(self.model.shape, config, batch), row)
        self._count_skipped(row, meters)
        self._timed(row, "seconds_push", lambda: self.engine.follow(self.step_index))
        if not only:
            self._move_kl_control(row, batch, targets.ref_logprobs)
        return found

    def prepare(
        self, episodes: Sequence[Episode], groups_kept: int, groups: int, draws: np.random.Generator, row: Row
    ) -> Prepared:
        """Values, reference log-probs and advantages of the episodes of `groups_kept` of `groups` groups."""
        config = self.config
        batch = self._batch(episodes, groups, draws)  # 3 a multiple of the mini-batch
        values = self._timed(row, "seconds_values", lambda: self.values(batch))  # 4 critic
        ref = self._timed(row, "seconds_reference", lambda: self._reference(batch))  # 5 reference
        scale = filter_loss_scale(config.actor.filter_loss_scaling, groups_kept, groups)
        targets = make_targets(batch, values, ref, config.algorithm, self.kl_control.coef, scale)  # 6 advantages
        return Prepared(batch, targets)

    def _analyse(self, row: Row, episodes: list[Episode]) -> list[Row]:
        with self.backends["actor"].whole():
            return self._timed(row, "seconds_gradient_analysis", lambda: self.diagnostics.gradients(self, episodes))

    def _count_skipped(self, row: Row, meters: Sequence[Meter]) -> None:
        """Count the optimizer steps that were skipped; NonFiniteError where the run cannot go on."""
        skipped = row["nonfinite_updates"] = sum(meter.skipped for meter in meters)
        self.nonfinite_in_a_row = self.nonfinite_in_a_row + 1 if skipped else 0
        names = [name for meter in meters for name in meter.nonfinite]
        broken = [name for backend in self.backends.values() for name in backend.bad_weights()]
        check_finite(self.step_index, self.nonfinite_in_a_row, self.config.trainer.nonfinite_patience, names, broken)

    def actor_update(self) -> ActorUpdate:
        """The policy's losses and optimizer, as they are now."""
        backend = self.backends["actor"]
        return ActorUpdate(
            cast(LanguageModel, backend.networks["actor"]), backend, self.config.actor, self.config.rollout.temperature,
            self.reference, backend.networks.get("head"), SHARED_VALUE_WEIGHT, self.config.critic.cliprange_value,
        )  # fmt: skip

    def _batch(self, episodes: Sequence[Episode], groups: int, draws: np.random.Generator) -> Batch:
        """Kept episodes, with random ones copied up to a multiple of lcm(groups, mini-batch) (published).

        Nothing is copied where the loss is of whole groups: a copy would belong to one.
        """
        actor = self.config.actor
        multiple = 1 if actor.keeps_groups else math.lcm(groups, actor.ppo_mini_batch_size)
        generator = torch.Generator().manual_seed(int(draws.integers(2**62)))
        index = adjust_copy(len(episodes), multiple, generator)
        batch = collate([episodes[number] for number in index.tolist()])
        return Batch(*(part.to(self.device) for part in batch))

    def values(self, batch: Batch) -> Tensor | None:
        """The critic's values (B, T) at the trained tokens, without gradients; None without a critic."""
        rows = self.config.rollout.log_prob_micro_batch_size_per_gpu
        if self.critic is not None:
            values = TokenFunction.values(self.critic.model, self.critic.score)
        elif self.head is not None:
            values = TokenFunction.values(self.model.model, self.head)
        else:
            return None
        with self.backends["actor" if self.critic is None else "critic"].whole():
            return at_trained_tokens(batch, rows, values, self.world)

    def _reference(self, batch: Batch) -> Tensor | None:
        if self.reference is None:
            return None
        function = TokenFunction.logprobs(self.reference, self.config.rollout.temperature)
        rows = self.config.rollout.ref_log_prob_micro_batch_size_per_gpu
        return at_trained_tokens(batch, rows, function, self.world)

    def _move_kl_control(self, row: Row, batch: Batch, ref: Tensor | None) -> None:
        if not self.config.algorithm.use_kl_in_reward or ref is None:
            return
        row["kl_in_reward_coef"] = self.kl_control.coef
        measured = float(masked_mean(kl_estimate(batch.logprobs, ref, self.config.algorithm.kl_penalty), batch.mask))
        if not math.isfinite(measured):
            raise NonFiniteError(f"step {self.step_index} measured a KL in the reward that is not finite")
        self.kl_control = self.kl_control.updated(measured, len(batch.lengths))

    # ------------------------------------------------------------------ evaluation

    def validate(self, row: Row, prefix: str = "") -> list[Evaluation]:
        """Sampled validation on all validation rooms; columns `<prefix>val_...` of `row`."""
        found = self.evaluate("val", "sampled")
        row[f"{prefix}val_success"] = found.success
        row[f"{prefix}val_success_unseen"] = found.success_where(self.val_unseen)
        row[f"{prefix}val_reward"] = found.score
        row[f"{prefix}val_invalid_turns"] = found.invalid_turns
        return [found]

    def validate_base(self, row: Row) -> list[Evaluation]:
        """Sampled and greedy validation before training."""
        greedy = self.evaluate("val", "greedy")
        row["base_val_greedy_success"] = greedy.success
        return [*self.validate(row, "base_"), greedy]

    def close(self, row: Row) -> list[Evaluation]:
        """What is measured once, at the end of a run: greedy validation, and the test rooms both ways."""
        before, cpu = float(row.get("seconds_validation") or 0.0), time.process_time()
        found = self._timed(row, "seconds_validation", lambda: self._close(row))
        spent = row["seconds_validation"] - before
        for name in ("seconds_step", "seconds_total"):
            row[name] = float(row.get(name) or 0.0) + spent
        row["cpu_seconds_step"] = float(row.get("cpu_seconds_step") or 0.0) + time.process_time() - cpu
        self.seconds_total += spent
        return found

    def _close(self, row: Row) -> list[Evaluation]:
        found = [self.evaluate("val", "greedy")]
        row["val_greedy_success"] = found[0].success
        if self.test_rooms:
            for mode, column in (("sampled", "test_success"), ("greedy", "test_greedy_success")):
                found.append(self.evaluate("test", mode))
                row[column] = found[-1].success
        return found

    def evaluate(self, split: str, mode: str) -> Evaluation:
        """Play all rooms of `split` (val, test) in `mode` (sampled, greedy); the policy is left alone."""
        rooms, copies = (self.val_rooms, self.config.env.val_group_size) if split == "val" else (self.test_rooms, 1)
        purpose = "validation" if split == "val" else "test"
        temperature = self.config.rollout.val_temperature if mode == "sampled" else 0.0
        episodes = self._play(rooms, copies, temperature, stream(self.config.seed, purpose, self.step_index))
        return summarise(episodes, self.step_index, split, mode, number_classes([room.key for room in rooms]))

    def _validates(self) -> bool:
        trainer, step = self.config.trainer, self.step_index
        return trainer.test_freq > 0 and (step == trainer.total_training_steps or step % trainer.test_freq == 0)

    # ------------------------------------------------------------------ accounts

    def _count(self, row: Row, episodes: Sequence[Episode]) -> None:
        """Budgets of the step and so far: a filter changes them, and a comparison must show it."""
        row["env_steps"] = sum(episode.actions for episode in episodes)
        row["sampled_tokens"] = sum(episode.response_tokens for episode in episodes)
        for name in ("optimizer_steps", "trained_tokens"):
            row.setdefault(name, 0)
        for name in TOTALS:
            self.totals[name] += int(row[name] or 0)
            row[f"total_{name}"] = self.totals[name]
        row["tokens_per_second"] = row["sampled_tokens"] / row["seconds_rollout"]

    def _utilisation(self, flops: Mapping[str, float], row: Row) -> Row:
        rate = matrix_rate(self.device.type, self.model.model.passes.dtype)
        return {"matrix_rate": rate, **utilisation(flops, row, rate * self.world.size)}

    def _timed(self, row: Row, name: str, work: Callable[[], T]) -> T:
        """Do `work` and add its seconds to a column."""
        started = time.perf_counter()
        result = work()
        row[name] = float(row.get(name) or 0.0) + time.perf_counter() - started
        return result

    def release(self) -> None:
        """Give back what the engine holds: the trainer can sample no more."""
        self.engine.close()

    # ------------------------------------------------------------------ state

    def state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """All that the next step depends on: tensors by name, and JSON values. The reference is the base model.

        The tensors are the live ones: write or clone them before the next step.
        """
        tensors = {name: value for backend in self.backends.values() for name, value in backend.state().items()}
        return tensors, {
            "step": self.step_index,
            "empty_in_a_row": self.empty_in_a_row,
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
            "seconds_total": self.seconds_total,
            "totals": self.totals,
            "kl_coef": self.kl_control.coef,
            "collapse_averages": self.collapse_averages,
            **({} if self.base is None else {"base": self.base}),
        }

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Continue from what `state` gave. ValueError, and nothing is changed, where it is not of such a trainer."""
        check_base(values.get("base"), self.base)
        for backend in self.backends.values():
            backend.check_fits(shapes_of(tensors))
        try:
            step, empty, nonfinite = (int(values[key]) for key in ("step", "empty_in_a_row", "nonfinite_in_a_row"))
            seconds, coef = float(values["seconds_total"]), float(values["kl_coef"])
            totals = {name: int(values["totals"][name]) for name in TOTALS}
            averages = {label: {name: float(std) for name, std in stds.items()}
                        for label, stds in values.get("collapse_averages", {}).items()}  # fmt: skip
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"its values do not fit ({type(error).__name__}: {error})") from error
        for backend in self.backends.values():
            backend.load_state(tensors)
        self.step_index, self.empty_in_a_row, self.nonfinite_in_a_row = step, empty, nonfinite
        self.seconds_total, self.totals, self.collapse_averages = seconds, totals, averages
        self.kl_control = replace(self.kl_control, coef=coef)
        self.engine.follow(step)
