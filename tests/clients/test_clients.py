"""Frameworks that call FSDP2 run unchanged on fsdp2, with torch's losses to the bit.

Each test runs one script of `scripts/` twice, on CPU ranks of gloo; `launch` says how. They are not
in the default run: ``pytest -m clients tests/clients``.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.clients.launch import check, finished

pytestmark = pytest.mark.clients

ACCELERATE, LIGHTNING = "with_accelerate.py", "with_lightning.py"
TRAINER, LIBRARIES = "with_trainer.py", "with_libraries.py"

CLIENTS: dict[str, tuple[str, str, str]] = {
    # Clipping, accumulation, bf16, a checkpoint, tied weights that rank 0 loads, recomputation.
    "accelerate": (
        "accelerate transformers",
        ACCELERATE,
        "plain accumulated mixed resumed tied recomputed",
    ),
    "accelerate compiled": ("accelerate transformers", ACCELERATE, "compiled"),
    "accelerate, FSDP1": (
        "accelerate transformers",
        ACCELERATE,
        "one_accumulated one_recomputed one_mixed one_upcast",
    ),
    # Full fine-tuning with generation and a gathered save, accumulation, bf16, resumption.
    "Trainer": ("accelerate transformers", TRAINER, "full accumulated mixed resumed"),
    "Trainer with LoRA": ("accelerate transformers peft", TRAINER, "lora"),
    "Trainer, FSDP1": ("accelerate transformers", TRAINER, "one"),
    # With DPO and LoRA, the reference forward freezes adapters between forward and backward.
    **{
        f"trl {case}": ("trl peft", TRAINER, case)
        for case in ("sft", "sft_lora", "dpo", "dpo_lora", "grpo")
    },
    "Fabric": ("lightning transformers", LIGHTNING, "fabric"),
    "Fabric, FSDP1": ("lightning transformers", LIGHTNING, "one_fabric"),
    "Lightning": ("lightning transformers", LIGHTNING, "trainer accumulated"),
    # It resumes from a sharded checkpoint.
    "Lightning, FSDP1": ("lightning transformers", LIGHTNING, "one_trainer"),
    # Sharded on the meta device, then filled by a loader that replaces parameters.
    "transformers": (
        "transformers",
        LIBRARIES,
        "transformers_plain transformers_mixed transformers_tied",
    ),
    # Adapters stay plain tensors of each rank: both implementations leave them alone.
    "LoRA on a sharded model": ("transformers peft", LIBRARIES, "transformers_lora"),
    # Its helpers shard, load, clip, prefetch, move the model, and change what forward leaves.
    "verl": ("transformers peft verl", "with_verl.py", "plain mixed placed prefetched resharding"),
    # Its parallelizer, units by compute dtype, and gradients that are reduced by hand.
    "NeMo Automodel": ("transformers nemo_automodel", "with_nemo.py", "layers by_dtype hooks"),
    # Its train module: made on the meta device, bf16, prefetched; its own clipping.
    "OLMo-core full": ("olmo_core", LIBRARIES, "olmo_full"),  # its mesh can be made once
    "OLMo-core blocks": ("olmo_core", LIBRARIES, "olmo_blocks"),
    # Optimizers, loaders, losses and models around what `fully_shard` sharded.
    **{
        case: (f"{package} transformers", LIBRARIES, case)
        for package, cases in {
            "schedulefree": "schedulefree",
            "torchdata": "torchdata",
            "sentence_transformers": "sentences",
            "torchao": "int8 bitnet float8",
        }.items()
        for case in cases.split()
    },
    # Beside the same over the unsharded model; both implementations behave alike.
    **{
        f"{case} over parameters": (package, "with_optimizers.py", case)
        for package, cases in {
            "torchao": "torchao8 torchao4 torchao_fp8 torchao_offload",
            "bitsandbytes": "bitsandbytes",
            "schedulefree": "schedulefree",
            "heavyball": "heavyball",
        }.items()
        for case in cases.split()
    },
}
"""What each needs, its script, and the cases that one launch runs in turn."""

STARTED: dict[str, tuple[str, str]] = {
    # Without torchrun: rank 0 is the script, the others are processes that it starts.
    **dict.fromkeys(("fabric", "trainer"), ("lightning transformers", LIGHTNING)),
    **dict.fromkeys(("spawn", "fork", "popen", "torchrun"), ("", "with_launchers.py")),
    "accelerates": ("accelerate", "with_launchers.py"),
    # With a ``runtime_env`` whose setup hook installs fsdp2 in each worker.
    **dict.fromkeys(("ray_actors", "ray_trainer"), ("ray", "with_ray.py")),
}
"""Scripts that start their two ranks themselves."""


def _needs(packages: str) -> None:
    """Some cannot be imported as a whole: they are there without what they need."""
    for package in packages.split():
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("client", CLIENTS)
def test_same_losses(client: str) -> None:
    packages, script, cases = CLIENTS[client]
    _needs(packages)
    check(script, *cases.split())


def test_diffusers() -> None:
    """An embedding goes into every block of Flux. torch sums its gradients block by block, fsdp2 in
    autograd's order, as the unsharded model does: losses differ by that rounding.
    """
    _needs("diffusers")
    check(LIBRARIES, "diffusion", rtol=1e-5)


@pytest.mark.parametrize("package", ["torchao", "bitsandbytes", "schedulefree", "heavyball"])
def test_optimizers_over_flat_shards(package: str) -> None:
    _needs(package)
    finished("with_optimizers.py", f"flat_{package}")


@pytest.mark.parametrize("case", STARTED)
def test_ranks_that_a_script_starts(case: str) -> None:
    packages, script = STARTED[case]
    _needs(packages)
    check(script, case, alone=True)


@pytest.mark.parametrize("case", ["hooked", "local_sgd", "diloco"])
def test_torchft(case: str) -> None:
    """Two replica groups: sharded within, averaged across; one joins with other parameters."""
    _needs("torchft")
    check("with_torchft.py", case, ranks=4, alone=True)


def test_pipelining() -> None:
    """2 stages a rank where the schedule is looped; 2 shards each."""
    schedules = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
    check("with_pipelining.py", *(f"Schedule{name}" for name in schedules), ranks=4)
