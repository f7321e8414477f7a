"""The PPO trainer. Its `step` makes one training step, with its parts in the order of the published code (RAGEN)."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from trainable.algo.batching import adjust_copy
from trainable.algo.filters import compute_filter_loss_scale
from trainable.algo.losses import adapt_entropy_coef, adapt_kl_coef, estimate_kl
from trainable.algo.reductions import masked_mean
from trainable.backend.host_swap import HostSwap
from trainable.backend.make import list_learning_rates, make_backends
from trainable.backend.meter import Meter, add_step, check_finite
from trainable.backend.torch_backend import select_below, set_learning_rates
from trainable.backend.world import SINGLE_PROCESS, World, compute_local_range, skip_child_seeds
from trainable.config.run_config import RunConfig
from trainable.config.sections import AlgorithmConfig
from trainable.config.seeds import PURPOSES, make_rng
from trainable.config.setting_types import flatten_settings
from trainable.envs.environment import Level
from trainable.envs.games.make import make_level_source
from trainable.envs.level_sets import make_run_levels
from trainable.files.step_phase import STEP_PHASE
from trainable.models.codec import Codec
from trainable.models.interface import LanguageModel, ValueModel
from trainable.models.load import Policy, check_fingerprint, pick_device, prepare_device
from trainable.models.networks import make_networks, move_reference
from trainable.ppo import phases
from trainable.ppo.evaluation import (
    Columns,
    Evaluation,
    estimate_mean_kl,
    make_evaluation,
    measure_episodes,
    number_classes,
    record_episode,
    record_trained_episodes,
    summarize_batch,
    summarize_rollout,
    summarize_validation,
)
from trainable.ppo.phases import PhaseTimer, StepPlan
from trainable.ppo.targets import PreparedBatch, Selection, filter_episodes, make_targets
from trainable.ppo.update import ActorUpdate, TokenFunction, compute_at_trained_tokens, update_critic
from trainable.rollout.engine import Engine, make_engines
from trainable.rollout.episode import Batch, Episode, collate, list_rollouts, make_update_order, replace_rollouts
from trainable.rollout.episode_loop import Branching, RolloutRequest, make_player
from trainable.rollout.sampler import SamplingParams
from trainable.runs.episode_lines import RecordedEpisode
from trainable.runs.failures import NonFiniteError
from trainable.runs.flat_state import check_shapes, get_shapes, get_trainable_parameters
from trainable.runs.records import SCHEDULE_COLUMNS
from trainable.runs.run_files import Row

SHARED_VALUE_WEIGHT = 0.01
"""Weight of the value loss on a shared trunk. Scores reach 10.9, so squared errors reach about 100, and would dwarf the
policy loss without a weight."""
BUDGET_COLUMNS = ("optimizer_steps", "env_steps", "sampled_tokens", "trained_tokens")
"""Filters change these numbers, so comparisons of filters must report them."""
MISMATCH_COLUMNS = ("engine_mismatch_mean", "engine_mismatch_max", "engine_kl", "engine_ess_fraction")
"""The columns of a `LogprobMismatch`."""


class StepOutput(NamedTuple):
    """The results of a step: its row, its evaluations, and the lines of its gradient analysis, if there was one.

    row: the columns that the step measured (`records.STEP_COLUMNS`). trained_episodes: some of the episodes that it
    trained on, as texts.
    """

    row: Row
    evaluations: list[Evaluation]
    gradients: list[Row]
    trained_episodes: list[RecordedEpisode]


class Diagnostics(NamedTuple):
    """Functions that measure a training step, without changing the weights or later samples.

    Both get the trainer and the episodes of the step. They are passed to the trainer instead of imported, because their
    modules import `trainable.ppo`.

    collapse: returns the columns of the collapse diagnostics, or none in steps in which they are not due. gradients:
    returns lines for gradients.jsonl, and is called only in steps with a gradient analysis.
    """

    collapse: Callable[["PPOTrainer", Sequence[Episode]], Mapping[str, float]] = lambda trainer, episodes: {}
    gradients: Callable[["PPOTrainer", list[Episode]], list[Row]] = lambda trainer, episodes: []


NO_DIAGNOSTICS = Diagnostics()


class PPOTrainer:
    """Trains one run. Owns its policy, critic, reference and levels. `step()` trains one step and returns its row.

    Every random number is a function of config.seed, its purpose and the step, so a trainer that is restored after step
    t continues exactly like one that was never interrupted.
    """

    def __init__(
        self, config: RunConfig, world: World = SINGLE_PROCESS, diagnostics: Diagnostics = NO_DIAGNOSTICS
    ) -> None:
        self.run_config, self.world, self.diagnostics = config, world, diagnostics
        self.step_index = self.consecutive_empty_steps = self.consecutive_nonfinite_steps = 0
        self.reference_step = 0
        self.device = pick_device(config.trainer.device, config.trainer.n_gpus_per_node)
        prepare_device(self.device, config.trainer.n_gpus_per_node)
        is_sharded = world.size > 1 and config.trainer.zero_stage == 3
        networks = make_networks(config, self.device, torch.device("cpu") if is_sharded else None)
        policy, self.reference = networks.policy, networks.reference
        self.critic, self.value_head = networks.critic, networks.value_head
        self.base_fingerprint, self.reference_fingerprint = networks.base_fingerprint, networks.reference_fingerprint
        self.model = policy.model
        self.codec, self.stop_token = Codec(policy.tokenizer), policy.stop_token
        self.other_stop_tokens = policy.other_stop_tokens
        self.backends = make_backends(config, world, self.model, self.value_head, self.critic)
        swaps_reference = config.trainer.swap_to_host and networks.has_own_reference
        self._reference_swap = HostSwap(
            cast(nn.Module, self.reference).parameters if swaps_reference else list, self.device
        )
        self.kl_coef = config.algorithm.kl_ctrl.kl_coef
        # For each setting with a controller, the coefficient that it adapts, and the value in the loss of the next
        # step, which differ for an entropy above the target.
        self.coefficients = {
            name: (controller.numbers.get("min", controller.compute_value(1)), controller.compute_value(1))
            for name, controller in config.controllers.items()
        }
        self.seconds_total = 0.0
        # The collapse diagnostics read and replace these. They are kept here so that checkpoints include them.
        self.collapse_averages: Mapping[str, Mapping[str, float]] = {}
        self.total_budget = dict.fromkeys(BUDGET_COLUMNS, 0)
        self._set_up_environment(policy)

    @property
    def config(self) -> RunConfig:
        """The settings of the current step; before the first step, of step 1."""
        return self.run_config.at_step(self.step_index, {name: pair[1] for name, pair in self.coefficients.items()})

    def _set_up_environment(self, policy: Policy) -> None:
        """Make the game, its prompts and limits, the engine, and the levels of all steps."""
        config, env = self.config, self.config.env
        self.level_source = make_level_source(env)
        model_context = self.model.shape.max_position_embeddings
        # The setting can only shorten the model's context.
        context = min(model_context, config.rollout.max_model_len or model_context)
        self.player = make_player(config, policy, self.codec, context)
        run_levels = make_run_levels(self.level_source, config)
        self.levels, self.refill_levels, self.val_levels, self.test_levels, is_unseen = run_levels
        # Check before starting an engine for settings that cannot work.
        all_levels = [*self.val_levels, *self.test_levels, *chain(*self.levels, *self.refill_levels)]
        self.player.check_first_turns(all_levels, config.rollout.response_length)
        # The engine needs a fixed prompt on which to compare log-probs. Any level will do.
        prompt = self.player.encode_first_turn(self.val_levels[0])
        gather_weights = self.backends["actor"].gather_weights
        engines = make_engines(config, policy, self.device, prompt, context, gather_weights)
        self.engine, self.evaluation_engine = engines
        # Evaluations have one entry per episode, with the rollouts of a level next to each other.
        self.is_val_unseen = [unseen for unseen in is_unseen for _ in range(env.val_group_size)]

    # ------------------------------------------------------------------ the step

    def step(self, before_update: Callable[[], None] = lambda: None) -> StepOutput:
        """Train one step, in the published order. Comments in the code refer to the numbers of this list.

        0. Before the first step, validate the base policy.
        1. Roll out P x G episodes, and compute the collapse diagnostics with the policy that sampled them.
        2. Filter the groups by their scores, and sample further groups for those that it drops, if the settings say so.
           If the filter keeps no group, or the losses leave out all episodes, there is no batch to train on.
        3. to 6. Make a batch, its values, its reference log-probs, and its advantages and returns.
        7. Update the critic. Analyze gradients now if due, since they are of the policy that sampled the episodes.
        8. Update the policy, and sync its weights to the sampling engine.
        9. Validate if due. Then move the reference to the policy if due.

        before_update: called before 7, which first changes the tensors that `get_state` returned.

        A step without a batch has a row, and a validation if due, but no updates. Raises NonFiniteError if the run
        cannot continue (see `check_finite`), and EngineMismatchError if the engine's log-probs differ after a sync.
        """
        timer = PhaseTimer(self.device)
        # A restored trainer is past step 0, so each run has the base policy's validation once.
        is_first = self.step_index == 0 and self.config.trainer.val_before_train
        base_evaluations = self._validate(timer, "sampled", "greedy") if is_first else []  # 0
        # After the validation, which belongs to step 0.
        self.step_index += 1
        config = self.config
        scheduled_values = self._apply_schedules()
        plan = phases.plan_step(self.step_index, config)
        with timer.measure("rollout"), add_step(f"in step {self.step_index}"):
            episodes = self._collect_episodes()  # 1
        # Before anything that uses the episodes, since the run ends here if a log-prob is not finite.
        mismatch = self.engine.measure_mismatch(list_rollouts(episodes), self.step_index)
        prompt_mismatch = self.engine.prompt_mismatch  # of the sampling weights, until the sync below replaces it
        collapse = self.diagnostics.collapse(self, episodes)
        with add_step(f"in step {self.step_index}"):
            selection = filter_episodes(episodes, config.filter, config.env.group_size)  # 2
            further_batches = list(self._refill(selection, timer))
        for further_episodes, further_selection in further_batches:
            first_group = len(selection.is_kept)
            episodes = [*episodes, *(e._replace(group=e.group + first_group) for e in further_episodes)]
            selection = selection.extend(further_selection, config.env.env_groups)
        if further_batches:
            mismatch = self.engine.measure_mismatch(list_rollouts(episodes), self.step_index)
        self.consecutive_empty_steps = self.consecutive_empty_steps + 1 if selection.is_empty else 0
        prepared = None if selection.is_empty else self._prepare_selected(selection, timer)  # 3 to 6
        if prepared:
            before_update()
        critic_meter = self._update_critic(prepared, timer) if prepared and plan.critic else None  # 7
        gradients = self._analyze_gradients(episodes, timer) if plan.analysis else []
        policy_meter = self._update_policy(prepared, timer) if prepared and plan.policy else None  # 8
        update = self._end_update(prepared, critic_meter, policy_meter, plan, timer) if prepared else {}
        evaluations = self._validate(timer, "sampled") if plan.validation else []  # 9
        batch_columns, trained_episodes = Columns(), list[RecordedEpisode]()
        if prepared:
            batch, targets, rollouts = prepared.batch, prepared.targets, list_rollouts(selection.episodes)
            batch_columns = summarize_batch(batch, targets, rollouts, plan.values, config.rollout.has_entropies)
            num_recorded = config.trainer.log_train_generations if plan.validation else 0
            trained_episodes = record_trained_episodes(
                selection.episodes, prepared, num_recorded, self.step_index, self.codec, self._tree_settings
            )
        reference_step, reset_kl = self.reference_step, config.trainer.ref_model_reset_kl
        is_reset = reset_kl is not None and (batch_columns.get("kl_to_reference") or 0) > reset_kl
        if plan.reference or is_reset:
            if not prepared:
                before_update()
            self._move_reference(1.0 if is_reset else config.trainer.ref_model_mixup_alpha, timer)
        if plan.policy:
            self._adapt_coefficients(batch_columns)
        masked_episodes = sum(episode.is_masked for episode in selection.episodes)
        base_columns = summarize_validation(base_evaluations, self.is_val_unseen)
        budget = self._count_budget(episodes, policy_meter, prepared)
        columns: Columns = {
            "consecutive_empty_steps": self.consecutive_empty_steps,
            "reference_step": reference_step if config.syncs_reference else None,
            **scheduled_values,
            **update,
            **collapse,
            **self._collect_measures(episodes, base_evaluations, evaluations),
            **summarize_rollout(episodes, config.env.group_size),
            "engine_prompt_mismatch": prompt_mismatch,
            **dict(zip(MISMATCH_COLUMNS, mismatch or (), strict=False)),
            **selection.columns,
            "masked_episodes": masked_episodes if config.filter.masks_episodes else None,
            "gen_batches": 1 + len(further_batches) if config.further_batches else None,
            "train_shared_tokens": 1 - budget["sampled_tokens"] / sum(episode.response_tokens for episode in episodes)
            if config.rollout.ts_n
            else None,
            **batch_columns,
            **summarize_validation(evaluations, self.is_val_unseen),
            **budget,
            **{f"total_{name}": number for name, number in self.total_budget.items()},
            **{f"base_{name}": number for name, number in base_columns.items()},
            **self._measure_timing(timer, episodes, prepared),
            "tokens_per_second": budget["sampled_tokens"] / timer.seconds["rollout"],
        }
        row = {name: number for name, number in columns.items() if number is not None}
        return StepOutput(row, [*base_evaluations, *evaluations], gradients, trained_episodes)

    def _apply_schedules(self) -> dict[str, float]:
        """Set what was made of settings with schedules to their values in the current step, and return these values.

        Everything else reads the settings from `config` when it uses them.
        """
        config = self.config
        if self.run_config.schedules:
            for name, rates in list_learning_rates(config).items():
                if name in self.backends:
                    set_learning_rates(self.backends[name].optimizer, rates)
        if config.algorithm.kl_ctrl.type == "fixed":
            self.kl_coef = config.algorithm.kl_ctrl.kl_coef
        return {SCHEDULE_COLUMNS[name].name: attrgetter(name)(config) for name in self.run_config.schedules}

    @property
    def _tree_settings(self) -> AlgorithmConfig | None:
        """How to weight the turns of a tree, or None in a game without trees."""
        return self.config.algorithm if self.config.env.kind.has_trees else None

    def _collect_measures(
        self, episodes: Sequence[Episode], base_evaluations: Sequence[Evaluation], evaluations: Sequence[Evaluation]
    ) -> dict[str, float]:
        """Collect the columns of the game's measures, in training and in the sampled evaluation of each validation."""
        measures_by_prefix = {
            "train": measure_episodes(self.level_source, list(chain(*self._list_step_batches())), episodes),
            "base_val": base_evaluations[0].measures if base_evaluations else {},
            "val": evaluations[0].measures if evaluations else {},
        }
        return {
            f"{prefix}_{name}": mean
            for prefix, measures in measures_by_prefix.items()
            for name, mean in measures.items()
        }

    def _list_step_batches(self) -> list[list[Level]]:
        """List the batches of levels that the current step may sample, in their order."""
        count = self.config.further_batches
        first = (self.step_index - 1) * count
        return [self.levels[self.step_index - 1], *self.refill_levels[first : first + count]]

    def _refill(self, selection: Selection, timer: PhaseTimer) -> Iterator[tuple[list[Episode], Selection]]:
        """Sample and filter further batches of levels until env.env_groups groups have passed the filter."""
        env, groups_kept = self.config.env, selection.groups_kept
        for number, levels in enumerate(self._list_step_batches()[1:], 1):
            if groups_kept >= env.env_groups:
                return
            with timer.measure("rollout"):
                episodes = self.roll_out(levels, env.group_size, "sampling", number)
            further_selection = filter_episodes(episodes, self.config.filter, env.group_size)
            groups_kept += further_selection.groups_kept
            yield episodes, further_selection

    def _collect_episodes(self) -> list[Episode]:
        """Roll out the training levels of the current step."""
        return self.roll_out(self.levels[self.step_index - 1], self.config.env.group_size, "sampling")

    def roll_out(self, levels: Sequence[Level], group_size: int, purpose: str, *indices: int) -> list[Episode]:
        """Sample training episodes: `group_size` per level, in the order of the levels. With rollout.ts_n they branch.

        purpose, indices: select the random stream in `make_rng`, together with the step.
        """
        rollout = self.config.rollout
        rng = make_rng(self.config.seed, "branches", PURPOSES[purpose], self.step_index, *indices)
        return self._roll_out_levels(
            self.engine,
            levels,
            group_size,
            rollout.temperature,
            purpose,
            *indices,
            has_passes_next=True,
            recomputes_logprobs=rollout.recompute_logprobs,
            branching=Branching(rollout.ts_n, rollout.ts_l, rng) if rollout.ts_n else None,
        )

    def _roll_out_levels(
        self,
        engine: Engine,
        levels: Sequence[Level],
        group_size: int,
        temperature: float,
        purpose: str,
        *indices: int,
        has_passes_next: bool,
        recomputes_logprobs: bool,
        branching: Branching | None = None,
    ) -> list[Episode]:
        """Roll out every level `group_size` times, and return the episodes of all ranks in the order of the levels.

        Each rank plays some of the levels, with the same random numbers as a single rank would draw.
        has_passes_next: whether the trainer's passes over the episodes come next, and need the memory of the engine.
        recomputes_logprobs: whether to replace the engine's log-probs of the episodes by the trainer's.
        """
        local_range = compute_local_range(len(levels), self.world)
        local_levels = [levels[number] for number in local_range]
        # A sampler spawns one child generator per episode. Skip the generators of episodes that lower ranks play.
        rng = make_rng(self.config.seed, purpose, self.step_index, *indices)
        rng = skip_child_seeds(rng, local_range.start * group_size)
        # The environment has a separate stream, so that its randomness never depends on what was sampled.
        luck_rng = make_rng(self.config.seed, "environment", PURPOSES[purpose], self.step_index, *indices)
        length = self.config.rollout.response_length
        sampling_params = SamplingParams(temperature, length, self.stop_token, self.other_stop_tokens)
        episodes: list[Episode] = []
        with engine.wake_up():  # even on a rank without levels, since all ranks must gather weights
            # With more ranks than levels, some ranks have none, and a sampler needs at least one prompt.
            if local_levels:
                request = RolloutRequest(
                    local_levels,
                    group_size,
                    engine.sampler,
                    sampling_params,
                    rng,
                    luck_rng,
                    first_episode=local_range.start * group_size,
                    num_episodes=len(levels) * group_size,
                    branching=branching,
                )
                episodes = self.player.roll_out(request)
        if has_passes_next:  # otherwise another rollout follows
            engine.sleep()
        if recomputes_logprobs:
            rollouts = engine.recompute_logprobs(list_rollouts(episodes), temperature)
            episodes = replace_rollouts(episodes, rollouts)
        # Every rank numbers its groups from 0: make the numbers unique.
        local_episodes = [episode._replace(group=episode.group + local_range.start) for episode in episodes]
        return list(chain.from_iterable(self.world.all_gather_object(local_episodes)))

    def _prepare_selected(self, selection: Selection, timer: PhaseTimer) -> PreparedBatch:
        """Make the batch of the current step from the selected groups."""
        rng, groups_kept = make_rng(self.config.seed, "duplicates", self.step_index), selection.groups_kept
        return self.prepare_batch(selection.episodes, groups_kept, self.config.env.env_groups, rng, timer)

    def prepare_batch(
        self,
        episodes: Sequence[Episode],
        groups_kept: int,
        num_groups: int,
        rng: np.random.Generator,
        timer: PhaseTimer | None = None,
    ) -> PreparedBatch:
        """Make a batch of episodes with values, reference log-probs and advantages.

        episodes: the episodes of the groups that the filter kept. groups_kept, num_groups: number of groups after and
        before the filter, for actor.filter_loss_scaling. rng: draws the episodes to copy to fill the last mini-batch.
        timer: measures the phases; None if their times are not reported.
        """
        config, timer = self.config, timer or PhaseTimer(self.device)
        # The numbers refer to the docstring of `step`.
        batch = self._make_batch(episodes, num_groups, rng)  # 3
        with timer.measure("values"):
            values = self.compute_values(batch)  # 4
        with timer.measure("reference"):
            ref_logprobs = (
                self._compute_reference_logprobs(batch, config.rollout.temperature)
                if config.trains_with_reference
                else None
            )  # 5
        filter_scale = compute_filter_loss_scale(config.actor.filter_loss_scaling, groups_kept, num_groups)
        targets = make_targets(
            batch, values, ref_logprobs, config.algorithm, self.kl_coef, filter_scale, config.env.kind.has_trees
        )  # 6
        # Only now, so that masked episodes count in the advantages of their groups.
        batch = batch._replace(mask=batch.mask & ~batch.is_masked)
        return PreparedBatch(batch, targets, make_update_order(batch, config.actor.loss.needs_whole_groups))

    def _update_critic(self, prepared: PreparedBatch, timer: PhaseTimer) -> Meter:
        backend, mode = self.backends["critic"], self.config.actor.loss_agg_mode
        critic = cast(ValueModel, backend.networks["critic"])
        with timer.measure("update_critic"):
            return update_critic(critic, backend, *prepared, self.config.critic, mode)

    def _analyze_gradients(self, episodes: list[Episode], timer: PhaseTimer) -> list[Row]:
        # Ranks analyze different mini-batches with different numbers of passes, so each needs all weights.
        actor = self.backends["actor"]
        with actor.gather_weights(), self._load_reference_for_loss(), timer.measure("gradient_analysis"):
            return self.diagnostics.gradients(self, episodes)

    def _update_policy(self, prepared: PreparedBatch, timer: PhaseTimer) -> Meter:
        with timer.measure("update_actor"), self._load_reference_for_loss():
            return self.make_actor_update().run(*prepared)

    def _end_update(
        self,
        prepared: PreparedBatch,
        critic_meter: Meter | None,
        policy_meter: Meter | None,
        plan: StepPlan,
        timer: PhaseTimer,
    ) -> dict[str, float | None]:
        """Check the new weights, sync them to the engine, and summarize the optimizer steps (for errors see `step`)."""
        meters = [meter for meter in (critic_meter, policy_meter) if meter is not None]
        skipped_steps = sum(meter.skipped_steps for meter in meters)
        # A single bad batch may be an accident, but after several in a row, the run cannot recover.
        self.consecutive_nonfinite_steps = self.consecutive_nonfinite_steps + 1 if skipped_steps else 0
        nonfinite_names = [name for meter in meters for name in meter.nonfinite_names]
        nonfinite_weights = [name for backend in self.backends.values() for name in backend.find_nonfinite_weights()]
        # Before the sync, so that the engine never gets non-finite weights.
        check_finite(
            self.step_index,
            self.consecutive_nonfinite_steps,
            self.config.trainer.nonfinite_patience,
            nonfinite_names,
            nonfinite_weights,
        )
        with timer.measure("sync_weights"):
            self.engine.sync_weights(self.step_index)
        means = {name: mean for meter in meters for name, mean in meter.compute_means().items()}
        coefficient = self._update_kl_coef(prepared) if plan.kl_control else None
        return {**means, "nonfinite_updates": skipped_steps, "kl_in_reward_coef": coefficient}

    def make_actor_update(self) -> ActorUpdate:
        """Make the update of the policy, with its losses and its optimizer."""
        backend = self.backends["actor"]
        return ActorUpdate(
            cast(LanguageModel, backend.networks["actor"]),
            backend,
            self.config.actor,
            self.config.rollout.temperature,
            self.reference,
            backend.networks.get("head"),
            SHARED_VALUE_WEIGHT,  # only read with a value head on the trunk
            self.config.critic.cliprange_value,
        )

    def _make_batch(self, episodes: Sequence[Episode], num_groups: int, rng: np.random.Generator) -> Batch:
        """Collate episodes into a batch, with random copies that fill it up (`RunConfig.compute_batch_multiple`)."""
        if not self.config.algorithm.train_children:
            episodes = [episode._replace(children=()) for episode in episodes]
        generator = torch.Generator().manual_seed(int(rng.integers(2**62)))  # a seed that fits a signed 64-bit integer
        index = adjust_copy(len(episodes), self.config.compute_batch_multiple(num_groups), generator)
        return collate([episodes[number] for number in index.tolist()]).to(self.device)

    def compute_values(self, batch: Batch) -> Tensor | None:
        """Compute the critic's values (B, T) at the trained tokens, without gradients. None without a critic."""
        rows_per_pass = self.config.rollout.log_prob_micro_batch_size_per_gpu
        if self.critic is not None:
            value_function = TokenFunction(self.critic.model, self.critic.score)
        elif self.value_head is not None:
            value_function = TokenFunction(self.model.model, self.value_head)
        else:
            return None
        # A value head on a shared trunk belongs to the policy's backend.
        with self.backends["actor" if self.critic is None else "critic"].gather_weights():
            return compute_at_trained_tokens(batch, rows_per_pass, value_function, self.world)

    def _compute_reference_logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """Compute the reference's log-probs (B, T) of the tokens, which were sampled at `temperature`."""
        assert self.reference is not None  # the configuration needs a reference
        logprob_function = TokenFunction.for_logprobs(self.reference, temperature)
        rows_per_pass = self.config.rollout.ref_log_prob_micro_batch_size_per_gpu
        with self._reference_swap.load(has_changed=False):
            return compute_at_trained_tokens(batch, rows_per_pass, logprob_function, self.world)

    def _load_reference_for_loss(self) -> AbstractContextManager[None]:
        """Move the reference to the device if the policy loss reads it, as only the exact KL does."""
        reads_reference = self.config.actor.reads_reference_distribution
        return self._reference_swap.load(has_changed=False) if reads_reference else nullcontext()

    def _list_reference_weights(self) -> dict[str, tuple[Tensor, Tensor]]:
        """List the weights in which reference and policy may differ by name, if the reference moves: pairs of both."""
        if not self.run_config.syncs_reference:
            return {}
        reference_weights = dict(cast(nn.Module, self.reference).named_parameters())
        return {name: (reference_weights[name], weight) for name, weight in get_trainable_parameters(self.model)}

    def _move_reference(self, alpha: float, timer: PhaseTimer) -> None:
        """Move the reference to the policy if alpha is 1, or else towards it. Reset the optimizer if it is due."""
        is_loaded = self._reference_swap.load(has_changed=True)
        with timer.measure("reference"), self.backends["actor"].gather_weights(), is_loaded:
            reference_weights, policy_weights = zip(*self._list_reference_weights().values(), strict=True)
            move_reference(reference_weights, policy_weights, alpha)
        self.reference_step = self.step_index
        if alpha == 1 and self.config.trainer.ref_model_reset_optimizer:
            self.backends["actor"].reset_moments()

    def _adapt_coefficients(self, columns: Columns) -> None:
        """Adapt coefficients with controllers to what a step has measured. columns: empty in a step without a batch."""
        for name, controller in self.run_config.controllers.items():
            column = "entropy" if controller.kind == "target_entropy" else "kl_to_reference"
            (coef, _), measured, numbers = self.coefficients[name], columns.get(column), controller.numbers
            if measured is None:
                continue
            if controller.kind == "target_entropy":
                bounds = numbers["delta"], numbers["min"], numbers["max"]
                coef = adapt_entropy_coef(coef, measured, controller.target, *bounds)
                value = coef if measured <= controller.target else 0.0
            else:
                batch_size = int(columns["batch_size"] or 0)
                value = coef = adapt_kl_coef(coef, measured, controller.target, batch_size, numbers["horizon"])
            # A new dict, since the old one may belong to a state that is still being written.
            self.coefficients = {**self.coefficients, name: (coef, value)}

    def _update_kl_coef(self, prepared: PreparedBatch) -> float:
        """Adapt the coefficient of the KL in the reward for the next step, and return the coefficient of this step."""
        batch, ref_logprobs, config = prepared.batch, prepared.targets.ref_logprobs, self.config
        assert ref_logprobs is not None  # a run with a KL in the reward has a reference
        coefficient, control = self.kl_coef, config.algorithm.kl_ctrl
        measured_kl = float(
            masked_mean(estimate_kl(batch.logprobs, ref_logprobs, config.algorithm.kl_penalty), batch.mask)
        )
        # An adaptive coefficient would become NaN, and so would the rewards of all later steps.
        if not math.isfinite(measured_kl):
            raise NonFiniteError(f"the KL in the reward was not finite in step {self.step_index}")
        if control.type == "adaptive":
            self.kl_coef = adapt_kl_coef(
                coefficient, measured_kl, control.target_kl, len(batch.lengths), control.horizon
            )
        return coefficient

    # ------------------------------------------------------------------ evaluation

    def _validate(self, timer: PhaseTimer, *modes: str) -> list[Evaluation]:
        """Evaluate all validation levels in each of `modes`."""
        with timer.measure("validation"):
            return [self.evaluate("val", mode) for mode in modes]

    def evaluate_final(self, row: Row | None = None) -> tuple[Row, list[Evaluation]]:
        """Evaluate at the end of a run: validation levels greedy, and test levels both sampled and greedy.

        Sampled validations are part of the training steps (see `plan_step`). row: the last row of the run. Returns it
        with the results, and with the time of the evaluation, which counts as validation.
        """
        timer, row = PhaseTimer(self.device), row or {}
        STEP_PHASE.enter("final evaluation")
        greedy_evaluation = self.evaluate("val", "greedy")
        test_evaluations = [self.evaluate("test", mode) for mode in ("sampled", "greedy")] if self.test_levels else []
        test_success, test_greedy_success = [evaluation.success for evaluation in test_evaluations] or (None, None)
        seconds, cpu_seconds = timer.read()
        self.seconds_total += seconds
        added_times = dict.fromkeys(("seconds_validation", "seconds_step", "seconds_total"), seconds)
        final_row = {
            **row,
            "val_greedy_success": greedy_evaluation.success,
            "test_success": test_success,
            "test_greedy_success": test_greedy_success,
            # The last step may have had no validation.
            **{name: row.get(name, 0.0) + time for name, time in added_times.items()},
            "cpu_seconds_step": row.get("cpu_seconds_step", 0.0) + cpu_seconds,
        }
        return final_row, [greedy_evaluation, *test_evaluations]

    def evaluate(self, split: str, mode: str) -> Evaluation:
        """Roll out all levels of `split` (val, test) in `mode` (sampled, greedy), without training.

        Validation levels are played env.val_group_size times, test levels once. With trainer.measure_val_kl, a sampled
        validation also measures the KL to the reference over the same episodes. With trainer.log_val_generations, it
        also records the text of one rollout of each of the first levels.
        """
        levels, group_size, purpose = {
            "val": (self.val_levels, self.config.env.val_group_size, "validation"),
            "test": (self.test_levels, 1, "test"),
        }[split]
        temperature = {"sampled": self.config.rollout.val_temperature, "greedy": 0.0}[mode]
        is_sampled_validation = (split, mode) == ("val", "sampled")
        with add_step(f"in the {purpose} after step {self.step_index}"):
            # Before training, the policy equals the reference, unless a reference model is set.
            has_moved = self.step_index > 0 or self.config.model.reference_path is not None
            measures_kl = self.config.measures_val_kl and is_sampled_validation and has_moved
            episodes = self._roll_out_levels(
                self.evaluation_engine,
                levels,
                group_size,
                temperature,
                purpose,
                has_passes_next=measures_kl,
                recomputes_logprobs=measures_kl,
            )
        evaluation = make_evaluation(
            episodes, self.step_index, split, mode, number_classes([level.key for level in levels])
        )
        kl = None
        if measures_kl:
            batch = collate(episodes).to(self.device)
            kl = estimate_mean_kl(batch, self._compute_reference_logprobs(batch, temperature))
        recorded_levels = self.config.trainer.log_val_generations if is_sampled_validation else 0
        return evaluation._replace(
            kl_to_reference=kl,
            measures=measure_episodes(self.level_source, levels, episodes),
            episodes=tuple(
                record_episode(episode, self.step_index, self.codec, self._tree_settings)
                for episode in episodes[: recorded_levels * group_size : group_size]
            ),
        )

    # ------------------------------------------------------------------ budget and timing

    def _count_budget(
        self, episodes: Sequence[Episode], policy_meter: Meter | None, prepared: PreparedBatch | None
    ) -> dict[str, int]:
        """Count the BUDGET_COLUMNS of this step, and add them to the totals of the run."""
        numbers = (
            policy_meter.optimizer_steps - policy_meter.skipped_steps if policy_meter else 0,
            sum(len(actions) for episode in episodes for actions in episode.turn_actions[episode.prefix_turns :]),
            sum(int(rollout.suffix_mask.sum()) for rollout in list_rollouts(episodes)),
            # Including copies of episodes in the batch, since they are trained on.
            int(prepared.batch.mask.sum()) if prepared else 0,
        )
        budget = dict(zip(BUDGET_COLUMNS, numbers, strict=True))
        self.total_budget = {name: number + budget[name] for name, number in self.total_budget.items()}
        return budget

    def _measure_timing(
        self, timer: PhaseTimer, episodes: Sequence[Episode], prepared: PreparedBatch | None
    ) -> dict[str, float]:
        """Measure seconds and MFU of the step's phases, and add the seconds of the step to the total of the run.

        Phases that did not run have no columns.
        """
        flops = {"rollout": phases.estimate_rollout_flops(self.model.shape, list_rollouts(episodes))}
        flops |= phases.estimate_training_flops(self.model.shape, self.config, prepared.batch) if prepared else {}
        peak_flops_per_s = phases.measure_peak_flops(self.device.type, self.model.model.pass_settings.dtype)
        # FLOP are summed over all ranks, so the peak must be, too. Phases without seconds did not run in this step.
        mfu = {
            phase: flop_count / timer.seconds[phase] / (peak_flops_per_s * self.world.size)
            for phase, flop_count in flops.items()
            if timer.seconds.get(phase)
        }
        seconds, cpu_seconds = timer.read()
        self.seconds_total += seconds
        return {
            **{f"seconds_{phase}": phase_seconds for phase, phase_seconds in timer.seconds.items()},
            **{f"mfu_{phase}": fraction for phase, fraction in mfu.items()},
            "peak_flops_per_s": peak_flops_per_s,
            "seconds_step": seconds,
            "cpu_seconds_step": cpu_seconds,
            "seconds_total": self.seconds_total,
        }

    def close(self) -> None:
        """Close the engine. Afterwards, the trainer cannot sample."""
        self.engine.close()

    # ------------------------------------------------------------------ state

    def get_state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Return everything that the next step depends on: tensors by name, and JSON values.

        A reference that never moves is left out, since it can be loaded again. The tensors are live: write or clone
        them before the next step.
        """
        tensors = {name: value for backend in self.backends.values() for name, value in backend.state_dict().items()}
        tensors |= {f"reference/{name}": weight for name, (weight, _) in self._list_reference_weights().items()}
        return tensors, {
            "step": self.step_index,
            "empty_in_a_row": self.consecutive_empty_steps,
            "nonfinite_in_a_row": self.consecutive_nonfinite_steps,
            "synced_step": self.engine.synced_step,
            "seconds_total": self.seconds_total,
            "totals": self.total_budget,
            "kl_coef": self.kl_coef,
            "collapse_averages": self.collapse_averages,
            # Adapters fit only the base on which they were trained. Full weights need no base.
            **({} if self.base_fingerprint is None else {"base": self.base_fingerprint}),
            **({"coefficients": self.coefficients} if self.coefficients else {}),
            **({"reference_step": self.reference_step} if self.run_config.syncs_reference else {}),
            # With another teacher, it would be another run.
            **({} if self.reference_fingerprint is None else {"reference": self.reference_fingerprint}),
        }

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Continue from a state that `get_state` returned.

        Raises ValueError, before anything is changed, if the state does not fit this trainer.
        """
        check_fingerprint("base", values.get("base"), self.base_fingerprint)
        check_fingerprint("reference", values.get("reference"), self.reference_fingerprint)
        for backend in self.backends.values():
            backend.check_state_shapes(get_shapes(tensors))
        # A probe may need a reference in a run that had none, and starts with the initial one.
        reference_weights = self._list_reference_weights() if "reference_step" in values else {}
        reference_shapes = {name: weight.shape for name, (weight, _) in reference_weights.items()}
        check_shapes("reference", reference_shapes, select_below("reference", get_shapes(tensors)))
        # Read and convert everything before loading anything, so that a refused state changes nothing.
        try:
            step, empty_steps, nonfinite_steps = (
                int(values[key]) for key in ("step", "empty_in_a_row", "nonfinite_in_a_row")
            )
            synced_step = int(values.get("synced_step", step))  # older states lack it
            seconds, coef = float(values["seconds_total"]), float(values["kl_coef"])
            reference_step = int(values.get("reference_step", 0))
            # A coefficient that a controller has adapted belongs to the controller: a state of a run with another value
            # of the setting has none for this run.
            settings = flatten_settings(self.run_config.model_dump(mode="json"))
            changed = {
                name
                for name, value in flatten_settings(values.get("settings", {})).items()
                if name in settings and settings[name] != value
            }
            if any(name.startswith("algorithm.kl_ctrl.") for name in changed):
                coef = self.kl_coef
            saved_coefficients = {
                name: pair for name, pair in values.get("coefficients", {}).items() if name not in changed
            }
            coefficients = {
                name: (float(coef), float(value))
                for name, (coef, value) in (self.coefficients | saved_coefficients).items()
                if name in self.coefficients
            }
            total_budget = {name: int(values["totals"][name]) for name in BUDGET_COLUMNS}
            averages = {
                label: {name: float(std) for name, std in stds.items()}
                for label, stds in values["collapse_averages"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:  # a missing entry, or one of another type
            raise ValueError(f"its values do not fit ({type(error).__name__}: {error})") from error
        for backend in self.backends.values():
            backend.load_state_dict(tensors)
        with self._reference_swap.load(has_changed=True):
            for name, (weight, _) in reference_weights.items():
                weight.copy_(tensors[f"reference/{name}"])
        self.step_index, self.reference_step = step, reference_step
        self.consecutive_empty_steps, self.consecutive_nonfinite_steps = empty_steps, nonfinite_steps
        self.seconds_total, self.total_budget, self.collapse_averages = seconds, total_budget, averages
        self.kl_coef, self.coefficients = coef, coefficients
        # An engine with its own copy still has the weights of the base model.
        self.engine.sync_weights(synced_step)
