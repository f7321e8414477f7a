"""Qwen2, models of the hub, LoRA, KV cache, chat templates, loading."""
