"""Proof that what a generator serves is what the trainer made."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Canary:
  """A fixed sequence whose log-probabilities tell params apart.

  Attributes:
    tokens: the sequence.
    tolerance_nats: most by which generator and trainer may differ on a token.
    expected: version -> the trainer's log-probabilities, first token left out.
  """

  tokens: np.ndarray
  tolerance_nats: float
  expected: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)

  def check(self, version: int, logprobs: np.ndarray, *, who: str) -> None:
    """Raises where a generator's log-probabilities are not the trainer's."""
    difference = float(np.max(np.abs(logprobs - self.expected[version])))
    # Written so that NaN fails too.
    if not difference <= self.tolerance_nats:
      raise ValueError(
        f"{who} serves version {version}, but its log-probabilities of the "
        f"canary differ from the trainer's by up to {difference:.4g} nats, "
        f"more than config.runtime.canary_tolerance = "
        f"{self.tolerance_nats:.4g}: "
        "these are not the weights that were trained."
      )
