"""Does the weight of the squared log-ratio between trainer and engine change the success of training in prime-rl?

prime-rl 559b4477 (0.8.0). It has no KL to a reference and no seed but that of the engine, and fixed ports, so that one
run at a time fits on a machine: type --max-concurrent 1.
"""

from search_spaces.command_study import make_command_study

STUDY = make_command_study(
    name="prime-rl",
    question=__doc__,
    command="rl @ rl.toml --output-dir {output} --run.name run --max-steps {steps} --inference.vllm.seed {seed}"
    " --orchestrator.eval.interval 10 --ckpt.interval 25 --ckpt.keep-last 2 --no-monitors.wandb"
    " --deployment.num-train-gpus 1 --deployment.num-infer-gpus 1 {flags}",
    settings={"trainer.loss.kl-tau": 1e-3, "trainer.optim.lr": 1e-6},
    vary={"trainer.loss.kl-tau": (0, 1e-3, 1e-2)},
    steps=200,
    logs="{output}/run/metrics.jsonl",
    checkpoints="{output}/run/checkpoints/step_{step}",
    resume="--resume.dir {checkpoint}",
    gpus=2,
    stop_seconds=60,
)
