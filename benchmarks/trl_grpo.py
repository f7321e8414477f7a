"""Compare our GRPO with TRL's: CPU seconds per 1,000 trained tokens, at the same shapes. Prints a JSON object.

One batch is 8 prompts of exactly 100 tokens x 16 completions of exactly 45 tokens. They are generated and then trained
on in 4 optimizer steps of 32 rows, so 18,560 tokens pass through the model in training. Both use sokoban-tiny in
float32 on one thread, without KL; ours runs in compiled code, as with the preset laptop, and in torch. Otherwise TRL
has its defaults, except for gradient checkpointing and bf16, which are slower here. Assertions check the lengths.
Run: python benchmarks/trl_grpo.py [--repetitions 6]
"""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise

import numpy as np
import torch
from datasets import Dataset
from machine import describe
from options import make_parser, parse_count
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trainable.algo.advantages import grpo
from trainable.backend.torch_backend import TorchBackend
from trainable.config.sections import ActorConfig
from trainable.config.seeds import make_rng
from trainable.models.interface import PassSettings
from trainable.models.load import find_model, load_policy
from trainable.models.qwen2 import Qwen2
from trainable.ppo.update import ActorUpdate, Targets
from trainable.rollout.compiled_sampler import CompiledSampler
from trainable.rollout.episode import Batch, Episode, StopReason, collate
from trainable.rollout.sampler import SampledReply, SamplingParams
from trainable.rollout.torch_sampler import TorchSampler

NUM_PROMPTS, GROUP_SIZE, PROMPT_LENGTH, COMPLETION_LENGTH, MINI_BATCH_SIZE = 8, 16, 100, 45, 32
ROWS = NUM_PROMPTS * GROUP_SIZE
TOKENS_PER_BATCH = ROWS * (PROMPT_LENGTH + COMPLETION_LENGTH)
NO_STOP_TOKEN = -1  # a stop token that no vocabulary has: every completion has its full length


def make_prompt_texts(count: int) -> list[str]:
    """Texts of exactly PROMPT_LENGTH tokens; two cells of a level are one token."""
    rng = np.random.default_rng(0)
    return ["".join(rng.choice(["##", "#_", "_#", "__"], PROMPT_LENGTH)) for _ in range(count)]


def compute_score(row: int) -> float:
    """An arbitrary score, the same for both implementations."""
    # Multiples of a prime modulo 13: the rows of a group have different scores, so no advantage is 0 throughout.
    return float(row * 7919 % 13)


def time_our_batches(prompt_ids: Sequence[list[int]], batches: int, *, is_compiled: bool) -> list[float]:
    """CPU seconds of each batch with our sampler and update, after one batch that is not timed."""
    policy = load_policy("sokoban-tiny", torch.device("cpu"))
    assert isinstance(policy.model, Qwen2)
    policy.model.model.pass_settings = PassSettings(compiled=is_compiled)
    sampler = CompiledSampler(policy.model) if is_compiled else TorchSampler(policy.model)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-6)  # the rate of the TRL run below
    settings = ActorConfig(ppo_mini_batch_size=MINI_BATCH_SIZE, ppo_micro_batch_size_per_gpu=MINI_BATCH_SIZE)
    backend = TorchBackend("actor_optimizer", {"actor": policy.model}, optimizer, settings.grad_clip)
    update = ActorUpdate(policy.model, backend, settings, 1.0)
    seconds = []
    for batch_index in range(batches + 1):
        prompts = list(prompt_ids[batch_index * NUM_PROMPTS : (batch_index + 1) * NUM_PROMPTS])
        start_time = time.process_time()
        params = SamplingParams(1.0, COMPLETION_LENGTH, NO_STOP_TOKEN)
        rngs = make_rng(0, "sampling", batch_index).spawn(ROWS)
        conversation = sampler.start_conversation(prompts, params, rngs)
        replies = conversation.sample_replies(range(ROWS), [[] for _ in range(ROWS)])
        assert all(len(reply.token_ids) == COMPLETION_LENGTH for reply in replies)
        batch = to_batch(prompts, replies)
        advantages = grpo(batch.scores, batch.group_ids, batch.mask, norm_by_std=True)
        zeros = torch.zeros_like(advantages)
        update.run(batch, Targets(advantages, zeros, zeros, None), torch.arange(ROWS))
        seconds.append(time.process_time() - start_time)
    return seconds[1:]


