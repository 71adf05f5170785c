"""A small Llama made from nothing, with a tokenizer trained on the environment's own text.

It is saved as an ordinary Hugging Face folder, so everything after it is what a downloaded model would see.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentrl.config import TinyModel

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, which keeps every earlier turn as it was."""

_SHORT_LINE = 8
"""Shared lines up to this many characters are left to the merges."""


def fixed_phrases(texts: Sequence[str]) -> list[str]:
    """The lines that all texts have in common, as system prompts do; those of a few characters are left out."""
    if not texts:
        return []
    common = set.intersection(*(set(text.splitlines()) for text in texts))
    return [line for line in texts[0].splitlines() if line in common and len(line) > _SHORT_LINE]


def train_tokenizer(texts: Iterable[str], config: TinyModel, phrases: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer with ChatML's special tokens.

    Digits are tokens of their own: a small model copies numbers digit by digit, and no number is unknown.

    Args:
        texts: What the tokenizer is fitted to.
        config: `vocab_size` and `context` are read.
        phrases: Texts that become one token each: a line that stands in every prompt tells the model nothing, and as
            one token it costs next to nothing.

    Returns:
        A tokenizer with a chat template; its text round-trips for any input.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in dict.fromkeys(phrases)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        model_max_length=config.context,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_tiny_model(prompts: Sequence[str], texts: Iterable[str], config: TinyModel, seed: int, folder: Path) -> str:
    """Makes model and tokenizer and saves both.

    Args:
        prompts: System prompts; the lines that all of them share become one token each.
        texts: What the tokenizer is trained on besides.
        config: Sizes.
        seed: Of the initial weights.
        folder: A folder that does not exist yet or is empty.

    Returns:
        SHA-256 of the weights file, in hex.
    """
    tokenizer = train_tokenizer([*dict.fromkeys(prompts), *texts], config, fixed_phrases(prompts))
    end = tokenizer.convert_tokens_to_ids(END)
    pad = tokenizer.convert_tokens_to_ids(PAD)
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=config.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(llama)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
