"""Rewards of the runtime's tests; loaded by name in the reward processes."""

import threading


def digits(prompt, completion: str) -> float:
  """Pays for digits, so that every group has a spread of rewards."""
  del prompt
  return sum(character.isdigit() for character in completion) / 4


def picky(prompt, completion: str) -> float:
  """Raises for the prompts whose answer is odd."""
  if int(prompt.answer) % 2:
    raise ValueError(f"cannot judge {prompt.answer}")
  return digits(prompt, completion)


def never_solved(prompt, completion: str):
  """Pays too little for a solved prompt, and says what is digits."""
  return {"reward": 0.25, "digits": digits(prompt, completion)}


def hangs_for_some(prompt, completion: str) -> float:
  """Never answers for some of the prompts."""
  if int(prompt.answer) % 7 == 0:
    threading.Event().wait()
  return digits(prompt, completion)
