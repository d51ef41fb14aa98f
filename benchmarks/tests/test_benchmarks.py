"""The benchmarks' own arithmetic, and that they run. No timing is asserted here."""

import contextlib
import json
import math
import shutil
import subprocess
import sys

import pytest
import torch

from benchmarks import (
    compile,
    first_step,
    host_cost,
    instructions,
    kernels,
    megatron,
    optimizer,
    scaling,
    startup,
    stats,
    step,
    variants,
    workers,
)
from benchmarks.models import PRESETS
from fsdp2.testing.blocks import tiny_blocks
from fsdp2.testing.null_group import CallLog, null_world

needs_megatron = pytest.mark.skipif(
    not megatron.is_installed(), reason="megatron-fsdp is not installed"
)


def test_ratio_is_taken_round_by_round():
    # the machine was twice as slow in the second round
    ours, torchs, none = [3.0, 6.0, 3.0], [5.0, 10.0, 7.0], [1.0, 2.0, 1.0]
    summary = stats.ratio(stats.added(ours, none), stats.added(torchs, none))
    assert (summary.min, summary.median, summary.max) == (2 / 6, 0.5, 0.5)


def test_table_aligns():
    lines = stats.table(("variant", "ms"), [("none", 1), ("fsdp2", 20)]).splitlines()
    assert lines == ["variant  ms", "-------  --", "none      1", "fsdp2    20"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy DtoD (Device -> Device)", "memcpy, memset"),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "matmul"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128>>", "attention"),
        (
            "at::native::vectorized_elementwise_kernel<4, bfloat16_copy_kernel_cuda>",
            "copy, cast, cat",
        ),
        ("at::native::detail::chunk_cat_cuda_kernel<float, BFloat16>", "copy, cast, cat"),
        ("multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryOpFunctor>", "multi-tensor"),
        ("at::native::vectorized_elementwise_kernel<4, FillFunctor<float>>", "fill"),
        ("at::native::vectorized_elementwise_kernel<4, BinaryFunctor>", "elementwise"),
        ("something_new", "other"),
    ],
)
def test_kinds_of_kernels(name, kind):
    assert kernels.kind_of(name) == kind


def test_kernels_beyond_the_model_are_the_runtimes_own():
    none = {"sgemm": {"count": 4, "ms": 8.0}, "direct_copy": {"count": 1, "ms": 0.5}}
    sharded = {"sgemm": {"count": 4, "ms": 9.0}, "direct_copy": {"count": 3, "ms": 2.0}}
    assert kernels.runtimes_own(sharded, none) == {"count": 2, "ms": 1.5}
    assert "runtime's own (beyond none)" in kernels.report({"none": none, "fsdp2": sharded})


def test_one_model_serves_all_world_sizes():
    assert host_cost.parse([]).model == "tiny"
    assert host_cost.parse(["--world-size", "8,1024"]).model == "tall"


def test_host_cost_measures_larger_models_unless_one_is_given():
    assert host_cost.parse([]).scaling
    assert host_cost.parse(["--rounds", "3"]).scaling
    assert not host_cost.parse(["--blocks", "2"]).scaling
    assert not host_cost.parse(["--no-scaling"]).scaling
    options = host_cost.parse(["--rounds", "3", "--clock", "cpu", "--variants", "none,fsdp2,fsdp1"])
    like = host_cost.like(options)
    assert (like.rounds, like.clock, like.variants) == (3, "cpu", ["none", "fsdp2"])


def test_presets_have_the_parameters_they_are_named_for():
    assert round(PRESETS["1.1b"].parameters / 1e9, 2) == 1.10
    assert round(PRESETS["2.8b"].parameters / 1e9, 2) == 2.83


def test_cases_have_the_parameters_they_are_named_for():
    found = [case.parameters for case in scaling.CASES.values()]
    assert found == [288, 1152, 3200, 600, 288, 288, 416]
    case = scaling.CASES["300x1-3"].shrunk(60)
    assert case.parameters == 1 + 2 + 3 + 1 + 2
    model = tiny_blocks(case.blocks, case.params)
    assert len(list(model.parameters())) == case.parameters


