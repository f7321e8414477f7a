"""The episode loop, samplers (torch, vLLM), and the engines around them."""
