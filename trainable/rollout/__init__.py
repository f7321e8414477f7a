"""episodes, samplers (torch, vLLM), and the engine that plays them."""
