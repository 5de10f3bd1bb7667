import json
import pathlib

import pytest
import tokenizers as library
from hypothesis import given
from hypothesis import strategies as st

from dora_jax.tasks import templates, tokenizers

QWEN = (
  pathlib.Path(__file__).parents[3] / "shared" / "data" / "tokenizers" / "qwen3"
)
ALPHABET = "0123456789+-= é\n"


@pytest.fixture(scope="module")
def qwen():
  if not QWEN.is_dir():
    pytest.skip("../shared/data/tokenizers/qwen3 is missing")
  return tokenizers.HfTokenizer(str(QWEN))


@pytest.fixture
def folder(tmp_path):
  """A tokenizer of three words: a is 0, b is 1, <end> is 2."""
  tokenizer = library.Tokenizer(
    library.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
  )
  tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
  tokenizer.add_special_tokens(["<end>"])
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  return tmp_path


@given(st.text(alphabet=ALPHABET))
def test_characters_survive_and_stop_and_padding_vanish(text):
  tokenizer = tokenizers.CharTokenizer(ALPHABET)
  ids = tokenizer.encode(text)
  assert len(ids) == len(text)
  assert all(2 <= i < tokenizer.vocab_size for i in ids)
  assert tokenizer.decode([0, *ids, *tokenizer.stop_ids, 0, 0]) == text


def test_char_tokenizer_numbers_the_alphabet_in_order():
  tokenizer = tokenizers.CharTokenizer("ab ")
  assert tokenizer.encode("b a") == [3, 4, 2]
  assert (tokenizer.vocab_size, tokenizer.stop_ids) == (5, (1,))
  with pytest.raises(ValueError, match="'c' of 'abc' is not in the alphabet"):
    tokenizer.encode("abc")
  with pytest.raises(ValueError, match="id 5 is not one of the 5"):
    tokenizer.decode([2, 5])
  with pytest.raises(ValueError, match=r"\['a'\] more than once"):
    tokenizers.CharTokenizer("aba")
  with pytest.raises(ValueError, match="alphabet is empty"):
    tokenizers.CharTokenizer("")


def test_qwen3_as_shipped(qwen):
  assert qwen.vocab_size == 151_669
  assert qwen.stop_ids == (151_645,)
  text = "What is 2+2? Zürich → 東京\n"
  ids = qwen.encode(text)
  assert qwen.decode([*ids, 151_645, 151_643, 151_643]) == text
  assert qwen.encode("<|im_end|>") == [151_645]


def test_chat_template_of_qwen3(qwen):
  renderer = templates.ChatTemplate(
    templates.TextTemplate("{question} Be brief."),
    folder=str(QWEN),
    system="You add.",
    options={"enable_thinking": False},
  )
  text = renderer.render("2+2?")
  assert text == (
    "<|im_start|>system\nYou add.<|im_end|>\n"
    "<|im_start|>user\n2+2? Be brief.<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
  )
  assert qwen.encode(text).count(151_645) == 2
  other = templates.ChatTemplate(
    templates.TextTemplate("{question} Be brief."), folder=str(QWEN)
  )
  assert templates.fingerprint(other) != templates.fingerprint(renderer)


def test_text_template_keeps_other_braces():
  renderer = templates.TextTemplate(
    "Q: {question} {x}\nA:", few_shot="Q: 1+1 {x}\nA: 2\n\n"
  )
  text = "Q: 1+1 {x}\nA: 2\n\nQ: a {question}? {x}\nA:"
  assert renderer.render("a {question}?") == text
  for template in ("Q:", "{question}{question}"):
    with pytest.raises(ValueError, match=r"config\.task\.template"):
      templates.TextTemplate(template)


def test_stop_ids_of_a_folder(folder):
  def write(name, **values):
    (folder / name).write_text(json.dumps(values))

  def stop_ids(**kwargs):
    return tokenizers.HfTokenizer(str(folder), **kwargs).stop_ids

  with pytest.raises(ValueError, match=r"set config\.tokenizer\.stop_ids"):
    stop_ids()
  write("config.json", eos_token_id=1)
  assert stop_ids() == (1,)
  write("generation_config.json", eos_token_id=[0, 2])
  assert stop_ids() == (0, 2, 1)
  write("tokenizer_config.json", eos_token={"content": "<end>"})
  assert stop_ids() == (2, 0, 1)
  assert stop_ids(stop_ids=(1,)) == (1,)
  with pytest.raises(ValueError, match="Stop id 7 is not in the vocabulary"):
    stop_ids(stop_ids=(7,))
  write("tokenizer_config.json", eos_token="<eos>")
  with pytest.raises(ValueError, match=r"'<eos>' of .* is not in the vocab"):
    stop_ids()


def test_load_names_the_nearest_kind(folder):
  def load(kind):
    return tokenizers.load(
      kind=kind, alphabet="ab", folder=str(folder), stop_ids=(2,)
    )

  assert load("char").encode("ab") == [2, 3]
  assert load("huggingface").encode("a b") == [0, 1]
  with pytest.raises(ValueError, match="Did you mean 'huggingface'"):
    load("hugingface")
  with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
    tokenizers.HfTokenizer(str(folder / "none"))