def test_scaling_compares_what_is_added_a_block():
    few = {"none": [1.0], "torch": [11.0], "fsdp2": [2.0], "kept": [1.5]}
    many = {"none": [4.0], "torch": [54.0], "fsdp2": [8.0], "kept": [6.0]}
    sizes = {"32x9": {"blocks": 32}, "128x9": {"blocks": 128}}
    found = scaling.ratios({"32x9": few, "128x9": many}, sizes)
    assert {label: summary.median for label, summary in found.items()} == {
        "32x9: (fsdp2 - none) / (torch - none)": 0.1,
        "128x9: (fsdp2 - none) / (torch - none)": 0.08,
        "torch: added a block, 128x9 / 32x9": 1.25,
        "fsdp2: added a block, 128x9 / 32x9": 1.0,
        "32x9: (kept - none) / (torch - none)": 0.05,
        "128x9: (kept - none) / (torch - none)": 0.04,
        "kept: added a block, 128x9 / 32x9": 1.0,
    }


def test_start_up_is_sharding_and_the_first_step():
    rounds = {
        "torch": {part: [4.0] for part in (*startup.PARTS, startup.TOTAL)},
        "fsdp2": {part: [1.0] for part in (*startup.PARTS, startup.TOTAL)},
    }
    found = startup.ratios(rounds)
    assert next(iter(found)) == "fsdp2 / torch, shard + first"
    assert {summary.median for summary in found.values()} == {0.25}
    assert startup.ratios({"none": rounds["torch"], "fsdp2": rounds["fsdp2"]}) == {}


def test_instructions_of_a_part_are_those_between_its_marks(monkeypatch):
    marks, ran = [], 10
    for part in startup.PARTS:
        for end in (False, True):
            counts = {instructions.INSTRUCTIONS: ran * 10**6}
            marks.append(({"variant": "fsdp2", "part": part, "end": end}, counts))
            ran += 3 if not end else 1000  # what is between parts belongs to none
    monkeypatch.setattr(instructions, "counted", lambda script, specs: marks)
    found = startup.counted([{"variant": "fsdp2"}])
    wanted = {part: [3.0] for part in startup.PARTS}
    assert found == {"fsdp2": {**wanted, startup.TOTAL: [6.0]}}


def test_a_first_step_is_taken_apart():
    now = [0.0]

    def spend(seconds, *inside):
        def call():
            now[0] += seconds
            for each in inside:
                each()

        return call

    ledger = first_step.Ledger()
    outer, inner = list(first_step.PARTS)[:2]
    bound = ledger.noted(inner, spend(1.0))
    ledger.run(spend(4.0, ledger.noted(outer, spend(2.0, bound, bound)), bound), lambda: now[0])
    bound()  # nothing is noted any more
    found = {part: (ledger.calls.get(part), ledger.seconds[part]) for part in ledger.seconds}
    assert found.pop(outer) == (1, 2.0)  # without what is inside
    assert found.pop(inner) == (3, 3.0)
    assert found.pop(first_step.REST) == (None, 4.0)
    assert set(found.values()) == {(0, 0.0)}


def test_table_of_a_first_step():
    header, rows = first_step.table([("gathers", 4, 1.0), ("nothing", 0, 0.0), ("rest", 1, 3.0)])
    assert header == ("part", "calls", "ms", "us a call", "share")
    assert rows == [
        ("gathers", 4, "1.00", "250.0", "25%"),
        ("nothing", 0, "0.00", "", "0%"),
        ("rest", 1, "3.00", "3000.0", "75%"),
        ("all", "", "4.00", "", ""),
    ]