def to_batch(prompts: Sequence[list[int]], replies: Sequence[SampledReply]) -> Batch:
    """Prompts and replies as a batch of episodes of one turn, with arbitrary scores."""
    episodes = []
    for row, reply in enumerate(replies):
        prompt = prompts[row // GROUP_SIZE]
        zeros = np.zeros(PROMPT_LENGTH, dtype=np.float32)
        episodes.append(
            Episode(
                level_seed=0,
                group=row // GROUP_SIZE,
                tokens=np.array([*prompt, *reply.token_ids]),
                mask=np.repeat([False, True], [PROMPT_LENGTH, COMPLETION_LENGTH]),
                logprobs=np.append(zeros, reply.logprobs),
                entropies=np.append(zeros, reply.entropies),
                turns=np.zeros(PROMPT_LENGTH + COMPLETION_LENGTH, dtype=np.int64),
                turn_rewards=(compute_score(row),),
                turn_actions=((),),
                turn_validity=(True,),
                stop_reason=StopReason.OUT_OF_TURNS,
                texts=("",),
            )
        )
    return collate(episodes)


class StepClock(TrainerCallback):
    """CPU time at the end of every optimizer step."""

    def __init__(self) -> None:
        self.times = [time.process_time()]

    def on_step_end(self, *_: object, **__: object) -> None:
        """Record the time."""
        self.times.append(time.process_time())


def time_trl_batches(texts: list[str], batches: int, folder: str) -> list[float]:
    """CPU seconds of each batch with TRL's GRPOTrainer, after one batch that is not timed.

    folder: where TRL writes its files.
    """
    lengths: set[int] = set()

    def score_completions(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        lengths.update(len(ids) for ids in completion_ids)
        return [compute_score(row) for row in range(len(completions))]

    steps = ROWS // MINI_BATCH_SIZE
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=MINI_BATCH_SIZE,
        gradient_accumulation_steps=1,
        num_generations=GROUP_SIZE,
        steps_per_generation=steps,
        max_completion_length=COMPLETION_LENGTH,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        max_steps=steps * (batches + 1),
        generation_kwargs={"min_new_tokens": COMPLETION_LENGTH, "top_k": 0},
        report_to="none",
        save_strategy="no",
        logging_steps=10_000,
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    model = AutoModelForCausalLM.from_pretrained(find_model("sokoban-tiny"), dtype=torch.float32)
    clock = StepClock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=score_completions,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=AutoTokenizer.from_pretrained(find_model("sokoban-tiny"), padding_side="left"),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)  # it prints to stdout, which is for the JSON object
    clock.times = [time.process_time()]  # without the time that making the trainer took
    trainer.train()
    assert lengths == {COMPLETION_LENGTH}, lengths
    # Every `steps` optimizer steps a batch ends. The differences start at the end of the first batch.
    batch_end_times = clock.times[::steps]
    return [after - before for before, after in pairwise(batch_end_times[1:])]


def main() -> None:
    """Time ours, TRL's, and ours again, so that a drift of the machine's load cancels, and compare medians."""
    parser = make_parser(__doc__)
    parser.add_argument("--repetitions", type=parse_count, default=6, help="timed batches of each run")
    batches = parser.parse_args().repetitions
    torch.set_num_threads(1)
    texts = make_prompt_texts(NUM_PROMPTS * (batches + 1))
    tokenizer = AutoTokenizer.from_pretrained(find_model("sokoban-tiny"))
    prompt_ids = [tokenizer(text)["input_ids"] for text in texts]
    assert {len(ids) for ids in prompt_ids} == {PROMPT_LENGTH}
    seconds: dict[str, list[float]] = {"ours": [], "ours_in_torch": [], "trl": []}
    for is_last in (False, True):
        seconds["ours"] += time_our_batches(prompt_ids, batches, is_compiled=True)
        seconds["ours_in_torch"] += time_our_batches(prompt_ids, batches, is_compiled=False)
        if not is_last:
            with tempfile.TemporaryDirectory() as folder:
                seconds["trl"] = time_trl_batches(texts, batches, folder)
    seconds_per_thousand = {
        name: round(statistics.median(values) / TOKENS_PER_BATCH * 1000, 4) for name, values in seconds.items()
    }
    print(
        json.dumps(
            {
                "benchmark": "trl_grpo",
                "tokens_per_batch": TOKENS_PER_BATCH,
                "batches": batches,
                "trl_version": version("trl"),
                "cpu_seconds_per_1000_trained_tokens": seconds_per_thousand,
                "ratio": round(seconds_per_thousand["trl"] / seconds_per_thousand["ours"], 2),
                "ratio_in_torch": round(seconds_per_thousand["trl"] / seconds_per_thousand["ours_in_torch"], 2),
                **describe(),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
