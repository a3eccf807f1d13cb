"""Measure the embedded model on the held-out chapters and write its model card.

Bits per byte are the common coin: they compare a neural model over tokens, an n-gram
model over bytes and a file compressor alike. Lower is better.

    python walkthrough/embedded_model/evaluate.py        # prints the table, changes nothing
"""

import gzip
import lzma
import math
from pathlib import Path

import numpy
import torch
from corpus import HELD_OUT_EVERY, HELD_OUT_OFFSET, read_chapters, words
from ngram import KneserNey
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import Qwen3ForCausalLM

MODEL = Path(__file__).parents[2] / "src" / "pagedlab" / "models" / "embedded"

WINDOW, STRIDE = 1024, 512  # tokens; all but a chapter's first have >= 512 tokens of context
END_OF_TEXT_ID = 0

TEMPERATURE = 0.8
NEW_TOKENS = 80
PROMPTS = (
    "It was a fine morning, and",
    "My dear sister,",
    "The letter arrived",
    "She could not help",
    "After dinner, the ladies",
    "The road to London",
    "A young man of good fortune",
    "Nobody in the room",
    "He walked to the window and",
    "There is nothing so",
)


@torch.no_grad()
def bits_per_byte(model: Qwen3ForCausalLM, tokenizer: Tokenizer, texts: list[str]) -> float:
    """Bits the model spends on ``texts``, over their bytes in UTF-8.

    Each text starts after ``<|endoftext|>``, as chapters do in training. A window of
    ``WINDOW`` tokens moves by ``STRIDE``; every token is counted once, in the first
    window that holds it.
    """
    nats = 0.0
    for text in texts:
        ids = torch.tensor([END_OF_TEXT_ID, *tokenizer.encode(text).ids], device=model.device)
        counted = 1  # ids[:counted] are counted, the first being given
        for start in range(0, len(ids) - 1, STRIDE):
            window = ids[start : start + WINDOW]
            if start + len(window) <= counted:
                break
            logits = model(input_ids=window[None]).logits[0].float()
            first = counted - start
            nats += functional.cross_entropy(logits[first - 1 : -1], window[first:], reduction="sum").item()
            counted = start + len(window)
    return nats / math.log(2) / sum(len(t.encode()) for t in texts)


def compressor_bits_per_byte(training: list[str], held_out: list[str]) -> dict[str, float]:
    """What general compressors spend on the held-out text, alone and after the training text."""
    train, test = "".join(training).encode(), "".join(held_out).encode()

    def xz(data: bytes) -> int:
        # a dictionary of 16 MiB sees the whole training text
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 24}]
        return len(lzma.compress(data, format=lzma.FORMAT_RAW, filters=filters))

    return {
        "gzip -9": 8 * len(gzip.compress(test, 9)) / len(test),
        "xz -9, after reading the training text": 8 * (xz(train + test) - xz(train)) / len(test),
    }


def ngram_bits_per_byte(tokenizer: Tokenizer, training: list[str], held_out: list[str]) -> dict[str, float]:
    """5-gram models with interpolated Kneser-Ney smoothing, over bytes and over our tokens."""
    size = sum(len(t.encode()) for t in held_out)

    def as_bytes(text: str) -> numpy.ndarray:
        return numpy.frombuffer(text.encode(), numpy.uint8).astype(numpy.int64)

    def as_tokens(text: str) -> numpy.ndarray:
        return numpy.array(tokenizer.encode(text).ids, numpy.int64)

    results = {}
    for name, encode, alphabet in (
        ("5-gram over bytes, Kneser-Ney", as_bytes, 256),
        ("5-gram over the model's own tokens, Kneser-Ney", as_tokens, tokenizer.get_vocab_size()),
    ):
        # 0 pads the start of a chapter: no byte of the text, and <|endoftext|> among tokens
        model = KneserNey([encode(t) for t in training], order=5, alphabet=alphabet, pad=0)
        results[name] = sum(model.bits(encode(t)) for t in held_out) / size
    return results


@torch.no_grad()
def continuations(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """(prompt, continuation) for seeds 0 to 9, prompt i with seed i; plain temperature sampling."""
    result = []
    for seed, prompt in enumerate(PROMPTS):
        torch.manual_seed(seed)
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            top_p=1.0,
            max_new_tokens=NEW_TOKENS,
        )
        text = tokenizer.decode(out[0].tolist())
        result.append((prompt, text[len(prompt) :]))
    return result