def test_a_step_is_compared_in_what_targets_are_stated_in():
    def figures(device, allocated, reserved):
        return {"device": [device], "host": [1.0], "allocated": [allocated], "reserved": [reserved]}

    rounds = {"none": figures(4.0, 8, 8), "torch": figures(6.0, 5, 10), "fsdp2": figures(5.0, 4, 9)}
    found = {label: summary.median for label, summary in step.ratios(rounds).items()}
    assert found == {
        "torch / none, device": 1.5,
        "fsdp2 / none, device": 1.25,
        "fsdp2 / torch, device": 5 / 6,
        "fsdp2 / torch, host": 1.0,
        "fsdp2 / torch, allocated": 0.8,
        "fsdp2 / torch, reserved": 0.9,
    }
    on_cpu = {label: {"wall": [2.0], "host": [1.0]} for label in ("torch", "kept")}
    assert list(step.ratios(on_cpu)) == ["kept / torch, wall", "kept / torch, host"]


@pytest.mark.parametrize(
    ("logits", "sound"), [(1.1, True), (0.001, False), (1e20, False), (math.nan, False)]
)
def test_a_variant_with_other_logits_than_none_is_flagged(logits, sound):
    none = {"device": [1.0, 1.0], "logits": [0.9, 0.9]}
    fsdp2 = {"device": [1.0, 1.0], "logits": [0.9, logits]}
    found = step.unsound({"none": none, "fsdp2": fsdp2})
    flagged = [] if sound else ["UNSOUND: fsdp2"]
    assert [sentence.split("'")[0] for sentence in found] == flagged
    assert bool(step.unsound({"fsdp2": fsdp2})) is math.isnan(logits)  # nothing to compare with
    assert not step.unsound({"fsdp2": {"wall": [1.0], "logits": [math.nan]}})  # on a CPU


def test_compiled_blocks_are_mixed_on_a_gpu():
    assert compile.parse([]).precision == "fp32"
    assert compile.parse(["--device", "cuda"]).precision == "mixed"
    assert compile.parse(["--device", "cuda", "--precision", "fp32"]).precision == "fp32"


def test_instructions_belong_to_the_child_that_ran_them():
    printed = [
        '{"pid": 12, "label": "32x9 none", "steps": 0}',
        "something else",
        '{"pid": 13, "label": "32x9 none", "steps": 4}',
    ]
    # valgrind 3.19, and the format since 3.22; the parent comes last
    counted = ["==12== I   refs:      1,000", "==13== I refs:        3,000", "==1== I refs: 9,999"]
    found = instructions.parsed("\n".join(printed), "\n".join(counted))
    counts = [(said["steps"], each[instructions.INSTRUCTIONS]) for said, each in found]
    assert counts == [(0, 1000), (4, 3000)]


CACHE_LINES = """\
=={pid}== I   refs:      {i}
=={pid}== I1  misses:    9
=={pid}== LLi misses:    8
=={pid}== D   refs:      900  (600 rd   + 300 wr)
=={pid}== D1  misses:    {d1}  ( 40 rd   +  10 wr)
=={pid}== LLd misses:    {lld}  (  4 rd   +   1 wr)
=={pid}== D1  miss rate: 5.6% (  6.7%     +   3.3%  )
=={pid}== LL refs:       59  ( 49 rd   +  10 wr)
=={pid}== LL misses:     13  ( 12 rd   +   1 wr)
"""


def _of_cachegrind(pids):
    """What the children of four specs and cachegrind print."""
    printed = [
        json.dumps({"pid": pid, "label": f"32x9 {variant}", "steps": steps})
        for (variant, steps), pid in pids.items()
    ]
    counted = "".join(
        CACHE_LINES.format(pid=pid, i=f"{pid},000", d1=pid * 640, lld=pid * pid * 64)
        for pid in pids.values()
    )
    return "\n".join(printed), counted


