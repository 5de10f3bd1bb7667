import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_jax.tasks import prompts, sources, templates, tokenizers

TOKENIZER = tokenizers.CharTokenizer("0123456789+=")
RENDERER = templates.TextTemplate("{question}=")


def example(question, answer="0"):
  return sources.Example(
    question=question, answer=answer, worked=answer, metadata={"q": question}
  )


def numbered(size):
  return [example(str(index), str(index + 1)) for index in range(size)]


def make_task(source, **changes):
  options = {
    "tokenizer": TOKENIZER,
    "renderer": RENDERER,
    "num_heldout": 0,
    "max_prompt_tokens": 16,
    "on_long_prompt": "error",
    "num_epochs": 1,
    "shuffle": True,
    "seed": 0,
  }
  return prompts.PromptTask(source=source, **{**options, **changes})


def stream_ids(task, num=None):
  num_groups = task.num_groups if num is None else num
  return [task.prompt(group_id).prompt_id for group_id in range(num_groups)]


# A batch is 4 prompts: sizes below it, one to either side of it, and itself.
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9])
def test_each_epoch_holds_each_prompt_once(size):
  task = make_task(numbered(size), num_epochs=3)
  assert task.num_groups == 3 * size
  ids = stream_ids(task)
  epochs = [ids[start : start + size] for start in range(0, 3 * size, size)]
  assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
  if size >= 7:
    assert len({tuple(epoch) for epoch in epochs}) == 3
  with pytest.raises(IndexError, match=r"config\.task\.num_epochs"):
    task.prompt(3 * size)


@settings(max_examples=30, deadline=None)
@given(
  size=st.integers(1, 12),
  num_epochs=st.integers(0, 3),
  num_shards=st.integers(1, 4),
  shuffle=st.booleans(),
  seed=st.integers(0, 2**31 - 1),
)
def test_shards_interleave_to_the_whole_stream(
  size, num_epochs, num_shards, shuffle, seed
):
  def make(**shard):
    return make_task(
      numbered(size), num_epochs=num_epochs, shuffle=shuffle, seed=seed, **shard
    )

  whole = make()
  num = 3 * size if whole.num_groups is None else whole.num_groups
  ids = stream_ids(whole, num)
  for index in range(num_shards):
    shard = make(shard_index=index, num_shards=num_shards)
    expected = ids[index::num_shards]
    assert shard.num_groups in (None, len(expected))
    assert stream_ids(shard, len(expected)) == expected
  if not shuffle:
    assert ids == list(range(size)) * (num // size)


def test_endless_stream_is_random_access():
  task = make_task(numbered(5), num_epochs=0)
  assert task.num_groups is None
  far = [task.prompt(g).prompt_id for g in range(5_000_000, 5_000_005)]
  assert sorted(far) == [0, 1, 2, 3, 4]
  assert [task.prompt(3) is task.prompt(3)] == [True]


def test_prompt_carries_all_that_a_reward_needs():
  task = make_task([example("3+4", "7")])
  prompt = task.prompt(0)
  assert prompt.text == "3+4="
  assert prompt.tokens.tolist() == [5, 12, 6, 13]
  assert prompt.tokens.dtype == np.int32
  assert (prompt.answer, prompt.metadata) == ("7", {"q": "3+4"})
  ((tokens, completion),) = task.worked_examples(
    prefix="=", wrong_share=0.0, seed=0
  )
  assert tokens.tolist() == prompt.tokens.tolist()
  assert completion.tolist() == [13, 9, 1]


@settings(max_examples=25, deadline=None)
@given(
  questions=st.lists(st.integers(0, 9), min_size=2, max_size=20),
  num_heldout=st.integers(0, 4),
  seed=st.integers(0, 100),
)
def test_heldout_questions_are_never_trained_on(questions, num_heldout, seed):
  source = [example(str(question)) for question in questions]
  num_distinct = len(set(questions))
  if num_heldout >= num_distinct:
    with pytest.raises(ValueError, match=r"config\.task\.num_heldout"):
      make_task(source, num_heldout=num_heldout, seed=seed)
    return
  task = make_task(source, num_heldout=num_heldout, seed=seed)
  held = [prompt.text for prompt in task.heldout_prompts()]
  trained = [task.prompt(g).text for g in range(task.num_train)]
  assert len(set(held)) == len(held) == num_heldout
  assert not set(held) & set(trained)
  kept = [f"{question}=" for question in questions]
  assert sorted(trained) == sorted(text for text in kept if text not in held)
  examples = task.worked_examples(prefix="", wrong_share=0.0, seed=0)
  worked = [TOKENIZER.decode(t.tolist()) for t, _ in examples]
  assert sorted(worked) == sorted(trained)


def test_a_share_of_the_demonstrations_shows_anothers_answer():
  task = make_task([example(f"{n}+0", f"{n}") for n in range(400)])

  def shown(wrong_share):
    return [
      (TOKENIZER.decode(p.tolist()).split("+")[0], TOKENIZER.decode(c.tolist()))
      for p, c in task.worked_examples(
        prefix="", wrong_share=wrong_share, seed=1
      )
    ]

  assert all(number == answer for number, answer in shown(0.0))
  num_wrong = sum(number != answer for number, answer in shown(0.25))
  assert 70 <= num_wrong <= 130  # 100 are expected, with a deviation of 8.7
  assert shown(0.25) == shown(0.25)


def test_heldout_from_a_source_of_its_own():
  task = make_task(
    numbered(6),
    num_heldout=2,
    heldout_source=[example("4"), example("7"), example("7")],
  )
  assert {p.text for p in task.heldout_prompts()} == {"4=", "7="}
  assert sorted(stream_ids(task)) == [0, 1, 2, 3, 5]


def test_long_prompts_are_skipped_and_counted_or_refused():
  source = [example("1"), example("12345"), example("1234"), example("123456")]
  task = make_task(source, max_prompt_tokens=5, on_long_prompt="skip")
  assert task.num_skipped == 2
  assert sorted(stream_ids(task)) == [0, 2]
  with pytest.raises(ValueError, match="Prompt 1 has 6 tokens, but at most 5"):
    make_task(source, max_prompt_tokens=5)
  with pytest.raises(ValueError, match="None of 4 prompts fits into 1"):
    make_task(source, max_prompt_tokens=1, on_long_prompt="skip")
  bare = templates.TextTemplate("{question}")
  with pytest.raises(ValueError, match="Prompt 0 has no token"):
    make_task([example("")], renderer=bare)
