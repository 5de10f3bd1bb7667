"""The prompts of a run: rendered, filtered, held out, shuffled by epoch."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import grain
import numpy as np
from absl import logging
from jaxtyping import Int

from dora_jax import interfaces, types
from dora_jax.tasks import sources, templates

LongPrompt = Literal["skip", "error"]
TokenPair = tuple[Int[np.ndarray, "S"], Int[np.ndarray, "T"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Problem:
  """An example and the prompt that it became."""

  example: sources.Example
  prompt: types.Prompt


class PromptTask:
  """A stream of prompts, one a group, and a held-out set apart from it.

  The stream is a pure function of the arguments: `prompt(g)` is its g-th
  prompt, at any time and in any order. So the place in it is one integer, which
  the coordinator's snapshot holds, and there is no other state to checkpoint.

  Each epoch holds every training prompt once, in an order of its own. Shard i
  of n gets the prompts i, i + n, i + 2n, … of the whole stream, so that all
  shards together give the same prompts whatever their number.

  Attributes:
    num_groups: length of this shard's stream; None where it never ends.
    num_train: training prompts in an epoch, over all shards.
    num_skipped: prompts left out because they are too long.
  """

  def __init__(
    self,
    *,
    source: Sequence[sources.Example],
    tokenizer: interfaces.Tokenizer,
    renderer: templates.Renderer,
    num_heldout: int,
    max_prompt_tokens: int,
    on_long_prompt: LongPrompt,
    num_epochs: int,
    shuffle: bool,
    seed: int,
    shard_index: int = 0,
    num_shards: int = 1,
    heldout_source: Sequence[sources.Example] | None = None,
  ):
    """Renders and tokenises every example.

    Args:
      source: the examples to train on.
      tokenizer: of the policy.
      renderer: question to prompt text.
      num_heldout: examples to hold out, drawn by seed; no training prompt asks
        the question of one of them.
      max_prompt_tokens: longest prompt.
      on_long_prompt: what a longer one does: it is left out, or an error.
      num_epochs: passes over the training prompts; 0 goes on for ever.
      shuffle: whether each epoch has an order of its own, or the source's.
      seed: of the shuffle and of the choice of the held-out examples.
      shard_index: which part of the stream this process takes.
      num_shards: number of processes that share the stream.
      heldout_source: where held-out examples come from, if not from `source`.
    """
    if num_epochs < 0:
      raise ValueError(
        f"config.task.num_epochs is {num_epochs}, but it must be at least 0"
        " (0 goes on for ever)."
      )
    self._tokenizer = tokenizer
    self._renderer = renderer
    self._max_prompt_tokens = max_prompt_tokens
    self._on_long_prompt = on_long_prompt
    self.num_skipped = 0
    problems = self._fitting(source)
    candidates = (
      problems if heldout_source is None else self._fitting(heldout_source)
    )
    if self.num_skipped:
      logging.warning(
        "%d prompts are longer than %d tokens and left out.",
        self.num_skipped,
        max_prompt_tokens,
      )
    self._heldout = _draw_heldout(candidates, num=num_heldout, seed=seed)
    self._train = _without(self._heldout, problems)
    self.num_train = len(self._train)
    # grain repeats a permutation that depends on (seed, epoch) alone.
    stream = grain.MapDataset.source([p.prompt for p in self._train]).seed(seed)
    stream = stream.shuffle() if shuffle else stream
    self._stream = stream.repeat(num_epochs or None)[shard_index::num_shards]
    self.num_groups = len(self._stream) if num_epochs else None

  def prompt(self, group_id: int) -> types.Prompt:
    """The prompt at this position of the stream.

    Raises:
      IndexError: the stream is shorter. (grain would begin again.)
    """
    if group_id < 0 or (
      self.num_groups is not None and group_id >= self.num_groups
    ):
      raise IndexError(
        f"Group {group_id} is outside of the {self.num_groups} that"
        f" {self.num_train} prompts give: raise config.task.num_epochs."
      )
    prompt = self._stream[group_id]
    assert prompt is not None  # grain's type allows for filtered elements.
    return prompt

  def heldout_prompts(self) -> list[types.Prompt]:
    """Prompts that are never trained on."""
    return [problem.prompt for problem in self._heldout]

  def worked_examples(
    self, *, prefix: str, wrong_share: float, seed: int
  ) -> list[TokenPair]:
    """Training prompts and their answers written out, for a cold start.

    Args:
      prefix: text between prompt and answer, such as the space that a
        tokenizer joins to the word after it.
      wrong_share: share of the examples that get the answer of another one, so
        that what imitates them is right no more often than they are.
      seed: of the choice of those.

    Returns:
      Pairs (prompt tokens, completion tokens); the completion ends in the
      tokenizer's first stop token. Held-out examples are not among them.
    """
    stop_id = self._tokenizer.stop_ids[0]
    rng = np.random.default_rng(seed)
    is_wrong = rng.random(len(self._train)) < wrong_share
    others = rng.permutation(len(self._train))
    return [
      (
        problem.prompt.tokens,
        np.asarray(
          [
            *self._tokenizer.encode(
              prefix + self._train[other if wrong else index].example.worked
            ),
            stop_id,
          ],
          np.int32,
        ),
      )
      for index, (problem, wrong, other) in enumerate(
        zip(self._train, is_wrong, others, strict=True)
      )
    ]

  def _fitting(self, source: Sequence[sources.Example]) -> list[_Problem]:
    """The problems whose prompts are short enough; counts the others."""
    problems = []
    for prompt_id, example in enumerate(source):
      text = self._renderer.render(example.question)
      try:
        tokens = np.asarray(self._tokenizer.encode(text), np.int32)
      except ValueError as error:
        raise ValueError(f"Prompt {prompt_id}: {error}") from error
      if self._is_too_long(prompt_id, tokens):
        self.num_skipped += 1
        continue
      prompt = types.Prompt(
        prompt_id=prompt_id,
        tokens=tokens,
        text=text,
        answer=example.answer,
        metadata=example.metadata,
      )
      problems.append(_Problem(example=example, prompt=prompt))
    if not problems:
      raise ValueError(
        f"None of {len(source)} prompts fits into {self._max_prompt_tokens}"
        " tokens: raise config.task.max_prompt_tokens."
      )
    return problems

  def _is_too_long(self, prompt_id: int, tokens: Int[np.ndarray, "T"]) -> bool:
    if not len(tokens):
      raise ValueError(
        f"Prompt {prompt_id} has no token, so there is nothing to continue:"
        " correct config.task.template."
      )
    if len(tokens) <= self._max_prompt_tokens:
      return False
    if self._on_long_prompt == "skip":
      return True
    raise ValueError(
      f"Prompt {prompt_id} has {len(tokens)} tokens, but at most"
      f" {self._max_prompt_tokens} may be: raise config.task.max_prompt_tokens,"
      " or set config.task.on_long_prompt to 'skip'."
    )


def _without(
  heldout: Sequence[_Problem], problems: Sequence[_Problem]
) -> list[_Problem]:
  """The problems that ask none of the held-out questions."""
  asked = {problem.example.question for problem in heldout}
  left = [p for p in problems if p.example.question not in asked]
  if not left:
    raise ValueError(
      f"No training prompt is left of {len(problems)} once {len(heldout)} are"
      " held out: lower config.task.num_heldout."
    )
  return left


def _draw_heldout(
  problems: Sequence[_Problem], *, num: int, seed: int
) -> list[_Problem]:
  """Draws problems that ask different questions."""
  by_question = {p.example.question: p for p in reversed(problems)}
  if not 0 <= num <= len(by_question):
    raise ValueError(
      f"{num} examples are to be held out, but there are {len(by_question)}"
      " with different questions: lower config.task.num_heldout."
    )
  distinct = sorted(by_question.values(), key=lambda p: p.prompt.prompt_id)
  chosen = np.random.default_rng(seed).permutation(len(distinct))[:num]
  return [distinct[i] for i in sorted(chosen)]
