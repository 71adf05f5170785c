"""The model made from nothing is an ordinary Hugging Face folder, and its tokenizer loses nothing."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.config import TinyModel
from agentrl.learner.tiny import fixed_phrases, make_tiny_model, train_tokenizer
from agentrl.rollout.codec import Codec

PROMPTS = ["Answer the question.\nUse the tools.\nTask 1", "Answer the question.\nUse the tools.\nTask 2"]
TEXTS = ["SELECT AVG(price) FROM product WHERE kind = 'toys'", "What is the average price of toys?"] * 20
SIZES = TinyModel(vocab_size=400, hidden_size=32, layers=1, heads=2, intermediate_size=64, context=256)
TOKENIZER = train_tokenizer(TEXTS, SIZES, ["Answer the question."])


def test_shared_lines_are_phrases_and_become_one_token() -> None:
    assert fixed_phrases(PROMPTS) == ["Answer the question.", "Use the tools."]
    assert fixed_phrases([]) == []
    assert len(TOKENIZER.encode("Answer the question.")) == 1


@given(st.text(max_size=60))
def test_any_text_comes_back(text: str) -> None:
    clean = text.encode("utf-8", "ignore").decode()
    ids = TOKENIZER.encode(clean, split_special_tokens=True)
    assert TOKENIZER.decode(ids) == clean


def test_digits_are_tokens_of_their_own() -> None:
    assert len(TOKENIZER.encode("1234")) == 4


def test_the_folder_loads_and_its_template_can_be_trained_on(tmp_path: Path) -> None:
    digest = make_tiny_model(PROMPTS, TEXTS, SIZES, 0, tmp_path / "a")
    assert digest == make_tiny_model(PROMPTS, TEXTS, SIZES, 0, tmp_path / "b")
    assert digest != make_tiny_model(PROMPTS, TEXTS, SIZES, 1, tmp_path / "c")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    codec = Codec(tokenizer, eos_ids=model.generation_config.eos_token_id)
    assert codec.stop_ids == {tokenizer.eos_token_id}
    assert model.config.vocab_size == len(tokenizer)
