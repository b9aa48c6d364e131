"""Train the demo model on one CPU core within a time budget.

    python -m ops.demo_model.train --minutes 95 --work /tmp/demo-train
    python -m ops.demo_model.train --minutes 95 --work /tmp/demo-train --resume
    python -m ops.demo_model.train --work /tmp/demo-train --export-only

Progress is measured in time, not in steps. The learning rate and the curriculum of lengths both
follow it, so a busy machine takes fewer steps but still finishes the schedule.
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ops.demo_model import corpus, tokenizer, warm_start
from ops.demo_model.measure import recall_accuracy
from ops.demo_model.pieces import END_OF_TEXT, IM_END
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WEIGHTS = Path(__file__).parent / "weights"

# The progress at which each stage begins, and the shares of its row lengths. Copying is learnt on
# short rows, where steps are cheap and the line asked for is near, then extended to longer ones.
# Short rows stay the most frequent: when long ones prevailed, the model forgot within ten minutes.
CURRICULUM: tuple[tuple[float, dict[int, int]], ...] = (
    (0.0, {64: 1}),
    (0.05, {64: 1, 128: 2}),
    (0.14, {64: 1, 128: 2, 256: 6}),
    (0.30, {128: 2, 256: 4, 512: 6}),
    (0.45, {256: 9, 512: 6, 1024: 4, 2048: 1}),
)
STEP_TOKENS = 2048  # per step, but at least one row
MUON_RATE, ADAMW_RATE = 7e-3, 3e-3
WARMUP, DECAY_FROM = 0.015, 0.5  # shares of progress: constant in between, then decaying
WEIGHT_DECAY = 0.05
GRADIENT_NORM_MAX = 1.0
CHECKPOINT_SECONDS = 180.0
REPORT_SECONDS = 30.0
PROBE_SECONDS = 400.0
PROBE_GAPS = (100, 250, 500, 1000)


@dataclass(slots=True)
class Run:
    """The state of a training run that a checkpoint holds besides the tensors."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0


def say(message: str) -> None:
    """One line of progress."""
    sys.stdout.write(message + "\n")
    sys.stdout.flush()


def model_config(tokens: PreTrainedTokenizerFast) -> LlamaConfig:
    """The architecture: four Llama layers, four query heads on two key/value heads."""
    return LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=tokenizer.POSITIONS_MAX,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokens.convert_tokens_to_ids(IM_END),
        pad_token_id=tokens.convert_tokens_to_ids(END_OF_TEXT),
    )


def row_length(progress: float, step: int) -> int:
    """The length of the rows of this step."""
    stage = bisect.bisect_right([start for start, _ in CURRICULUM], progress) - 1
    shares = CURRICULUM[stage][1]
    return corpus.generator("row length", step).choices(list(shares), list(shares.values()))[0]


def rate_scale(progress: float) -> float:
    """Scale of the learning rates: warm-up, constant, then cosine decay."""
    if progress < WARMUP:
        return progress / WARMUP + 0.02
    past = max(0.0, (progress - DECAY_FROM) / (1.0 - DECAY_FROM))
    return 0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * min(past, 1.0)))


def batch(
    tokens: PreTrainedTokenizerFast, step: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids `[rows, length + 1]` and loss weights of the same shape, determined by the step."""
    row_count = max(1, STEP_TOKENS // length)
    all_ids, all_weights = [], []
    for index in range(row_count):
        rng = corpus.generator(corpus.TRAIN_SEED, step * 64 + index)
        ids: list[int] = []
        weights: list[float] = []
        for document in corpus.row(rng, length, 0.8 if length <= 256 else corpus.RECALL_SHARE):
            more_ids, more_weights = tokenizer.encode(tokens, document)
            ids += more_ids
            weights += more_weights
            if len(ids) > length:
                break
        all_ids.append(ids[: length + 1])
        all_weights.append(weights[: length + 1])
    return torch.tensor(all_ids), torch.tensor(all_weights)


class Optimizers:
    """Muon for the matrices of the layers, AdamW for embeddings and norms.

    In short trials the loss fell several times faster than with AdamW alone.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.dim() == 2 and "embed" not in name]
        others = [p for name, p in named if p.dim() != 2 or "embed" in name]
        self._muon = torch.optim.Muon(
            matrices,
            lr=MUON_RATE,
            weight_decay=WEIGHT_DECAY,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        )
        self._adamw = torch.optim.AdamW(
            others, lr=ADAMW_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, scale: float) -> None:
        """Update at `scale` times the full learning rates and clear the gradients."""
        for optimizer, rate in ((self._muon, MUON_RATE), (self._adamw, ADAMW_RATE)):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()  # type: ignore[no-untyped-call]
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        """The state for a checkpoint."""
        return [self._muon.state_dict(), self._adamw.state_dict()]

    def load(self, state: list[dict[str, Any]]) -> None:
        """Restore the state from a checkpoint."""
        self._muon.load_state_dict(state[0])
        self._adamw.load_state_dict(state[1])