@pytest.mark.parametrize("caches", [(), (256, 2048)])
def test_misses_of_caches_are_those_of_data(caches, monkeypatch):
    arguments = ["--cases", "32x9", "--variants", "none,fsdp2", "--steps", "2"]
    if caches:
        arguments += ["--caches", ",".join(map(str, caches))]
    options = instructions.parse(arguments)
    assert options.caches == caches
    pids = {("none", 0): 1, ("none", 2): 2, ("fsdp2", 0): 3, ("fsdp2", 2): 5}
    stdout, stderr = _of_cachegrind(pids)
    if not caches:  # as cachegrind prints it then
        stderr = "\n".join(line for line in stderr.splitlines() if "I   refs" in line)
    monkeypatch.setattr(instructions, "counted", lambda *_: instructions.parsed(stdout, stderr))
    result = instructions.measure(options)
    assert result["counts"] == {"32x9": {"none": 500, "fsdp2": 1000}}
    if not caches:
        assert result["misses"] == {}
        return
    assert result["misses"] == {
        "second cache": {"32x9": {"none": 320, "fsdp2": 640}},
        "last cache": {"32x9": {"none": 96, "fsdp2": 512}},
    }
    assert instructions.misses_table(result)[1] == [
        ("32x9", "none", "10", "3", "0", "0"),
        ("32x9", "fsdp2", "20", "16", "10", "13"),
    ]


def test_caches_have_sizes_unless_others_are_given():
    assert instructions.parse(["--caches"]).caches == instructions.CACHES
    assert instructions.parse([]).caches == ()


@pytest.mark.parametrize(("caches", "simulated"), [((), "no"), ((1, 2), "yes")])
def test_caches_are_simulated_on_request_alone(caches, simulated):
    arguments = instructions.cachegrind(caches)
    assert f"--cache-sim={simulated}" in arguments
    assert ("--D1=1024,16,64" in arguments) == ("--LL=2048,16,64" in arguments) == bool(caches)


@pytest.mark.parametrize("variant", ["torch", "fsdp2"])
def test_collectives_of_a_sharded_model_can_be_observed_and_no_longer(variant):
    """fsdp2 keeps the methods that it found in the process group when it was sharded."""
    with null_world(8):
        model = variants.place(tiny_blocks(1), variant, "fp32", 8, torch.device("cpu"))
        x = torch.randn(4, 16, requires_grad=True)
        log = CallLog()
        variants.observe(model, log)
        model(x).sum().backward()
        assert len(log.calls) == 3
        variants.observe(model, None)
        model(x).sum().backward()
        assert len(log.calls) == 3


def test_a_peer_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(megatron, "is_installed", lambda: False)
    with null_world(8), pytest.raises(ModuleNotFoundError, match="pip install megatron-fsdp"):
        variants.place(tiny_blocks(1), "megatron", "fp32", 8, torch.device("cpu"))


@needs_megatron
@pytest.mark.filterwarnings("ignore")  # its own
@pytest.mark.parametrize("precision", variants.PRECISIONS)
def test_megatron_gathers_and_reduces_each_block(monkeypatch, precision):
    for owner, name in megatron.STAND_INS:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # to be restored
    log = CallLog()
    with null_world(8, observer=log):
        model = variants.place(tiny_blocks(3), "megatron", precision, 8, torch.device("cpu"))
        dtype = variants.input_dtype("megatron", precision)
        x = torch.randn(4, 16, requires_grad=True, dtype=dtype)
        for _ in range(3):
            log.clear()
            model(x).sum().backward()
            # All that rank 0 holds of a block lies in the first two of nine parameters.
            with_grad = [name for name, p in model.named_parameters() if p.grad is not None]
            assert len(with_grad) == 2 * 3
            counts = log.counts()
            assert sum(n for name, n in counts.items() if name.startswith("all_gather")) == 6
            assert sum(n for name, n in counts.items() if name.startswith("reduce_scatter")) == 3
            model.zero_grad()
            assert not any(param.grad is not None for param in model.parameters())


def _seldom(*command):
    return pytest.param([*command], marks=[pytest.mark.exhaustive])


