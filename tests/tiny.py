"""Small random models and tokenizers, and folders of them; nothing is downloaded."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path

import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from foretoken.models.stock.small_copy import randomize_weights

TEXT = """It was the first day of the year, and the house was cold. \U0001f600 said nothing at all.
"Where are you going?" asked the old man. — To the sea, naïve as ever, to the sea.
\U0001f40b\U0001f30aThe day was over before the house was warm, and the old man was asleep.
日本語 too.
"""
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "intermediate_size": 48}


def llama(V: int = 320, context: int = 96, seed: int = 0, **settings) -> LlamaForCausalLM:
    """A random causal model whose distributions are far from flat, float32."""
    torch.manual_seed(seed)
    settings = {"bos_token_id": 0, "eos_token_id": 0} | settings
    config = LlamaConfig(vocab_size=V, max_position_embeddings=context, **(SHAPE | settings))
    model = LlamaForCausalLM(config).eval()
    randomize_weights(model)
    return model


def t5(V: int = 320, seed: int = 0, **settings) -> T5ForConditionalGeneration:
    """A random encoder-decoder, float32."""
    torch.manual_seed(seed)
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    ends = {"decoder_start_token_id": 1, "eos_token_id": 0, "pad_token_id": 1}
    model = T5ForConditionalGeneration(T5Config(vocab_size=V, **(shape | ends | settings))).eval()
    randomize_weights(model)
    return model


def byte_level(V: int = 320) -> PreTrainedTokenizerFast:
    """Byte-level BPE with one special token, id 0: any text, and characters cut by tokens."""
    return deepcopy(_byte_level(V))  # calls leave traces in a tokenizer


@cache
def _byte_level(V: int) -> PreTrainedTokenizerFast:
    end = "<|endoftext|>"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = {"special_tokens": [end], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=V, **how))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=end,
        eos_token=end,
        model_max_length=10_000,
        clean_up_tokenization_spaces=False,
    )


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """Unigram over Metaspace with byte fallback, as SentencePiece makes them; special id 0."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    entries = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    pieces = [(token, -float(i)) for i, (token, _) in enumerate(entries)]
    pieces += [(byte, -900.0) for byte in bytes_]
    whole = Tokenizer(models.Unigram(pieces, unk_id=1, byte_fallback=True))
    whole.pre_tokenizer = pre_tokenizers.Metaspace()
    whole.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    whole.add_special_tokens(["</s>", "<unk>"])
    return PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="</s>", unk_token="<unk>")


@cache
def legacy() -> PreTrainedTokenizerFast:
    """As Llama's: a normalizer puts a space before every text, whatever it begins with."""
    vocabulary = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "ab", "\u2581ab"]
    vocabulary += [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [("\u2581", "a"), ("a", "b"), ("\u2581", "ab"), ("\u2581a", "b")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(vocabulary)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def folder(
    path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None = None
) -> Path:
    """Model and tokenizer in transformers' own layout."""
    model.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path
