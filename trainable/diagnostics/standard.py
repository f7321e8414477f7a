"""The diagnostics that a run hands to its trainer: what the settings switch on is measured, and nothing else."""

from trainable.diagnostics.collapse import diagnose_step
from trainable.diagnostics.gradient_analysis import analyse_gradients
from trainable.ppo.trainer import Diagnostics

DIAGNOSTICS = Diagnostics(collapse=diagnose_step, gradients=analyse_gradients)
