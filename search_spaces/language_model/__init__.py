"""Studies that fine-tune a language model with PPO or GRPO."""
