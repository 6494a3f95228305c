"""Training in micro-batches: one exact update from many of them.

From loss to update, in the order of the modules: `settings` (what `compile`
was asked for), `batches` (one batch cut into micro-batches), `losses` (the
loss, and what each term of it was divided by), `guard` (state that a bad
micro-batch leaves alone), `micro_step` (one micro-batch), `updates` (the end
of a window), `trainer` (Keras' methods) and `callbacks`.
"""

from tfckpt.training.callbacks import Callback
from tfckpt.training.resume import ResumeTraining
from tfckpt.training.trainer import AccumulatingTrainer

__all__ = ["AccumulatingTrainer", "Callback", "ResumeTraining"]
