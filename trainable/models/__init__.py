"""Language models: Qwen2, models of the Hugging Face hub, LoRA, KV cache, chat templates, loading."""
