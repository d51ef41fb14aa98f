"""Frameworks that call FSDP2 run unchanged on fsdp2, with torch's losses to the bit.

Each test runs one script of `scripts/` twice, on CPU ranks of gloo; `launch` says how. They are not
in the default run: ``pytest -m clients tests/clients``.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.clients.launch import check, check_ours, check_started

pytestmark = pytest.mark.clients


def _needs(*packages: str) -> None:
    for package in packages:
        pytest.importorskip(package)


def _needs_installed(package: str) -> None:
    """As `_needs`, of one that cannot be imported as a whole: it is there without what it needs."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def test_accelerate() -> None:
    """Clipping, accumulation, bf16, a checkpoint, tied weights that rank 0 loads, recomputation."""
    _needs("accelerate", "transformers")
    check("with_accelerate.py", "plain", "accumulated", "mixed", "resumed", "tied", "recomputed")


def test_accelerate_compiled() -> None:
    _needs("accelerate", "transformers")
    check("with_accelerate.py", "compiled")


def test_transformers_trainer() -> None:
    """Full fine-tuning with generation and a gathered save, accumulation, bf16, resumption."""
    _needs("accelerate", "transformers")
    check("with_trainer.py", "full", "accumulated", "mixed", "resumed")


def test_transformers_trainer_with_lora() -> None:
    _needs("accelerate", "transformers", "peft")
    check("with_trainer.py", "lora")


def test_transformers_own_sharding() -> None:
    """Sharded on the meta device, then filled by a loader that replaces parameters."""
    _needs("transformers")
    check("with_transformers.py", "plain", "mixed", "tied")


def test_lora_on_a_model_that_is_sharded_already() -> None:
    """Adapters stay plain tensors of each rank: both implementations leave them alone."""
    _needs("transformers", "peft")
    check("with_transformers.py", "lora")


def test_lightning_fabric() -> None:
    _needs("lightning", "transformers")
    check("with_lightning.py", "fabric")


def test_lightning_trainer() -> None:
    _needs("lightning", "transformers")
    check("with_lightning.py", "trainer", "accumulated")


def test_fsdp1() -> None:
    """accelerate with ``fsdp_version=1``, the Trainer with ``fsdp="full_shard auto_wrap"``."""
    _needs("accelerate", "transformers")
    check("with_fsdp1.py", "accelerate", "recomputed", "mixed", "upcast", "trainer")


@pytest.mark.parametrize("case", ["lightning", "lightning_trainer"])
def test_lightning_fsdp1(case: str) -> None:
    """Its FSDPStrategy, in Fabric and in the Trainer, which resumes from a sharded checkpoint."""
    _needs("lightning", "transformers")
    check("with_fsdp1.py", case)


def test_verl() -> None:
    """Its helpers shard, load, clip, prefetch, move the model, and change what forward leaves."""
    _needs("transformers", "peft")
    _needs_installed("verl")
    check("with_verl.py", "plain", "mixed", "placed", "prefetched", "resharding")


def test_nemo_automodel() -> None:
    """Its parallelizer, units by compute dtype, and gradients that are reduced by hand."""
    _needs("transformers")
    _needs_installed("nemo_automodel")
    check("with_nemo.py", "layers", "by_dtype", "hooks")


@pytest.mark.parametrize("case", ["fabric", "trainer"])
def test_lightning_starts_its_own_ranks(case: str) -> None:
    """Without torchrun: rank 0 is the script, the others are processes that it starts."""
    _needs("lightning", "transformers")
    check_started("with_lightning.py", case)


@pytest.mark.parametrize("case", ["spawn", "fork", "popen", "torchrun", "accelerates"])
def test_ranks_that_a_script_starts(case: str) -> None:
    if case == "accelerates":
        _needs("accelerate")
    check_started("with_launchers.py", case)


@pytest.mark.parametrize("case", ["sft", "sft_lora", "dpo", "dpo_lora", "grpo"])
def test_trl(case: str) -> None:
    """With DPO and LoRA, the reference forward freezes adapters between forward and backward."""
    _needs("trl", "peft")
    check("with_trl.py", case)


@pytest.mark.parametrize(
    ("case", "package"),
    [
        ("schedulefree", "schedulefree"),
        ("torchdata", "torchdata"),
        ("sentences", "sentence_transformers"),
        ("int8", "torchao"),
        ("bitnet", "torchao"),
        ("float8", "torchao"),
        ("heavyball_adamw", "heavyball"),
        ("heavyball_soap", "heavyball"),
        ("heavyball_muon", "heavyball"),
    ],
)
def test_libraries(case: str, package: str) -> None:
    """Optimizers, loaders, losses and models around what `fully_shard` sharded."""
    _needs(package, "transformers")
    check("with_libraries.py", case)


@pytest.mark.parametrize(
    ("case", "package"),
    [
        ("torchao8", "torchao"),
        ("torchao4", "torchao"),
        ("torchao_fp8", "torchao"),
        ("torchao_offload", "torchao"),
        ("bitsandbytes", "bitsandbytes"),
        ("schedulefree", "schedulefree"),
        ("heavyball", "heavyball"),
    ],
)
def test_optimizers(case: str, package: str) -> None:
    """Beside the same over the unsharded model; both implementations behave alike."""
    _needs(package)
    check("with_optimizers.py", case)


@pytest.mark.parametrize("package", ["torchao", "bitsandbytes", "schedulefree", "heavyball"])
def test_optimizers_over_flat_shards(package: str) -> None:
    _needs(package)
    check_ours("over_flat_shards.py", package)


def test_diffusers() -> None:
    """An embedding goes into every block of Flux. torch sums its gradients block by block, fsdp2 in
    autograd's order, as the unsharded model does: losses differ by that rounding.
    """
    _needs("diffusers")
    check("with_libraries.py", "diffusion", rtol=1e-5)


@pytest.mark.parametrize("case", ["full", "blocks"])
def test_olmo_core(case: str) -> None:
    """Its train module: made on the meta device, bf16, prefetched; its own clipping."""
    _needs("olmo_core")
    check("with_olmo_core.py", case)


@pytest.mark.parametrize("case", ["hooked", "local_sgd", "diloco"])
def test_torchft(case: str) -> None:
    """Two replica groups: sharded within, averaged across; one joins with other parameters."""
    _needs("torchft")
    check_started("with_torchft.py", case, ranks=4)


@pytest.mark.parametrize("case", ["actors", "trainer"])
def test_ranks_that_ray_starts(case: str) -> None:
    """With a ``runtime_env`` whose setup hook installs fsdp2 in each worker."""
    _needs("ray")
    check_started("with_ray.py", case)


def test_pipelining() -> None:
    """2 stages a rank where the schedule is looped; 2 shards each."""
    check(
        "with_pipelining.py",
        "ScheduleGPipe",
        "Schedule1F1B",
        "ScheduleInterleaved1F1B",
        "ScheduleInterleavedZeroBubble",
        ranks=4,
    )
