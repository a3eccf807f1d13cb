"""Train pagedlab's embedded model: a 3 M parameter Qwen3 on Jane Austen's novels.

    python walkthrough/embedded_model/train.py --minutes 70 --seed 0 --threads 2

Everything happens here, from the compressed corpus to the files that the package ships:

1. read the corpus and hold out every twentieth chapter (``corpus.py``);
2. train a byte-level BPE tokenizer on the training chapters;
3. train the model: transformers' own ``Qwen3ForCausalLM``; Muon for the blocks' matrices,
   AdamW for the rest; a cosine schedule over wall-clock time, so that the budget in minutes
   holds on any machine;
4. export a Hugging Face checkpoint in bfloat16 to ``src/pagedlab/models/embedded``;
5. measure it on the held-out chapters and write its model card (``evaluate.py``).

A checkpoint is written to ``build/`` every two minutes; ``--resume`` continues from it,
with the time already spent counted. ``--resume --minutes 0`` trains no further and only
exports and measures what the checkpoint holds.

Two idle cores train on about 7,000 tokens per second. The shipped weights were trained on two
cores shared with other work and saw far fewer; their card has the numbers. Two threads wait
for each other at every step: on a busy machine ``--threads 1`` gets further.
"""

import argparse
import json
import math
import os
import platform
import shlex
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tokenizers
import torch
import transformers
from corpus import read_chapters
from evaluate import bits_per_byte, write_card
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
BUILD = HERE / "build"
EXPORT = HERE.parents[1] / "src" / "pagedlab" / "models" / "embedded"
CHECKPOINT = BUILD / "checkpoint.pt"

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096
MAX_POSITIONS = 1024
ROPE_THETA = 10_000.0

TOKENS_PER_STEP = 4096
SHORT, LONG = 256, 1024  # sequence lengths; three steps in four are short, which is faster
MUON_LR, MUON_WEIGHT_DECAY = 0.02, 0.05
ADAM_LR, ADAM_WEIGHT_DECAY = 3e-3, 0.1
WARM_UP = 0.01  # share of the budget
FINAL = 0.02  # share of the peak learning rates that is left at the end
DROPOUT = 0.15  # thirty epochs over 4 MB of text: without it the model learns it by heart
CHECKPOINT_SECONDS = 120.0
EVALUATE_SECONDS = 300.0


@dataclass
class Progress:
    """What has been spent so far; saved with the checkpoint and told in the card."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    commands: list[str] = field(default_factory=list)  # of the runs that trained


def train_tokenizer(chapters: list[str]) -> tokenizers.Tokenizer:
    """Byte-level BPE: any byte string has an encoding, nothing is normalised away.

    ``<|endoftext|>`` is id 0, the 256 bytes follow, then merges up to ``VOCAB_SIZE``.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chapters, trainer)
    return tokenizer


def build_config() -> Qwen3Config:
    """The shape: 6 layers of width 192, 6 query heads in groups of 3 on 2 key/value heads."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )


def add_dropout(model: Qwen3ForCausalLM) -> None:
    """Drop parts of what each block adds to the residual stream, in training only.

    Qwen3 has no such dropout, so hooks add it; the exported model knows nothing of it.
    """

    def drop(module: torch.nn.Module, _inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        return functional.dropout(output, DROPOUT, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


def build_optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for the embedding and the norms.

    Muon orthogonalises each matrix's update. In two minutes on two cores it brought this
    model to 1.67 held-out bits per byte where AdamW alone came to 1.92.
    """
    blocks = [p for p in model.model.layers.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    embedding = model.model.embed_tokens.weight  # also the output matrix
    return [
        torch.optim.Muon(blocks, lr=MUON_LR, weight_decay=MUON_WEIGHT_DECAY),
        torch.optim.AdamW(
            [
                {"params": [embedding], "weight_decay": ADAM_WEIGHT_DECAY},
                {"params": norms, "weight_decay": 0.0},
            ],
            lr=ADAM_LR,
            betas=(0.9, 0.95),
            fused=True,
        ),
    ]


def schedule(spent: float) -> float:
    """Share of the peak learning rate at ``spent`` in [0, 1], the share of the budget used.

    Linear warm-up, then a cosine down to ``FINAL``.
    """
    if spent < WARM_UP:
        return spent / WARM_UP
    phase = min((spent - WARM_UP) / (1 - WARM_UP), 1.0)
    return FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * phase))


def draw_batch(stream: torch.Tensor, step: int, generator: torch.Generator) -> torch.Tensor:
    """Random windows of the training stream: [sequences, length + 1] token ids.

    Every fourth step is long, so that positions up to ``LONG`` are trained.
    """
    length = LONG if step % 4 == 3 else SHORT
    count = TOKENS_PER_STEP // length
    starts = torch.randint(stream.numel() - length, (count,), generator=generator)
    return stream[starts[:, None] + torch.arange(length + 1)]