def known_word_share(samples: list[tuple[str, str]], training: list[str]) -> tuple[int, int]:
    """(words found in the training text, words in all) of the continuations.

    A continuation's last word is not counted: the token limit may have cut it.
    """
    vocabulary = set(words("\n".join(training)))
    found = total = 0
    for prompt, text in samples:
        generated = words(prompt + text)[len(words(prompt)) : -1]
        found += sum(word in vocabulary for word in generated)
        total += len(generated)
    return found, total


def write_card(folder: Path, training_facts: dict[str, str]) -> None:
    """Load the exported checkpoint as anyone would, measure it, write ``MODEL_CARD.md``."""
    training, held_out = read_chapters()
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = model.config

    table = {"this model": bits_per_byte(model, tokenizer, held_out)}
    table |= ngram_bits_per_byte(tokenizer, training, held_out)
    table |= compressor_bits_per_byte(training, held_out)
    samples = continuations(model, tokenizer)
    found, total = known_word_share(samples, training)

    parameters = sum(p.numel() for p in model.parameters())
    size = sum(f.stat().st_size for f in folder.iterdir() if f.suffix in (".json", ".safetensors"))
    text_bytes = sum(len(c.encode()) for c in training)
    held_bytes = sum(len(c.encode()) for c in held_out)
    card = f"""\
# pagedlab's embedded model

A small language model of the Qwen3 architecture that continues English prose in the
manner of Jane Austen. It is there so that `pagedlab` has a real model to run on any machine
without a download. It knows nothing but six novels: it writes grammatical sentences with
the right names in them, and they mean little.

| | |
| --- | --- |
| Architecture | `Qwen3ForCausalLM`: grouped-query attention, QK-norm, RoPE, SwiGLU, \
tied embeddings |
| Parameters | {parameters:,} |
| Shape | {config.num_hidden_layers} layers, width {config.hidden_size}, \
{config.num_attention_heads} query heads on {config.num_key_value_heads} key/value heads of \
{config.head_dim}, SwiGLU {config.intermediate_size}, vocabulary {config.vocab_size:,} |
| Positions | {config.max_position_embeddings:,} |
| Weights | bfloat16, {size / 1e6:.1f} MB with the tokenizer; on a CPU they are computed with \
in float32 |
| Tokenizer | byte-level BPE trained on the same text; `<|endoftext|>` is id 0 |
| Source | Jane Austen's six novels, from the Debian package r-cran-janeaustenr |
| Licence | text: public domain; tokenizer and weights: Apache-2.0, as this repository |
"""
    for name, value in training_facts.items():
        card += f"| {name} | {value} |\n"
    card += f"""
Reference logits are transformers' own: `Qwen3ForCausalLM.from_pretrained(folder,
dtype=torch.float32)`, that is, these bfloat16 weights widened to float32 and computed with
in float32.

## Held-out bits per byte

{len(training)} chapters were trained on ({text_bytes:,} bytes), {len(held_out)} were held out
({held_bytes:,} bytes): every {HELD_OUT_EVERY}th of the novels' chapters in order, beginning
with number {HELD_OUT_OFFSET} counted from 0. The weights are those of the last step, not the
best on them; they did help to choose Muon over AdamW, in two runs of two minutes. The model
reads windows of {WINDOW:,} tokens moved by {STRIDE}; the 5-gram models are counted on the same
training chapters. Lower is better.

| | bits per byte |
| --- | --- |
"""
    for name, value in table.items():
        card += f"| {name} | {value:.3f} |\n"
    card += f"""
## Ten continuations

Prompt number i is sampled with seed i (0 to 9), at temperature {TEMPERATURE}, no top-k, no
top-p, {NEW_TOKENS} tokens. They are the first ten drawn, not the best.
Words that are words of the training text: {found} of {total} ({100 * found / total:.1f} %).
"""
    for seed, (prompt, text) in enumerate(samples):
        quoted = "\n".join(f"> {line}".rstrip() for line in f"**{prompt}**{text}".split("\n"))
        card += f"\nSeed {seed}:\n\n{quoted}\n"
    (folder / "MODEL_CARD.md").write_text(card, encoding="utf-8")


def main() -> None:
    training, held_out = read_chapters()
    model = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    table = {"this model": bits_per_byte(model, tokenizer, held_out)}
    table |= ngram_bits_per_byte(tokenizer, training, held_out)
    table |= compressor_bits_per_byte(training, held_out)
    for name, value in table.items():
        print(f"{value:.3f}  {name}")


if __name__ == "__main__":
    main()
