"""The device of the engine tests: the CPU, or the one that TUNE_STUDY_TEST_DEVICE names, as `make test-gpu` does."""

import os

import torch

DEVICE = torch.device(os.environ.get("TUNE_STUDY_TEST_DEVICE", "cpu"))
