"""Turns the coordinator's commands into orders to the parts of a run.

Keeps what the coordinator knows only by id: prompts, trajectories, rewards.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from dora_jax import interfaces, types
from dora_jax.coordinator import events as ev
from dora_jax.runtime import generating, orders, part, scoring, training
from dora_jax.weights import store as store_lib

EVALUATION = "evaluation"
ROLLOUT = "rollout"

# (group_id, member) -> most tokens to sample, the stop token included.
CompletionLimit = Callable[[int, int], int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
  """The threads of a run.

  Attributes:
    trainer: makes steps.
    rewards: scores completions.
    generators: generator_id -> the part that drives its mesh.
    names: generator_id -> its name, by which it holds versions.
    mesh_ids: generator_id -> its mesh.
    num_slots: generator_id -> its slots, for those that the coordinator uses.
    kv_capacity: mesh -> tokens whose KV it holds.
    evaluation_id: the generator that the evaluation uses.
  """

  trainer: training.TrainerPart
  rewards: scoring.RewardPart
  generators: Mapping[int, generating.GeneratorPart]
  names: Mapping[int, str]
  mesh_ids: Mapping[int, int]
  num_slots: Mapping[int, int]
  kv_capacity: Mapping[int, int]
  evaluation_id: int

  def all(self) -> list[part.Part]:
    """Each part once."""
    return [
      self.trainer,
      self.rewards,
      *dict.fromkeys(self.generators.values()),
    ]

  def joined(self) -> list[ev.GeneratorJoined]:
    """What the coordinator hears of the generators at the beginning."""
    return [
      ev.GeneratorJoined(
        generator_id=generator_id,
        num_slots=num_slots,
        mesh_id=self.mesh_ids[generator_id],
        kv_capacity=self.kv_capacity[self.mesh_ids[generator_id]],
      )
      for generator_id, num_slots in self.num_slots.items()
    ]


@dataclasses.dataclass(kw_only=True)
class GroupData:
  """What the coordinator knows only by id.

  Attributes:
    prompt: of the group.
    trajectories: member -> its finished trajectory.
    rewards: member -> its reward, once it is known.
    components: member -> what else the reward function returned.
  """

  prompt: types.Prompt
  trajectories: dict[int, types.Trajectory] = dataclasses.field(
    default_factory=dict
  )
  rewards: dict[int, float] = dataclasses.field(default_factory=dict)
  components: dict[int, Mapping[str, float]] = dataclasses.field(
    default_factory=dict
  )

  def group(self, group_id: int) -> types.Group:
    """The finished group, in order of its members."""
    members = sorted(self.trajectories)
    # Those that the reward function returned for each of the members.
    names = set.intersection(*(set(self.components[m]) for m in members))
    return types.Group(
      group_id=group_id,
      prompt=self.prompt,
      trajectories=tuple(self.trajectories[m] for m in members),
      rewards=np.array([self.rewards[m] for m in members], np.float32),
      components={
        name: np.array([self.components[m][name] for m in members], np.float32)
        for name in sorted(names)
      },
    )


class Executor:
  """Carries commands out; used by the runtime's thread."""

  def __init__(
    self,
    *,
    task: interfaces.Task,
    tokenizer: interfaces.Tokenizer,
    parts: Parts,
    store: store_lib.WeightStore,
    sampling: types.Sampling,
    stopping: types.Stopping,
    completion_limit: CompletionLimit,
  ):
    """Wires.

    Args:
      task: prompts by group id.
      tokenizer: decodes completions for the rewards.
      parts: who gets the orders.
      store: of versions.
      sampling: in training.
      stopping: in training.
      completion_limit: most tokens of each completion.
    """
    self._task = task
    self._tokenizer = tokenizer
    self._parts = parts
    self._store = store
    self._sampling = sampling
    self._stopping = stopping
    self._completion_limit = completion_limit
    self._groups: dict[int, GroupData] = {}
    # (source, target) -> the requests of the move that is under way.
    self._moves: dict[tuple[int, int], tuple[orders.Name, ...]] = {}

  def carry_out(self, command: ev.Command) -> list[types.Group] | None:
    """Gives the orders that a command needs; returns the batch of a Train."""
    match command:
      case ev.Load():
        self._load(command)
      case ev.Submit():
        self._submit(command)
      case ev.Move():
        self._moves[command.source_id, command.target_id] = command.requests
        self._send(
          orders.ExtractOrder(
            generator_id=command.source_id,
            target_id=command.target_id,
            requests=command.requests,
          )
        )
      case ev.Cancel():
        self._send(
          orders.CancelOrder(
            generator_id=command.generator_id, requests=command.requests
          )
        )
      case ev.Score():
        data = self._groups[command.group_id]
        self.send_score(ROLLOUT, data.prompt, data.trajectories[command.member])
      case ev.Train():
        batch = [self._groups.pop(g).group(g) for g in command.group_ids]
        self._parts.trainer.send(batch)
        return batch
      case ev.Restart():
        data = self._groups[command.group_id]
        data.trajectories.clear()
        data.rewards.clear()
        data.components.clear()
      case ev.Drop():
        del self._groups[command.group_id]
      case ev.Release():
        self._store.release(command.version, holder="coordinator")
      case ev.Stop():
        pass  # What is unfinished may still be saved.
    return None

  @property
  def groups(self) -> Mapping[int, GroupData]:
    """Groups that have started and are not in a batch, by id."""
    return self._groups

  def take_over(self, groups: Mapping[int, GroupData]) -> None:
    """Goes on with the groups of a run that this one resumes."""
    self._groups = dict(groups)

  def keep_trajectory(self, trajectory: types.Trajectory) -> None:
    """Keeps a finished trajectory, unless its group was given up."""
    data = self._groups.get(trajectory.group_id)
    if data is not None:
      data.trajectories[trajectory.member] = trajectory

  def keep_reward(
    self,
    group_id: int,
    member: int,
    reward: float,
    components: Mapping[str, float],
  ) -> None:
    """Keeps a reward and its components, unless its group was given up."""
    data = self._groups.get(group_id)
    if data is not None:
      data.rewards[member] = reward
      data.components[member] = components

  def pass_on(self, message: orders.Extracted) -> ev.Moved | None:
    """Sends packed requests to their target; the end of a move of nothing."""
    if not message.parcels:
      return self._end_move(message.source_id, message.target_id, (), 0)
    self._send(
      orders.RestoreOrder(
        generator_id=message.target_id,
        source_id=message.source_id,
        parcels=message.parcels,
      )
    )
    return None

  def end_move(
    self, message: orders.Restored | orders.RestoreFailed
  ) -> ev.Moved:
    """Tells the source to let go of its requests, or to go on with them."""
    if isinstance(message, orders.RestoreFailed):
      self._send(
        orders.ResumeOrder(
          generator_id=message.source_id, requests=message.requests
        )
      )
      return self._end_move(message.source_id, message.target_id, (), 0)
    self._send(
      orders.ForgetOrder(
        generator_id=message.source_id, requests=message.requests
      )
    )
    return self._end_move(
      message.source_id,
      message.target_id,
      message.requests,
      message.num_kv_tokens,
    )

  def send_score(
    self, purpose: str, prompt: types.Prompt, trajectory: types.Trajectory
  ) -> None:
    """Asks for the reward of a completion."""
    completion = self._tokenizer.decode(trajectory.completion.tolist())
    self._parts.rewards.send(
      scoring.ScoreOrder(
        job=(purpose, trajectory.group_id, trajectory.member),
        prompt=prompt,
        completion=completion,
      )
    )

  def _end_move(
    self,
    source_id: int,
    target_id: int,
    moved: tuple[orders.Name, ...],
    num_kv_tokens: int,
  ) -> ev.Moved:
    ordered = self._moves.pop((source_id, target_id))
    return ev.Moved(
      source_id=source_id,
      target_id=target_id,
      moved=moved,
      left=tuple(name for name in ordered if name not in moved),
      num_kv_tokens=num_kv_tokens,
    )

  def _send(self, order: orders.Order) -> None:
    self._parts.generators[order.generator_id].send(order)

  def _load(self, command: ev.Load) -> None:
    self._store.reserve(
      command.version,
      holder=self._parts.names[command.generator_id],
      mesh_id=self._parts.mesh_ids[command.generator_id],
    )
    self._send(
      orders.LoadOrder(
        generator_id=command.generator_id,
        version=command.version,
        carries_live=command.carries_live,
      )
    )

  def _submit(self, command: ev.Submit) -> None:
    if command.group_id not in self._groups:
      prompt = self._task.prompt(command.group_id)
      self._groups[command.group_id] = GroupData(prompt=prompt)
    prompt = self._groups[command.group_id].prompt
    self._send(
      orders.SubmitOrder(
        generator_id=command.generator_id,
        requests=[
          types.Request(
            group_id=command.group_id,
            member=member,
            version=command.version,
            prompt=prompt.tokens,
            max_new_tokens=self._completion_limit(command.group_id, member),
            sampling=self._sampling,
            stopping=self._stopping,
          )
          for member in command.members
        ],
      )
    )
