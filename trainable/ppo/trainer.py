"""The PPO trainer: one `step` is the published step, in its published order."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, NamedTuple, cast

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
from trainable.envs.sokoban.generate import Level
from trainable.envs.sokoban.level_sets import levels_of_run, validation_levels
from trainable.envs.sokoban.prompt import Observation, make_protocol
from trainable.models.interface import Critic, LanguageModel
from trainable.models.load import Policy, make_codec, pick_device
from trainable.models.lora import check_base
from trainable.models.networks import make_networks
from trainable.ppo.evaluation import (
    Evaluation,
    number_classes,
    summarise,
    summarise_batch,
    summarise_collection,
    summarise_validation,
)
from trainable.ppo.filtering import Selection, filter_episodes
from trainable.ppo.flops import matrix_rate, rollout_flops, training_flops, utilisation
from trainable.ppo.phases import Clock, Phases
from trainable.ppo.schedule import Due, due_at
from trainable.ppo.step_record import (
    BatchSummary,
    Budget,
    Duration,
    EngineGap,
    FinalEvaluation,
    Number,
    StepRecord,
    Update,
)
from trainable.ppo.targets import Prepared, make_targets
from trainable.ppo.update import ActorUpdate, TokenFunction, at_trained_tokens, update_critic
from trainable.rollout.batch import Batch, collate, update_order
from trainable.rollout.engine import make_engine
from trainable.rollout.episode import Episode
from trainable.rollout.play import Rules, check_first_turn, play
from trainable.rollout.sampler import SamplingParams
from trainable.runs.failures import NonFiniteError
from trainable.runs.nonfinite import check_finite
from trainable.runs.run import Row
from trainable.runs.state import shapes_of

SHARED_VALUE_WEIGHT = 0.01  # rewards reach 10.9: the weight brings the squared error to the policy loss's size


class Step(NamedTuple):
    """What one step gave: its record, its evaluations, and the lines of its gradient analysis, if it had one."""

    record: StepRecord
    evaluations: list[Evaluation]
    gradients: list[Row]

    @property
    def row(self) -> dict[str, Number]:
        """The columns that this step has a number for."""
        return self.record.row()


class Diagnostics(NamedTuple):
    """What is measured of a training step beside training; it changes neither weights nor what is sampled later.

    collapse: given the trainer and the step's episodes, the columns that it measured, or none where none are due.
    gradients: given the same at the steps at which the configuration asks for it, the lines for gradients.jsonl.
    """

    collapse: Callable[["PPOTrainer", Sequence[Episode]], Mapping[str, float]] = lambda trainer, episodes: {}
    gradients: Callable[["PPOTrainer", list[Episode]], list[Row]] = lambda trainer, episodes: []


NO_DIAGNOSTICS = Diagnostics()


class PPOTrainer:
    """Policy, critic, reference and levels of one run. `step()` trains once and returns the step's row.

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
        self.totals = Budget(0, 0, 0, 0)
        self._set_up_game(policy)

    def _set_up_game(self, policy: Policy) -> None:
        """Protocol, limits, and every level of the run, made ahead: a step never waits for a level."""
        config, env = self.config, self.config.env
        style = config.model.prompt_style
        self.protocol = make_protocol(style, env.observation_format, env.max_actions_per_traj, policy.chat)
        own = self.model.shape.max_position_embeddings
        context = min(own, config.rollout.max_model_len or own)
        self.rules = Rules(
            env.max_turn, env.max_actions_per_turn, env.max_actions_per_traj, env.format_penalty, context
        )
        opening = Observation(1, validation_levels(1, env.seed_val)[0].cells, env.max_actions_per_traj)
        check_first_turn(opening, self.protocol, self.codec, context, config.rollout.response_length)
        prompt = self.codec.encode([self.protocol.opening(opening)])[0]
        self.engine = make_engine(config, policy, self.device, prompt, context, self.backends["actor"].whole)
        self.levels, self.val_levels, self.test_levels, is_unseen = levels_of_run(config)
        self.val_unseen = [unseen for unseen in is_unseen for _ in range(env.val_group_size)]

    # ------------------------------------------------------------------ the step

    def step(self) -> Step:
        """Train once, in the published order.

        0. Before the first step, validate the base policy.
        1. Roll out P x G episodes; the collapse diagnostics see them under the policy that played them.
        2. Drop the groups of little spread. Where none is left, nothing is trained.
        3. to 6. Make a batch, its values, its log-probs under the reference, and its advantages and returns.
        7. Update the critic. The gradient analysis comes after it, where it is due.
        8. Update the policy, and push its weights to the engine that samples.
        9. Validate, where it is due.
        """
        clock, phases, config = Clock(), Phases(self.device), self.config
        is_first = self.step_index == 0 and config.trainer.val_before_train
        base = self._validate(phases, "sampled", "greedy") if is_first else []  # 0
        self.step_index += 1
        due = due_at(self.step_index, config)
        with phases.timed("rollout"):
            episodes = self._collect()  # 1
        gap = self.engine.compare(episodes, self.step_index)
        collapse = self.diagnostics.collapse(self, episodes)
        selection = filter_episodes(episodes, config.filter, config.env.group_size)  # 2
        self.empty_in_a_row = 0 if selection.episodes else self.empty_in_a_row + 1
        ready = self._prepare_selected(selection, phases) if selection.episodes else None  # 3 to 6
        critic = self._update_critic(ready, phases) if ready and due.critic else None  # 7
        gradients = self._analyse(episodes, phases) if due.analysis else []
        policy = self._update_policy(ready, phases) if ready and due.policy else None  # 8
        update = self._end_update(ready, critic, policy, due, phases) if ready else None
        validation = self._validate(phases, "sampled") if ready and due.validation else []  # 9
        summary = summarise_batch(ready.batch, ready.targets, selection.episodes, due.values) if ready else None
        budget = self._count(episodes, policy, summary)
        record = StepRecord(
            summarise_collection(episodes, config.env.group_size), selection.decision, self.empty_in_a_row, budget,
            self.totals, self._measure(clock, phases, episodes, ready), gap and EngineGap(*gap), summary, update,
            summarise_validation(base, self.val_unseen), summarise_validation(validation, self.val_unseen), collapse,
        )  # fmt: skip
        return Step(record, [*base, *validation], gradients)

    def _collect(self) -> list[Episode]:
        levels = self.levels[self.step_index - 1]
        return self.roll_out(levels, self.config.env.group_size, stream(self.config.seed, "sampling", self.step_index))

    def roll_out(self, levels: Sequence[Level], group_size: int, draws: np.random.Generator) -> list[Episode]:
        """Training episodes: `group_size` of each level, in the levels' order."""
        return self._play(levels, group_size, self.config.rollout.temperature, draws, is_trained=True)

    def _play(
        self, levels: Sequence[Level], copies: int, temperature: float, draws: np.random.Generator,
        is_trained: bool = False,
    ) -> list[Episode]:  # fmt: skip
        """Every level `copies` times. Ranks play some each, with the draws that one rank alone would give them."""
        block = my_block(len(levels), self.world)
        mine = [levels[number] for number in block]
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

    def _prepare_selected(self, selection: Selection, phases: Phases) -> Prepared:
        draws = stream(self.config.seed, "duplicates", self.step_index)
        return self.prepare(selection.episodes, selection.groups, self.config.env.env_groups, draws, phases)

    def prepare(
        self, episodes: Sequence[Episode], groups_kept: int, groups: int, draws: np.random.Generator,
        phases: Phases | None = None,
    ) -> Prepared:  # fmt: skip
        """Values, reference log-probs and advantages of the episodes of `groups_kept` of `groups` groups."""
        config, phases = self.config, phases or Phases(self.device)
        batch = self._batch(episodes, groups, draws)  # 3 a multiple of the mini-batch
        with phases.timed("values"):
            values = self.values(batch)  # 4 critic
        with phases.timed("reference"):
            ref = self._reference(batch)  # 5 reference
        scale = filter_loss_scale(config.actor.filter_loss_scaling, groups_kept, groups)
        targets = make_targets(batch, values, ref, config.algorithm, self.kl_control.coef, scale)  # 6 advantages
        return Prepared(batch, targets, update_order(batch, config.actor.loss.keeps_groups))

    def _update_critic(self, ready: Prepared, phases: Phases) -> Meter:
        backend, config = self.backends["critic"], self.config
        critic = cast(Critic, backend.networks["critic"])
        with phases.timed("update_critic"):
            return update_critic(
                critic, backend, ready.batch, ready.targets, ready.order, config.critic, config.actor.loss_agg_mode
            )

    def _analyse(self, episodes: list[Episode], phases: Phases) -> list[Row]:
        with self.backends["actor"].whole(), phases.timed("gradient_analysis"):
            return self.diagnostics.gradients(self, episodes)

    def _update_policy(self, ready: Prepared, phases: Phases) -> Meter:
        with phases.timed("update_actor"):
            return self.actor_update().run(ready.batch, ready.targets, ready.order)

    def _end_update(
        self, ready: Prepared, critic: Meter | None, policy: Meter | None, due: Due, phases: Phases
    ) -> Update:
        """Check the new weights and push them; what the optimizer steps did.

        NonFiniteError where the run cannot go on.
        """
        meters = [meter for meter in (critic, policy) if meter is not None]
        skipped = sum(meter.skipped for meter in meters)
        self.nonfinite_in_a_row = self.nonfinite_in_a_row + 1 if skipped else 0
        names = [name for meter in meters for name in meter.nonfinite]
        broken = [name for backend in self.backends.values() for name in backend.bad_weights()]
        check_finite(self.step_index, self.nonfinite_in_a_row, self.config.trainer.nonfinite_patience, names, broken)
        with phases.timed("push"):
            self.engine.follow(self.step_index)
        means = {name: mean for meter in meters for name, mean in meter.means().items()}
        return Update(
            **means,
            nonfinite_updates=skipped,
            kl_in_reward_coef=self._move_kl_control(ready) if due.kl_control else None,
        )

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
        multiple = 1 if actor.loss.keeps_groups else math.lcm(groups, actor.ppo_mini_batch_size)
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

    def _move_kl_control(self, ready: Prepared) -> float:
        """The coefficient that the KL in the reward had in this step; it moves for the next."""
        batch, ref, config = ready.batch, ready.targets.ref_logprobs, self.config
        assert ref is not None
        coefficient = self.kl_control.coef
        measured = float(masked_mean(kl_estimate(batch.logprobs, ref, config.algorithm.kl_penalty), batch.mask))
        if not math.isfinite(measured):
            raise NonFiniteError(f"step {self.step_index} measured a KL in the reward that is not finite")
        self.kl_control = self.kl_control.updated(measured, len(batch.lengths))
        return coefficient

    # ------------------------------------------------------------------ evaluation

    def _validate(self, phases: Phases, *modes: str) -> list[Evaluation]:
        """All validation levels in each of `modes`."""
        with phases.timed("validation"):
            return [self.evaluate("val", mode) for mode in modes]

    def close(self) -> tuple[FinalEvaluation, list[Evaluation]]:
        """What is measured once, at the end of a run: greedy validation, and the test levels both ways."""
        clock = Clock()
        greedy = self.evaluate("val", "greedy")
        tests = [self.evaluate("test", mode) for mode in ("sampled", "greedy")] if self.test_levels else []
        test_success, test_greedy_success = [evaluation.success for evaluation in tests] or (None, None)
        seconds, cpu_seconds = clock.read()
        self.seconds_total += seconds
        final = FinalEvaluation(greedy.success, test_success, test_greedy_success, seconds, cpu_seconds)
        return final, [greedy, *tests]

    def evaluate(self, split: str, mode: str) -> Evaluation:
        """Play all levels of `split` (val, test) in `mode` (sampled, greedy); the policy is left alone."""
        levels, copies = (self.val_levels, self.config.env.val_group_size) if split == "val" else (self.test_levels, 1)
        purpose = "validation" if split == "val" else "test"
        temperature = self.config.rollout.val_temperature if mode == "sampled" else 0.0
        episodes = self._play(levels, copies, temperature, stream(self.config.seed, purpose, self.step_index))
        return summarise(episodes, self.step_index, split, mode, number_classes([level.key for level in levels]))

    # ------------------------------------------------------------------ accounts

    def _count(self, episodes: Sequence[Episode], policy: Meter | None, batch: BatchSummary | None) -> Budget:
        """What this step took; the totals of the run move with it."""
        budget = Budget(
            optimizer_steps=policy.optimizer_steps - policy.skipped if policy else 0,
            env_steps=sum(episode.actions for episode in episodes),
            sampled_tokens=sum(episode.response_tokens for episode in episodes),
            trained_tokens=batch.trained_tokens if batch else 0,
        )
        self.totals = self.totals.plus(budget)
        return budget

    def _measure(self, clock: Clock, phases: Phases, episodes: Sequence[Episode], ready: Prepared | None) -> Duration:
        """Seconds of the step and its phases, and how well they used the machine."""
        flops = {"rollout": rollout_flops(self.model.shape, episodes)}
        flops |= training_flops(self.model.shape, self.config, ready.batch) if ready else {}
        rate = matrix_rate(self.device.type, self.model.model.passes.dtype)
        shares = utilisation(flops, phases.seconds, rate * self.world.size)
        seconds, cpu_seconds = clock.read()
        self.seconds_total += seconds
        return Duration(phases.seconds, shares, rate, seconds, cpu_seconds, self.seconds_total)

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
            "totals": asdict(self.totals),
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
            totals = Budget(**{item.name: int(values["totals"][item.name]) for item in fields(Budget)})
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