@pytest.mark.extended
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            ["benchmarks/host_cost.py", "--blocks", "2", "--variants", "none,fsdp2,megatron"],
            marks=[needs_megatron],
        ),
        _seldom("benchmarks/host_cost.py", "--blocks", "2", "--world-size", "8,16"),
        _seldom("-m", "benchmarks.host_cost", "--blocks", "2", "--precision", "mixed", "--c10d"),
        ["benchmarks/step.py", "--preset", "tiny", "--device", "cpu"],
        [
            *("benchmarks/step.py", "--preset", "tiny-moe", "--device", "cpu", "--ranks", "2"),
            *("--variants", "torch,fsdp2", "--recompute"),
        ],
        ["benchmarks/compile.py", "--layers", "1", "--backend", "aot_eager"],
        _seldom("benchmarks/scaling.py", "--shrink", "32"),
        ["benchmarks/gloo.py", "--preset", "tiny", "--data", "docs"],
        ["benchmarks/planned_steps.py", "--presets", "tiny", "--device", "cpu", "--ranks", "2"],
    ],
)
def test_scripts_run(command, tmp_path):
    burst = ["--rounds", "2", "--steps", "2"]
    _run_and_check([*command, *burst], tmp_path)


@pytest.mark.exhaustive
def test_start_up_runs(tmp_path):
    command = ["benchmarks/startup.py", "--blocks", "2", "--rounds", "1"]
    _run_and_check(command, tmp_path)
    command += ["--variants", "fsdp2", "--model", "llama", "--precision", "mixed", "--table"]
    content = _run_and_check(command, tmp_path)
    calls = {part: number for part, number, _ in content["results"]["table"]}
    assert set(calls) == {*first_step.PARTS, first_step.REST}
    assert 0 not in calls.values()  # a part whose functions have moved would be
    per_unit = ("parameters checked, laid out", "gathers bound", "reductions bound")
    assert {calls[part] for part in per_unit} == {2}
    _run_and_check(["benchmarks/imports.py", "--rooms", "wrap", "--rounds", "1"], tmp_path)


def test_instructions_of_zero_grad_are_without_what_gives_gradients_back(monkeypatch):
    took = {"clip": 5, "step": 7, "zero": 11, "give": 8}

    def count(specs):
        built = {"none": 100, "flat": 200}
        found = {
            (spec["label"], spec["steps"]): built[spec["variant"]]
            + spec["steps"] * took[spec["part"]]
            for spec in specs
        }
        return {instructions.INSTRUCTIONS: found}

    monkeypatch.setattr(instructions, "count", count)
    options = optimizer.parse(["--instructions", "--variants", "none,flat"])
    each = {"clip": 5, "step": 7, "zero": 3}
    assert optimizer.count(options) == {"none": each, "flat": each}


def test_steps_of_offloaded_shards_are_compared_by_both_clocks(monkeypatch):
    options = optimizer.parse(["--offload", "--blocks", "2"])
    assert options.variants == ["none", "flat", "flat-offload", "torch-offload"]
    assert (options.blocks, options.dim) == (2, 1024)
    took = {"none": 4.0, "flat": 5.0, "flat-offload": 6.0, "torch-offload": 10.0}

    def take_turns(pool, rounds, *, steps, clock):
        scale = 2 if clock == "cpu" else 1
        parts = {name: {"clip": 1.0, "step": ms * scale, "both": 0.0} for name, ms in took.items()}
        return {name: [each] * 2 for name, each in parts.items()}

    monkeypatch.setattr(workers, "pool", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(workers, "take_turns", take_turns)
    wall, cpu = optimizer.measure(options)
    assert (wall["clock"], cpu["clock"]) == ("wall", "cpu")
    assert wall["rounds"]["flat"]["step"] == [5.0, 5.0]
    assert cpu["rounds"]["flat"]["step"] == [10.0, 10.0]
    assert wall["ratios"]["flat-offload / flat"].median == 1.2
    assert cpu["ratios"]["torch-offload / flat"].median == 2.0


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_instructions_are_counted(tmp_path):
    command = ["benchmarks/instructions.py", "--cases", "32x9", "--shrink", "16", "--steps", "1"]
    _run_and_check(command, tmp_path)
    command = ["benchmarks/startup.py", "--blocks", "1", "--variants", "none,fsdp2"]
    _run_and_check([*command, "--instructions"], tmp_path)


def _run_and_check(command, folder):
    file = folder / "result.json"
    done = subprocess.run(
        [sys.executable, *command, "--json", str(file)],
        cwd=workers.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "fsdp2" in done.stdout
    content = json.loads(file.read_text())
    assert content["environment"]["torch"]
    assert content["results"]
    return content
