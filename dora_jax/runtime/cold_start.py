"""A supervised start on worked answers, for models that begin random.

Reinforcement learning needs some success to reinforce; a random model has none.
"""

from collections.abc import Callable, Sequence

import numpy as np

from dora_jax.trainer import packing, train_step


def cold_start(
  trainer: train_step.Trainer,
  pairs: Sequence[packing.Pair],
  *,
  num_steps: int,
  batch_size: int,
  seed: int,
  note: Callable[[str], None],
) -> None:
  """Makes supervised updates; version 0 is what they end in.

  Args:
    trainer: at version 0, before its first step.
    pairs: (prompt, completion) token ids.
    num_steps: updates.
    batch_size: pairs of an update, drawn without replacement where there are
      enough.
    seed: of the draw.
    note: prints a line.
  """
  rng = np.random.default_rng(seed)
  size = min(batch_size, len(pairs))
  every = max(1, num_steps // 5)
  for step in range(num_steps):
    chosen = rng.choice(len(pairs), size, replace=False)
    metrics = trainer.train_supervised([pairs[index] for index in chosen])
    if (step + 1) % every == 0:
      note(
        f"cold start {step + 1}/{num_steps} | "
        f"loss {metrics['supervised/loss']:.3f}"
      )
