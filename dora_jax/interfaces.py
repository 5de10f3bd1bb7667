"""Small protocols through which the runtime sees the stages."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from dora_jax import types

# A nested dict of arrays with the same structure wherever params appear.
Params = Any


@runtime_checkable
class Tokenizer(Protocol):
  """Text to token ids and back."""

  vocab_size: int
  stop_ids: tuple[int, ...]

  def encode(self, text: str) -> list[int]:
    """Token ids of a text, without special tokens."""
    ...

  def decode(self, token_ids: Sequence[int]) -> str:
    """The text of token ids; stop tokens and padding leave no trace."""
    ...


@runtime_checkable
class Task(Protocol):
  """Where prompts come from. What a completion earns is tasks/reward_pool's."""

  num_groups: int | None

  def prompt(self, group_id: int) -> types.Prompt:
    """The prompt of the group with this position in the order of dispatch."""
    ...

  def heldout_prompts(self) -> Sequence[types.Prompt]:
    """Prompts that are never trained on."""
    ...


@runtime_checkable
class Generator(Protocol):
  """One inference replica (a lane): one slot batch, one version at a time."""

  generator_id: int
  version: int | None

  def load(self, version: int, params: Params) -> None:
    """Serves these params from now on; refused while requests are live."""
    ...

  def unload(self) -> None:
    """Lets go of its params; refused while requests are live."""
    ...

  def score(self, tokens: Int[np.ndarray, "S"]) -> Float[np.ndarray, "T"]:
    """Log-probabilities of all tokens but the first, by what is loaded."""
    ...

  def submit(self, requests: Sequence[types.Request]) -> None:
    """Accepts requests of the version that is loaded."""
    ...

  def step(self) -> list[types.Trajectory]:
    """Advances every live request by a chunk; returns those that finished."""
    ...

  def num_live(self) -> int:
    """Requests accepted and not yet returned."""
    ...


@runtime_checkable
class Trainer(Protocol):
  """Turns groups into the next version's params."""

  version: int

  def params(self) -> Params:
    """The current params, as the trainer holds them; valid until `train`."""
    ...

  def train(self, groups: Sequence[types.Group]) -> Mapping[str, float]:
    """Makes one training step, advances `version` by one, returns metrics."""
    ...


@runtime_checkable
class Clock(Protocol):
  """Seconds since some fixed moment; a simulator's clock is virtual."""

  def now_s(self) -> float:
    """Now, in seconds."""
    ...
