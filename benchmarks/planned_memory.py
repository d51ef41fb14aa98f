"""Planned and measured peak memory of models that are not `train_lm`, on two ranks of gloo.

    python benchmarks/planned_memory.py                             # every model, and recomputed
    python benchmarks/planned_memory.py --only LSTM --rounds 1
    python benchmarks/planned_memory.py --json FILE

Each model is planned for two ranks of a CPU, and trained there with AdamW, of one thread per rank.
The peak is the most bytes that torch's CPU allocator has given out at once in a step, of
parameters, optimizer states and the batch too. What oneDNN takes for its own formats and workspaces
comes from that allocator, and counts; what libraries take from the system beside it does not.

Gloo gathers into a copy of its own, at some time between the launch and the wait, while the next
unit computes. A plan counts it for all of that time. In a run it is there at a peak, or not: so the
most of eight steps on both ranks counts, and a measured peak may be less than the planned one by
one such copy. `error` compares with the plan, `outside` with all that this timing allows. Several
rounds give their median.

Rows of transformers' models are left out where that is not installed.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import models, workers
from benchmarks.cpu_memory import CountedMemory, build
from fsdp2.planning import Hardware, Plan, Settings, plan
from fsdp2.planning.hardware import load
from fsdp2.planning.rehearsal import policy_of, shard_as_planned
from fsdp2.record.notes import Operation

RANKS, WARM_UP, STEPS = 2, 2, 8
RECOMPUTED = ", recomputed"
TIMEOUT = datetime.timedelta(seconds=120)

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Subject:
    """What is planned, and trained.

    Attributes:
        make: the model.
        batch: of one rank.
        units: classes of modules that become units.
        loss: of the model and a batch.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    units: tuple[type[nn.Module] | str, ...]
    loss: Loss


# ---------------------------------------------------------------------------------------------
# Models


class Residual(nn.Module):
    """A residual block of two linear layers behind a norm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return done


class Bottleneck(nn.Module):
    """Two convolutions with batch norms, and a shortcut: a block of ResNet-18."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(width, out, 1, stride) if width != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x))


class Separable(nn.Module):
    """A depthwise convolution, a group norm and two pointwise convolutions: as in ConvNeXt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.GroupNorm(1, width)
        self.up = nn.Conv2d(width, 4 * width, 1)
        self.down = nn.Conv2d(4 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = x + self.down(F.gelu(self.up(self.norm(self.depthwise(x)))))
        return done


class Plain(nn.Module):
    """A convolution and a ReLU."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, out, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x))


class Audio(nn.Module):
    """A convolution in one dim, as of audio."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 5, padding=2)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = x + F.gelu(self.norm(self.conv(x)))
        return done


def images(first: int, width: int, blocks: Sequence[nn.Module], out: int) -> nn.Module:
    """A classifier of images."""
    stem = nn.Conv2d(first, width, 3, padding=1)
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(out, 10))


class Recurrent(nn.Module):
    """An embedding, recurrent layers and an output projection."""

    def __init__(self, kind: type[nn.RNNBase], dim: int, both: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, dim)
        width = dim // 2 if both else dim
        self.layers = nn.ModuleList(
            kind(dim, width, 2, batch_first=True, bidirectional=both) for _ in range(2)
        )
        self.output = nn.Linear(dim, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)[0]
        done: Tensor = self.output(x)
        return done


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean square of what comes out."""
    found: Tensor = model(batch).float().square().mean()
    return found


def next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of logits, of each token or image."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, -2), targets.flatten())