def train_step(
    model: LlamaForCausalLM,
    optimizer: Optimizers,
    scale: float,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> float:
    """One update; returns the weighted mean loss in nats."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    losses = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    counted = weights[:, 1:].flatten()
    loss = (losses * counted).sum() / counted.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
    optimizer.step(scale)
    return loss.item()


def save_checkpoint(folder: Path, model: LlamaForCausalLM, optimizer: Optimizers, run: Run) -> None:
    """Replace the checkpoint atomically, so that a kill leaves a whole file."""
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state(),
        "run": [run.step, run.seconds, run.tokens],
    }
    torch.save(state, folder / "checkpoint.new")
    os.replace(folder / "checkpoint.new", folder / "checkpoint.pt")


def load_checkpoint(folder: Path, model: LlamaForCausalLM, optimizer: Optimizers | None) -> Run:
    """Fill model and optimizer from the last checkpoint."""
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load(state["optimizer"])
    step, seconds, tokens = state["run"]
    return Run(step, seconds, tokens)


def export(model: LlamaForCausalLM, tokens: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save an ordinary Hugging Face folder in bfloat16; the model itself stays float32."""
    copied = LlamaForCausalLM(model.config)
    copied.load_state_dict(model.state_dict())
    copied.generation_config = GenerationConfig(
        eos_token_id=[
            tokens.convert_tokens_to_ids(IM_END),
            tokens.convert_tokens_to_ids(END_OF_TEXT),
        ],
        pad_token_id=tokens.convert_tokens_to_ids(END_OF_TEXT),
        do_sample=False,
    )
    copied.to(torch.bfloat16).save_pretrained(folder)
    tokens.save_pretrained(folder, save_jinja_files=False)


def report(
    run: Run, progress: float, length: int, losses: list[float], started_tokens: int, since: float
) -> None:
    """One line: loss and speed since the last line."""
    minutes = run.seconds / 60
    speed = (run.tokens - started_tokens) / max(since, 1e-9)
    mean = sum(losses) / len(losses)
    say(
        f"{minutes:6.1f} min  step {run.step:6d}  {100 * progress:5.1f} %  rows {length:4d}"
        f"  loss {mean:.4f}  {speed:6.0f} tok/s  {run.tokens / 1e6:6.2f} M tokens"
    )


def report_recall(model: LlamaForCausalLM, tokens: PreTrainedTokenizerFast, probes: int) -> None:
    """One line: exact answers by distance, on held-out documents."""
    found = recall_accuracy(model, tokens, PROBE_GAPS, probes, "watch")
    say("  recall  " + "  ".join(f"{gap}: {100 * share:.0f} %" for gap, share in found.items()))


def loop(
    model: LlamaForCausalLM,
    optimizer: Optimizers,
    tokens: PreTrainedTokenizerFast,
    run: Run,
    budget_seconds: float,
    folder: Path,
) -> None:
    """Train until the budget is spent."""
    began = time.monotonic() - run.seconds
    last_report = last_save = last_probe = run.seconds
    losses: list[float] = []
    reported_tokens = run.tokens
    while run.seconds < budget_seconds:
        progress = run.seconds / budget_seconds
        length = row_length(progress, run.step)
        ids, weights = batch(tokens, run.step, length)
        losses.append(train_step(model, optimizer, rate_scale(progress), ids, weights))
        run.step += 1
        run.tokens += ids.shape[0] * length
        run.seconds = time.monotonic() - began
        if run.seconds - last_report > REPORT_SECONDS:
            report(run, progress, length, losses, reported_tokens, run.seconds - last_report)
            last_report, reported_tokens, losses = run.seconds, run.tokens, []
        if run.seconds - last_probe > PROBE_SECONDS:
            report_recall(model, tokens, 10)
            last_probe = run.seconds
        if run.seconds - last_save > CHECKPOINT_SECONDS:
            save_checkpoint(folder, model, optimizer, run)
            last_save = run.seconds
    save_checkpoint(folder, model, optimizer, run)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=95.0, help="training time in all")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, default=WEIGHTS, help="folder for the finished model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1, help="of the first weights")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--export-only", action="store_true", help="write the last checkpoint out")
    return parser.parse_args()


def _tokenizer(folder: Path, resumed: bool) -> PreTrainedTokenizerFast:
    """The run's tokenizer. It is trained once: retrained on a changed corpus, it would assign other
    ids."""
    if not resumed:
        tokenizer.train(corpus.sample_texts(6000)).save_pretrained(folder, save_jinja_files=False)
    return tokenizer.load(folder)


def main() -> None:
    """Train, then export."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    arguments.work.mkdir(parents=True, exist_ok=True)
    resumed = arguments.resume or arguments.export_only
    tokens = _tokenizer(arguments.work / "tokenizer", resumed)
    model = LlamaForCausalLM(model_config(tokens))
    warm_start.set_copying_heads(model)
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokens)} token ids")
    optimizer = Optimizers(model)
    run = Run()
    if resumed:
        run = load_checkpoint(arguments.work, model, optimizer)
    if not arguments.export_only:
        loop(model, optimizer, tokens, run, arguments.minutes * 60.0, arguments.work)
        report_recall(model, tokens, 20)
    export(model, tokens, arguments.out)
    record = {"steps": run.step, "minutes": round(run.seconds / 60, 1), "tokens": run.tokens}
    (arguments.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    say(f"exported to {arguments.out}")


if __name__ == "__main__":
    main()