def save_checkpoint(
    model: Qwen3ForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    generator: torch.Generator,
    progress: Progress,
) -> None:
    """Write to a temporary name first, so that an interrupted write costs nothing."""
    state = {
        "model": model.state_dict(),
        "optimizers": [o.state_dict() for o in optimizers],
        "generator": generator.get_state(),
        "progress": asdict(progress),
    }
    partial = CHECKPOINT.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(CHECKPOINT)


def train(
    model: Qwen3ForCausalLM,
    tokenizer: tokenizers.Tokenizer,
    chapters: list[str],
    held_out: list[str],
    args: argparse.Namespace,
    device: torch.device,
) -> Progress:
    """Train until ``args.minutes`` of wall-clock time are spent, resumed time included."""
    optimizers = build_optimizers(model)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    generator = torch.Generator().manual_seed(args.seed)
    progress = Progress()
    if args.resume:
        state = torch.load(CHECKPOINT, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved_state in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved_state)
        generator.set_state(state["generator"].cpu())
        progress = Progress(**state["progress"])

    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    stream = torch.tensor([i for e in tokenizer.encode_batch(chapters) for i in (end_of_text, *e.ids)])
    print(f"{stream.numel():,} training tokens", flush=True)

    budget = args.minutes * 60
    if progress.seconds < budget:
        progress.commands.append(f"python walkthrough/embedded_model/train.py {shlex.join(sys.argv[1:])}")
    begun = time.perf_counter() - progress.seconds
    saved = evaluated = progress.seconds
    recent_loss = 0.0
    model.train()
    while progress.seconds < budget:
        share = schedule(progress.seconds / budget)
        batch = draw_batch(stream, progress.steps, generator).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=batch[:, :-1]).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * share
            optimizer.step()
            optimizer.zero_grad()

        progress.steps += 1
        progress.tokens += TOKENS_PER_STEP
        progress.seconds = time.perf_counter() - begun
        recent_loss += loss.item() / 100
        if progress.steps % 100 == 0:
            print(
                f"{progress.seconds / 60:6.2f} min  step {progress.steps:5d}  "
                f"epoch {progress.tokens / stream.numel():5.2f}  loss {recent_loss:.4f}  "
                f"{progress.tokens / progress.seconds:,.0f} tokens/s",
                flush=True,
            )
            recent_loss = 0.0
        if progress.seconds - saved > CHECKPOINT_SECONDS:
            save_checkpoint(model, optimizers, generator, progress)
            saved = progress.seconds
        if progress.seconds - evaluated > EVALUATE_SECONDS:
            # a glance only: nothing is chosen by it, the last weights are exported
            model.eval()
            glance = bits_per_byte(model, tokenizer, held_out[:4])
            print(f"held-out bits per byte {glance:.4f}, first four chapters", flush=True)
            model.train()
            evaluated = progress.seconds = time.perf_counter() - begun
    if progress.seconds > saved:
        save_checkpoint(model, optimizers, generator, progress)
    return progress


def export(model: Qwen3ForCausalLM, tokenizer: tokenizers.Tokenizer) -> None:
    """Write a checkpoint as the hub has them: bfloat16 weights, config, tokenizer files.

    The tied output matrix is stored once. ``model`` itself is left in bfloat16.
    """
    model.to("cpu", torch.bfloat16)
    model.config.use_cache = True
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.8, eos_token_id=0, pad_token_id=0)
    model.save_pretrained(EXPORT)

    config_file = EXPORT / "config.json"
    config = json.loads(config_file.read_text())
    # transformers 5 writes rope_parameters only; older readers look for these two names
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config["torch_dtype"] = config["dtype"]
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    tokenizer.save(str(EXPORT / "tokenizer.json"))
    special = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    for name, content in (
        ("special_tokens_map.json", special),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (EXPORT / name).write_text(json.dumps(content, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=70.0, help="wall-clock budget")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--resume", action="store_true", help="continue from build/")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if cuda else "cpu")
    BUILD.mkdir(exist_ok=True)

    training, held_out = read_chapters()
    tokenizer = train_tokenizer(training)
    model = Qwen3ForCausalLM(build_config()).to(device)
    add_dropout(model)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters on {device}", flush=True)
    progress = train(model, tokenizer, training, held_out, args, device)

    export(model, tokenizer)
    write_card(
        EXPORT,
        {
            "Command": ", then ".join(f"`{command}`" for command in progress.commands),
            "Seed": str(args.seed),
            "Training time": f"{progress.seconds / 60:.1f} minutes of wall clock",
            "Device": f"{device.type}, {os.cpu_count()} cores, {platform.machine()}",
            "Steps": f"{progress.steps:,} of {TOKENS_PER_STEP:,} tokens",
            "Throughput": f"{progress.tokens / progress.seconds:,.0f} tokens per second",
            "Versions": f"torch {torch.__version__}, transformers {transformers.__version__}, "
            f"tokenizers {tokenizers.__version__}, Python {platform.python_version()}",
        },
    )
    print(f"wrote {EXPORT}")


if __name__ == "__main__":
    main()
