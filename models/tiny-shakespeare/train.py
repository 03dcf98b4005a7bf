"""Trains the tiny-shakespeare checkpoint and writes its whole folder, tokenizer and configuration included.

Owns the recipe: the split of the text, the byte-level BPE, a Llama-shaped model in plain torch whose parameters carry
Hugging Face's names, the schedule and the export. It knows nothing of serving, and the serving code does not import it.

The last tenth of the text is held out: neither the tokenizer nor the weights see it. A document ends after a speech
with probability 1/12 and the ends are drawn anew each epoch, so that the end token can follow any speech. The folder
is loadable from the first evaluation on; each better one replaces the weights by rename, so no reader sees half a file.

Shapes: B sequences, T positions, D hidden size, H query heads, K key-value heads, E head size, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

V, D, LAYERS, H, K, E, MLP_SIZE = 1024, 256, 4, 8, 4, 32, 640
ROPE_THETA, NORM_EPS, MAX_POSITIONS = 10000.0, 1e-5, 2048
DROPOUT, PEAK_LR, WEIGHT_DECAY, WARMUP_STEPS = 0.3, 2e-3, 0.5, 100
EVALUATE_EVERY, EVALUATION_WINDOW = 100, 1024
END, END_ID, END_PROBABILITY, SPEECH_BREAK = "<|endoftext|>", 0, 1 / 12, "\n\n"
# Newlines are a piece of their own, so that a prompt ending in one is cut exactly as it was within the training text.
PIECES = r"'(?:s|d|m|t|ll|ve|re|st)\b| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+(?!\S)|[^\S\n]+"
CHAT_TEMPLATE = (
    "{%- for message in messages if message['role'] == 'system' -%}{{ message['content'] }}\n\n{% endfor -%}"
    "{%- for message in messages if message['role'] != 'system' -%}"
    "{{ 'JULIET' if message['role'] == 'assistant' else 'ROMEO' }}:\n{{ message['content'] }}\n\n{% endfor -%}"
    "{%- if add_generation_prompt -%}JULIET:\n{% endif -%}"
)
TOKEN_IDS = {"bos_token_id": END_ID, "eos_token_id": END_ID}
CONFIG = TOKEN_IDS | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": MLP_SIZE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": H,
    "num_key_value_heads": K,
    "head_dim": E,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_theta": ROPE_THETA,
    "rms_norm_eps": NORM_EPS,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
}
GENERATION_CONFIG = TOKEN_IDS | {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END,
    "eos_token": END,
    "model_max_length": MAX_POSITIONS,
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}


def rope_tables(length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [T, E], each half of the head repeating the same E/2 frequencies."""
    frequencies = ROPE_THETA ** (-torch.arange(0, E, 2).float() / E)
    angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions in Hugging Face's "rotate_half" convention; x is [B, heads, T, E]."""
    low, high = x.chunk(2, dim=-1)
    return x * rope[0].to(x.dtype) + torch.cat((-high, low), dim=-1) * rope[1].to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(D, H * E, bias=False)
        self.k_proj = nn.Linear(D, K * E, bias=False)
        self.v_proj = nn.Linear(D, K * E, bias=False)
        self.o_proj = nn.Linear(H * E, D, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Any:
        projections = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (projected.view(*x.shape[:2], -1, E).transpose(1, 2) for projected in projections)  # [B, H|K, T, E]
        q, k = rotate(q, rope), rotate(k, rope)
        k, v = k.repeat_interleave(H // K, dim=1), v.repeat_interleave(H // K, dim=1)  # [B, H, T, E]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(D, MLP_SIZE, bias=False)
        self.up_proj = nn.Linear(D, MLP_SIZE, bias=False)
        self.down_proj = nn.Linear(MLP_SIZE, D, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(D, NORM_EPS), nn.RMSNorm(D, NORM_EPS)
        self.self_attn, self.mlp, self.dropout = Attention(), MLP(), nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Any:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), rope))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Llama(nn.Module):
    """Token ids [B, T] to logits [B, T, V]; the output projection is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.embed_tokens, self.layers, self.norm = nn.Embedding(V, D), layers, nn.RMSNorm(D, NORM_EPS)
        self.dropout = nn.Dropout(DROPOUT)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if into_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x, rope = self.dropout(self.embed_tokens(tokens)), rope_tables(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, rope)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def train_tokenizer(text: str) -> Tokenizer:
    cut = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = byte_level.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=V, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


class Play:
    """The tokenized speeches of a text, in their order."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self.characters = len(text)
        self.speech_break = tokenizer.encode(SPEECH_BREAK).ids
        speeches = [speech for speech in text.split(SPEECH_BREAK) if speech.strip()]
        self.speeches = [encoding.ids for encoding in tokenizer.encode_batch(speeches)]

    def stream(self, rng: random.Random) -> Tensor:
        """All speeches as one stream [tokens], cut into documents of random length by the end token."""
        stream = [END_ID]
        for speech in self.speeches:
            stream += speech
            stream += [END_ID] if rng.random() < END_PROBABILITY else self.speech_break
        return torch.tensor(stream)


