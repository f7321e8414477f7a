"""the episode loop, samplers (torch, vLLM), and the engines around them."""
