"""Renders a question into the text that the policy continues.

One object renders for training, evaluation and cold start alike, so that no two
of them can differ; its fingerprint can be kept with a checkpoint.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

_SLOT = "{question}"


@runtime_checkable
class Renderer(Protocol):
  """Question to prompt text."""

  def render(self, question: str) -> str:
    """The text that the policy continues."""
    ...


class TextTemplate:
  """Plain text with one place for the question."""

  def __init__(self, template: str, *, few_shot: str = ""):
    """Checks the template.

    Args:
      template: text that holds `{question}` once; other braces are text.
      few_shot: solved problems that stand before it, as they are to be read.
    """
    if template.count(_SLOT) != 1:
      raise ValueError(
        f"The template {template!r} holds {_SLOT} {template.count(_SLOT)}"
        " times, but it must hold it once: correct config.task.template."
      )
    self._template = template
    self._few_shot = few_shot

  def render(self, question: str) -> str:
    """The text that the policy continues."""
    return self._few_shot + self._template.replace(_SLOT, question)


class ChatTemplate:
  """A text template as the user's turn of a model's own chat template."""

  def __init__(
    self,
    user: TextTemplate,
    *,
    folder: str,
    system: str = "",
    options: Mapping[str, Any] | None = None,
  ):
    """Reads the chat template of a Hugging Face folder.

    Args:
      user: renders the user's turn.
      folder: holds the tokenizer's files, with a chat template.
      system: the system's turn; none where empty.
      options: further variables of the template, such as enable_thinking.
    """
    # Slow to import, and only chat models need it.
    import transformers

    # Not AutoTokenizer: where torch is installed, that imports it. Neither is
    # a folder looked up elsewhere, nor code run that lies in it.
    self._tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
      folder, local_files_only=True, trust_remote_code=False
    )
    if self._tokenizer.chat_template is None:
      raise ValueError(
        f"{folder} holds no chat template: set config.task.chat to False, or"
        " config.tokenizer.folder to a chat model's."
      )
    self._user = user
    self._system = system
    self._options = dict(options or {})

  def render(self, question: str) -> str:
    """The text that the policy continues, up to where its turn begins."""
    turns = [{"role": "user", "content": self._user.render(question)}]
    if self._system:
      turns.insert(0, {"role": "system", "content": self._system})
    text = self._tokenizer.apply_chat_template(
      turns, tokenize=False, add_generation_prompt=True, **self._options
    )
    assert isinstance(text, str)
    return text


def fingerprint(renderer: Renderer) -> str:
  """A hash of how a renderer renders; equal where two render alike.

  Taken of what comes out for one fixed question, so that it covers whatever the
  renderer is made of.
  """
  rendered = renderer.render("What is 2 + 2?")
  return hashlib.sha256(rendered.encode("utf-8")).hexdigest()
