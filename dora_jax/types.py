"""The nouns that flow between the stages. Read this first.

A Prompt becomes a group of M Requests; each Request becomes one Trajectory,
sampled from first to last token by one policy version; M scored Trajectories
make a Group; Groups are packed into a PackedBatch, which the trainer turns into
the next version.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

FinishReason = Literal["stop", "repetition", "length"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
  """One problem: its tokens and what its answer is judged by.

  Attributes:
    prompt_id: position of the problem in its source; the same in every epoch.
    tokens: token ids that the policy continues, template included.
    text: the same, as text, for logs and rewards.
    answer: the reference answer, as the source gives it.
    metadata: what else the source says of the problem; picklable.
  """

  prompt_id: int
  tokens: Int[np.ndarray, "T"]
  text: str
  answer: str
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """The distribution that a request's tokens are drawn from.

  The rules that cut it off apply to the tempered distribution, and what passes
  all of them is renormalised; generator/sampling.py has their definitions. A
  temperature of 0 takes the likeliest token and makes no use of them.

  Attributes:
    temperature: divides the logits; 0 takes the likeliest token.
    top_k: keeps so many of the likeliest tokens; 0 keeps all.
    top_p: keeps the fewest of the likeliest that hold this share of what top_k
      has left; 1 keeps all.
    min_p: keeps tokens with at least this share of the largest probability; 0
      keeps all.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stopping:
  """What ends a completion, beside a stop token of the tokenizer.

  Nothing is trimmed: the completion ends with the token that completes what
  stops it. generator/stopping.py has the definitions.

  Attributes:
    stop_ids: further stop tokens.
    stop_strings: texts that end a completion once its text holds one.
    repeated_tokens: the longest run of tokens whose repetition ends it; 0 lets
      it repeat.
    repetitions: how often a run must come in a row, the first time included.
  """

  stop_ids: tuple[int, ...] = ()
  stop_strings: tuple[str, ...] = ()
  repeated_tokens: int = 0
  repetitions: int = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """One trajectory still to be generated.

  Attributes:
    group_id: the group that it belongs to.
    member: its index in the group, from 0.
    version: the policy version that samples every token of it; under a
      schedule that mixes versions, the one that samples the first.
    prompt: token ids to continue.
    max_new_tokens: most tokens to sample, the stop token included.
    sampling: the distribution that its tokens are drawn from.
    stopping: what ends it, beside the tokenizer's stop tokens.
    stream: which family of random draws; training is 0, evaluation 1. What is
      drawn depends on (run seed, stream, group_id, member, position) alone.
  """

  group_id: int
  member: int
  version: int
  prompt: Int[np.ndarray, "T"]
  max_new_tokens: int
  sampling: Sampling = dataclasses.field(default_factory=Sampling)
  stopping: Stopping = dataclasses.field(default_factory=Stopping)
  stream: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
  """One finished completion, every token of it sampled by one policy version.

  Only the schedule partial_rollout makes others, which are counted as mixed.

  Attributes:
    group_id: the group, hence the prompt, that it belongs to.
    member: its index in the group, from 0.
    version: the policy version that sampled it; 0 is the initial policy. Of a
      mixed one, the oldest.
    token_versions: the version whose params sampled each token, as the engine
      stamped it at sampling time; all equal `version` unless it is mixed, which
      C1 asserts.
    prompt: token ids that were continued.
    completion: sampled token ids, the stop token included.
    behavior_logprobs: log-probability in nats of each sampled token, under the
      distribution it was drawn from (after temperature and truncation).
    kept_mass: what the tokens kept by truncation had of the probability before
      it, where each token was sampled; 1.0 where none was cut off. So
      behavior_logprobs + log(kept_mass) are those of the whole distribution.
    finish_reason: "stop" where a stop token or stop string ended it,
      "repetition" where its tokens repeated, else "length".
  """

  group_id: int
  member: int
  version: int
  token_versions: Int[np.ndarray, "T"]
  prompt: Int[np.ndarray, "S"]
  completion: Int[np.ndarray, "T"]
  behavior_logprobs: Float[np.ndarray, "T"]
  kept_mass: Float[np.ndarray, "T"]
  finish_reason: FinishReason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """The M scored trajectories of one prompt, in order of their member index.

  Attributes:
    group_id: position of the group in the order of dispatch.
    prompt: the problem.
    trajectories: one for each member.
    rewards: one scalar for each member, in the task's own units.
    components: what else the reward function returned, by name: for each member
      a number, such as whether an answer could be parsed.
  """

  group_id: int
  prompt: Prompt
  trajectories: tuple[Trajectory, ...]
  rewards: Float[np.ndarray, "M"]
  components: Mapping[str, Float[np.ndarray, "M"]] = dataclasses.field(
    default_factory=dict
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedBatch:
  """Rows that each hold several sequences, told apart by segment id.

  Index t of every array speaks of the token at t: its log-probability is that
  of drawing it after the tokens before it in its segment.

  Attributes:
    tokens: token ids; 0 in the padding.
    positions: position of the token in its own sequence, from 0.
    segment_ids: 1, 2, … for the sequences of a row; 0 is padding.
    loss_mask: 1.0 where the policy sampled the token, else 0.0.
    advantages: of the token, without a critic that of its trajectory; 0.0 where
      not sampled.
    behavior_logprobs: in nats; 0.0 where not sampled.
    lags: version being trained minus the one that sampled the token; 0 where
      not sampled.
    trajectory_ids: position of the token's trajectory among those of the step,
      in order of groups and members; 0 where not sampled.
  """

  tokens: Int[np.ndarray, "B T"]
  positions: Int[np.ndarray, "B T"]
  segment_ids: Int[np.ndarray, "B T"]
  loss_mask: Float[np.ndarray, "B T"]
  advantages: Float[np.ndarray, "B T"]
  behavior_logprobs: Float[np.ndarray, "B T"]
  lags: Int[np.ndarray, "B T"]
  trajectory_ids: Int[np.ndarray, "B T"]
