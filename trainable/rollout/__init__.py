"""The episode loop, samplers (torch, compiled, vLLM), and the engines around them."""