def batches(play: Play, steps: int, seed: int) -> Iterator[Tensor]:
    """Random windows [B, T + 1]: mostly short, past 1,024 positions in the last fifth; an epoch redraws its ends."""
    rng, remaining, stream = random.Random(seed), 0, torch.empty(0)
    for step in range(steps):
        if remaining <= 0:
            stream = play.stream(rng)
            remaining = len(stream)
        count, length = (3, 1280) if step >= 0.8 * steps else (8, 512) if step % 4 == 0 else (16, 256)
        starts = [rng.randrange(len(stream) - length) for _ in range(count)]
        yield torch.stack([stream[start : start + length + 1] for start in starts])
        remaining -= count * length


def learning_rate(step: int, steps: int) -> float:
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / (steps - WARMUP_STEPS)
    return PEAK_LR * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def token_loss(model: Llama, window: Tensor, reduction: str = "mean") -> Tensor:
    logits = model(window[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(model: Llama, stream: Tensor) -> float:
    """Nats per token over the whole stream, in windows that each start without context."""
    model.eval()
    starts = range(0, len(stream) - 1, EVALUATION_WINDOW)
    windows = [stream[None, start : start + EVALUATION_WINDOW + 1] for start in starts]
    total = sum(token_loss(model, window, "sum").item() for window in windows)
    model.train()
    return total / (len(stream) - 1)


def write(path: Path, content: bytes | dict[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content if isinstance(content, bytes) else (json.dumps(content, indent=2) + "\n").encode())
    os.replace(partial, path)


class Run:
    """One training run: its model, its held-out text, and the folder that keeps the best weights and the losses."""

    def __init__(self, out: Path, held_out: Play, steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model, self.out, self.steps, self.best = Llama(), out, steps, math.inf
        self.held_out, self.characters = held_out.stream(random.Random(0)), held_out.characters
        self.log: dict[str, Any] = {"steps": steps, "seed": seed, "evaluations": []}
        self.started_s = time.monotonic()

    def train(self, batches: Iterator[Tensor]) -> None:
        losses: list[float] = []
        optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True)
        for step, window in enumerate(batches):
            optimizer.param_groups[0]["lr"] = learning_rate(step, self.steps)
            with torch.autocast("cpu", torch.bfloat16):
                loss = token_loss(self.model, window)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            if (step + 1) % EVALUATE_EVERY == 0 or step + 1 == self.steps:
                self.keep_if_better(step + 1, train_loss=sum(losses) / len(losses))
                losses.clear()

    def keep_if_better(self, step: int, train_loss: float) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = evaluate(self.model, self.held_out)
        row = {"step": step, "train_loss": round(train_loss, 4), "held_out_loss": round(loss, 4)}
        self.log["evaluations"].append(row)
        if loss < self.best:
            self.best = loss
            weights = {f"model.{name}": weight.bfloat16() for name, weight in self.model.state_dict().items()}
            write(self.out / "model.safetensors", save(weights, metadata={"format": "pt"}))
        self.write_log(self.best)
        print(row, f"{self.log['elapsed_s']} s", flush=True)

    def finish(self) -> None:
        """Measures the exported weights, bfloat16 roundings included, in float32 arithmetic."""
        weights = load_file(self.out / "model.safetensors")
        self.model.load_state_dict({name.removeprefix("model."): weight for name, weight in weights.items()})
        self.write_log(evaluate(self.model, self.held_out))

    def write_log(self, loss: float) -> None:
        nats_per_character = loss * (len(self.held_out) - 1) / self.characters
        self.log |= {
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "held_out_tokens": len(self.held_out) - 1,
            "held_out_characters": self.characters,
            "held_out_loss_per_token": round(loss, 4),
            "held_out_nats_per_character": round(nats_per_character, 4),
            "held_out_bits_per_character": round(nats_per_character / math.log(2), 4),
            "elapsed_s": round(time.monotonic() - self.started_s),
        }
        write(self.out / "training_log.json", self.log)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny-shakespeare checkpoint on one CPU core.")
    parser.add_argument("--text", type=Path, required=True, help="the tiny-shakespeare text")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text, out = arguments.text.read_text(), arguments.out
    split = text.rfind(SPEECH_BREAK, 0, len(text) * 9 // 10) + len(SPEECH_BREAK)
    tokenizer = train_tokenizer(text[:split])
    out.mkdir(parents=True, exist_ok=True)
    write(out / "config.json", CONFIG)
    write(out / "generation_config.json", GENERATION_CONFIG)
    write(out / "tokenizer_config.json", TOKENIZER_CONFIG)
    write(out / "tokenizer.json", (tokenizer.to_str(pretty=True) + "\n").encode())
    run = Run(out, Play(tokenizer, text[split:].rstrip()), arguments.steps, arguments.seed)
    run.train(batches(Play(tokenizer, text[:split]), arguments.steps, arguments.seed))
    run.finish()


if __name__ == "__main__":
    main()