def of_transformers(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss that the model itself computes."""
    found: Tensor = model(**batch).loss
    return found


def text(count: int, length: int, vocab: int) -> tuple[Tensor, Tensor]:
    tokens = (torch.arange(count * length) % vocab).view(count, length)
    return tokens, tokens.clone()


def pictures(count: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(count, 3, size, size), torch.arange(count) % 10


LLAMA = models.LlamaConfig(256, 4, 704, 2048, 8, 4, batch=4, seq=128)


def subjects() -> dict[str, Subject]:
    """The models, by name."""

    def decoder(config: models.LlamaConfig, block: type[nn.Module]) -> Subject:
        given = (config.batch, config.seq, config.vocab)
        return Subject(lambda: models.Llama(config), lambda: text(*given), (block,), next_token)

    def recurrent(kind: type[nn.RNNBase], both: bool = False) -> Subject:
        make = lambda: Recurrent(kind, 128, both)  # noqa: E731  # as the others
        return Subject(make, lambda: text(16, 64, 1000), (kind,), next_token)

    def classifier(make: Callable[[], nn.Module], unit: type[nn.Module], size: int) -> Subject:
        return Subject(make, lambda: pictures(16, size), (unit,), next_token)

    def stages() -> nn.Module:
        widths = ((32, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 2))
        return images(3, 32, [Bottleneck(*each) for each in widths], 256)

    def encoder() -> nn.Module:
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
        return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    return {
        "MLP": Subject(
            lambda: nn.Sequential(*(Residual(256) for _ in range(6))),
            lambda: torch.zeros(512, 256),
            (Residual,),
            squared,
        ),
        "Llama": decoder(LLAMA, models.LlamaBlock),
        "mixture of experts": decoder(replace(LLAMA, ffn=256, experts=8), models.MoEBlock),
        "transformer encoder": Subject(
            encoder, lambda: torch.zeros(8, 128, 128), (nn.TransformerEncoderLayer,), squared
        ),
        "conv net": classifier(
            lambda: images(3, 16, [Plain(16, 32), Plain(32, 64)], 64), Plain, 32
        ),
        "ResNet": classifier(stages, Bottleneck, 32),
        "ConvNeXt": classifier(
            lambda: images(3, 32, [Separable(32) for _ in range(3)], 32), Separable, 16
        ),
        "convolutions of audio": Subject(
            lambda: nn.Sequential(*(Audio(128) for _ in range(4))),
            lambda: torch.zeros(8, 128, 256),
            (Audio,),
            squared,
        ),
        "LSTM": recurrent(nn.LSTM),
        "LSTM in both directions": recurrent(nn.LSTM, both=True),
        "GRU": recurrent(nn.GRU),
        "RNN": recurrent(nn.RNN),
        **(_of_transformers() if importlib.util.find_spec("transformers") else {}),
    }


_WIDE = {
    **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "vocab_size": 2048},
}
_GROUPED = {**_WIDE, "num_key_value_heads": 4}
_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _GROUPED,
    "MixtralForCausalLM": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "BertForMaskedLM": _WIDE,
    "T5ForConditionalGeneration": {
        **{"d_model": 256, "d_ff": 512, "num_layers": 2, "num_heads": 8, "d_kv": 32},
        **{"vocab_size": 2048, "decoder_start_token_id": 0},
    },
    "ViTForImageClassification": {**_WIDE, "image_size": 64, "patch_size": 8},
}


def _of_transformers() -> dict[str, Subject]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers: Any = importlib.import_module("transformers")

    def subject(name: str, options: dict[str, Any]) -> Subject:
        kind = getattr(transformers, name)

        def batch() -> Batch:
            if "Image" in name:
                pixels, labels = pictures(8, 64)
                return {"pixel_values": pixels, "labels": labels % 2}
            tokens, labels = text(4, 128, 2048)
            return {"input_ids": tokens, "labels": labels}

        units = tuple(getattr(kind, "_no_split_modules", None) or ()) or ("BertLayer",)
        given = {**options, "use_cache": False}  # a cache cannot be recomputed
        make = lambda: kind(kind.config_class(**given)).train()  # noqa: E731  # as the others
        return Subject(make, batch, units, of_transformers)

    return {f"transformers' {name}": subject(name, it) for name, it in _CONFIGURATIONS.items()}


# ---------------------------------------------------------------------------------------------
# The plan


def machine() -> Hardware:
    """A CPU; of its figures none is about bytes."""
    return replace(load("epyc-2core"), memory=2**40, reserved=0)


def planned(subject: Subject, recompute: bool) -> Plan:
    """The step of two ranks, on paper."""
    return plan(
        subject.make,
        subject.batch,
        units=subject.units,
        mesh=RANKS,
        hardware=machine(),
        loss=subject.loss,
        checkpointing=recompute,
    )


# ---------------------------------------------------------------------------------------------
# In a worker


def make_worker(spec: dict[str, Any]) -> workers.Handler:
    workers.join_ranks(spec, RANKS, TIMEOUT)
    memory = CountedMemory()
    known = subjects()

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        gc.collect()
        return {"peak": measured(known[request["subject"]], request["recompute"], memory)}

    return handle


def measured(subject: Subject, recompute: bool, memory: CountedMemory) -> int:
    """Bytes at the peak of steps that follow some others."""
    mesh = init_device_mesh("cpu", (RANKS,))
    model = subject.make()
    settings = Settings(mesh=(RANKS,), checkpointing=recompute)
    shard_as_planned(model, mesh, settings, policy_of(subject.units))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = subject.batch()
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            memory.peak()
        subject.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return memory.peak()


# ---------------------------------------------------------------------------------------------
# Side by side


@dataclass(frozen=True)
class Row:
    """One model.

    Attributes:
        model: its name.
        planned: bytes.
        copy: bytes of the plan's largest all-gather, which gloo may have copied at the peak or not.
        measured: bytes, the median over rounds.
        rounds: each of them.
    """

    model: str
    planned: int
    copy: int
    measured: float
    rounds: Sequence[int]

    @property
    def error(self) -> float:
        """Of the plan, as a part of what was measured."""
        return self.planned / self.measured - 1

    @property
    def outside(self) -> float:
        """How far the measured peak is from all peaks that timing allows, as a part of itself."""
        nearest = min(max(self.measured, self.planned - self.copy), self.planned)
        return abs(nearest / self.measured - 1)


def compare(only: str, rounds: int) -> list[Row]:
    """Plan each model, then train it."""
    cases = {
        name + RECOMPUTED * recompute: (name, recompute)
        for name in subjects()
        for recompute in (False, True)
        if only in name + RECOMPUTED * recompute
    }
    said = {
        label: planned(subjects()[name], recompute) for label, (name, recompute) in cases.items()
    }
    seen: dict[str, list[int]] = {label: [] for label in cases}
    build()
    with workers.rank_pools("planned_memory", {"ranks": {}}, RANKS) as pool:
        for _ in range(rounds):
            for label, (name, recompute) in cases.items():
                answer = pool["ranks"].ask(subject=name, recompute=recompute)
                seen[label].append(answer["peak"])
    return [
        Row(
            label,
            said[label].memory.peak.live,
            largest_gather(said[label]),
            statistics.median(found),
            found,
        )
        for label, found in seen.items()
    ]


def largest_gather(plan: Plan) -> int:
    """Bytes of the largest all-gather of a step."""
    notes = plan.rehearsal.recording.notes
    return max(
        note.nbytes for note in notes if isinstance(note, Operation) and note.name == "all-gather"
    )


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| model | planned, MB | measured, MB | error |", "|---|---|---|---|"]
    lines += [
        f"| {row.model} | {row.planned / 1e6:.2f} | {row.measured / 1e6:.2f} | {row.error:+.1%} |"
        for row in rows
    ]
    within = sum(abs(row.error) <= 0.03 for row in rows)
    allowed = sum(row.outside <= 0.03 for row in rows)
    worst = max(abs(row.error) for row in rows)
    lines += [
        "",
        f"{within} of {len(rows)} within 3 %; the worst is off by {worst:.1%}. "
        f"{allowed} within 3 % of what the timing of gloo's copies allows.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default="", help="models with these words")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    rows = compare(args.only, args.rounds)
    print(table(rows))
    if args.json is not None:
        data = [{**asdict(row), "error": row.error} for row in rows]
        args.json.write_text(json.dumps(data, indent=2) + "\n")


if __name__ == "__main__":
    main()
