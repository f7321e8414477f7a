"""The diagnostics that a run gives to its trainer. Each of them measures only if the settings switch it on."""

from trainable.diagnostics.collapse import diagnose_step
from trainable.diagnostics.gradient_analysis import analyze_gradients
from trainable.ppo.trainer import Diagnostics

DIAGNOSTICS = Diagnostics(collapse=diagnose_step, gradients=analyze_gradients)
