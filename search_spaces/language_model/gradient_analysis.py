"""Which groups' gradients carry signal: do task gradients grow with the reward spread, and regularizers' do not?"""

from search_spaces.declaration.study import Axis, NameTemplates, Study
from search_spaces.language_model.common import SWEEP_SETTINGS
from search_spaces.language_model.family import PPO

# PPO alone by default; `--algo PPO,GRPO` selects both arms.
_GRID = ("PPO",)

STUDY = Study(
    name="gradient-analysis",
    family=PPO,
    question=__doc__,
    axis=Axis(
        setting="algorithm.adv_estimator",
        option="--algo",
        grids={"paper": _GRID, "laptop": _GRID},
        named_settings={
            "PPO": {"algorithm.adv_estimator": "gae", "actor.loss_agg_mode": "token-mean"},
            "GRPO": {
                "algorithm.adv_estimator": "grpo",
                "algorithm.norm_adv_by_std_in_grpo": True,
                "actor.loss_agg_mode": "seq-mean-token-mean",
            },
        },
    ),
    fixed_settings={
        **SWEEP_SETTINGS,
        "actor.use_kl_loss": False,
        "actor.kl_loss_type": "low_var_kl",
        "actor.kl_loss_coef": 0.001,
        "actor.entropy_coeff": 0.001,
        "filter.rollout_filter_value": 0.9,
        "filter.rollout_filter_top_p_prob_mode": "linear",
        "filter.rollout_filter_include_zero": False,
        "rollout.log_prob_micro_batch_size_per_gpu": 4,
        "rollout.ref_log_prob_micro_batch_size_per_gpu": 4,
        "rollout.gradient_analysis_num_buckets": 6,
        "rollout.gradient_analysis_bucket_mode": "quantile",
        "trainer.total_training_steps": 101,
        "trainer.save_freq": 100,
        "trainer.test_freq": 10,
        "trainer.gradient_analysis_mode": True,
        "trainer.gradient_analysis_every": 50,
        "trainer.gradient_analysis_env_groups": 128,
        "trainer.gradient_analysis_group_size": 16,
        "trainer.gradient_analysis_log_prefilter": True,
    },
    baseline="PPO",
    published_templates=NameTemplates(
        run="gradient_analysis_{env}_{model}",
        experiment="{env}-{arm}-filter-topp{mass}-{model}-train{train}-analysis{analysis}-grad-every{every}",
        title="Gradient Analysis",
        summary="algo={arm} | filter={tag} | include_zero={include_zero}",
        wandb_project="ragen_gradient_analysis",
        log="{run}/{experiment}.log",
        checkpoints="gradient_analysis/{env}/{arm}/filter/{experiment}",
        probe_log="gradient_analysis_probe_{env}_{model}/"
        "{env}-{arm}-filter-topp{mass}-{model}-probe-ckpt{step}-{val}-kl_and_entropy{seed}.log",
    ),
)
