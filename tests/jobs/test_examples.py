"""The main job's parts, each alone: options, data, model, schedule, checkpoints' bookkeeping."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from fsdp2 import checkpoint
from fsdp2.examples import checkpointing, data, lora, parallel, reporting
from fsdp2.examples.model import PRESETS, parts, reset_parameters, token_losses
from fsdp2.examples.options import GivenRanks, UsageError, parse
from fsdp2.examples.train_lm import WARMUP_STEPS, learning_rate, main, unsharded_model
from fsdp2.planning.presets import Attention, Block, Model, Shape, rotary_tables, rotated

pytestmark = pytest.mark.alone

TINY = PRESETS["tiny"]


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--bogus"], "--bogus"),
        (["extra"], "extra"),
        (["--steps", "0"], "'0' is not a whole number of at least 1"),
        (["--steps", "many"], "'many' is not a whole number"),
        (["--lr", "nan"], "'nan' is not a positive number"),
        (["--lr", "-1"], "'-1' is not a positive number"),
        (["--seed", "-1"], "'-1' is not a whole number"),
        (["--preset", "huge"], "'huge'"),
        (["--precision", "fp8"], "'fp8'"),
        (["--data", "does/not/exist"], "does/not/exist cannot be read: No such file"),
        (["--data", "a" * 5000], "cannot be read"),
        (["--data", "/dev/null"], "neither a file nor a folder"),
        (["--nproc", "100000"], "too many for this machine"),
        (["--nproc", "4", "--batch-size", "2"], "more than the 2 sequences of a micro-batch"),
        (["--nproc", "4", "--batch-size", "8", "--grad-accum", "4"], "more than the 2 sequences"),
        (["--nproc", "3", "--batch-size", "8"], "do not divide evenly over 3 ranks"),
        (["--batch-size", "8", "--grad-accum", "3"], "does not split into --grad-accum 3"),
        (["--replicate", "0"], "'0' is not a whole number of at least 1"),
        (["--tp", "-2"], "'-2' is not a whole number of at least 1"),
        (["--lora", "0"], "'0' is not a whole number of at least 1"),
        (["--lora", "64"], "--lora 64 is no low rank"),
        (["--tp", "4"], "--tp 4 does not divide the 2 key/value heads of preset small"),
        (["--nproc", "6", "--replicate", "4"], "6 ranks do not divide evenly by --replicate 4"),
        (["--nproc", "5", "--tp", "2"], "5 ranks do not divide evenly by --tp 2"),
        (
            ["--nproc", "6", "--replicate", "2", "--tp", "2"],
            "6 ranks do not divide evenly by --replicate 2 x --tp 2",
        ),
        (
            ["--nproc", "6", "--tp", "2", "--batch-size", "8"],
            "do not divide evenly over 3 groups of 2 ranks (--tp)",
        ),
        (["--replicate", "100000"], "too many for this machine"),
        (["--resume"], "--resume needs --checkpoint"),
        (["--elastic", "2", "--plan"], "--elastic knows no --checkpoint, --export, --trace or"),
        (["--elastic", "50000", "--nproc", "2"], "100000 ranks are too many for this machine"),
        (["--checkpoint-every", "5"], "--checkpoint-every needs --checkpoint DIR"),
        (["--checkpoint-async"], "--checkpoint-async needs --checkpoint DIR"),
        (["--keep=3"], "--keep needs --checkpoint DIR"),
        (["--export", "/"], "--export / is there already"),
        (["--seq-len", "100000000"], "too little text"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("train_lm: ")
    assert err.endswith(".\n")
    assert says in err


def test_more_ranks_than_the_largest_dim() -> None:
    ranks = GivenRanks(rank=0, world_size=512, local_rank=0, local_world_size=8)
    with pytest.raises(UsageError, match="more than the largest dim of preset tiny, 256"):
        parse(["--preset", "tiny", "--batch-size", "512"], ranks)
    assert parse(["--preset", "medium", "--batch-size", "512"], ranks).rank_batch == 1


def test_ranks_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert GivenRanks.from_environment() is None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        GivenRanks.from_environment()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    ranks = GivenRanks.from_environment()
    assert ranks is not None
    assert (ranks.rank, ranks.world_size, ranks.local_rank) == (1, 4, 1)
    options = parse(["--device", "cpu"], ranks)
    assert (options.world_size, options.backend) == (4, "gloo")
    with pytest.raises(UsageError, match="contradicts the 4 ranks"):
        parse(["--nproc", "2"], ranks)


def test_defaults_are_complete() -> None:
    options = parse(["--device", "cpu"], None)
    assert options.world_size == 2
    assert options.batch_size % options.world_size == 0
    assert options.reshards is None
    for preset in PRESETS:
        assert parse(["--device", "cpu", "--preset", preset], None).model == PRESETS[preset]
    # An odd number of sequences leaves one rank rather than an error nobody asked for.
    assert parse(["--device", "cpu", "--batch-size", "7"], None).world_size == 1


def test_ranks_multiply_out() -> None:
    options = parse(["--device", "cpu", "--nproc", "8", "--replicate", "2", "--tp", "2"], None)
    assert (options.data_parallel_size, options.shard_size, options.rank_batch) == (4, 2, 4)
    # Two shards unless told otherwise, as without the flags.
    options = parse(["--device", "cpu", "--replicate", "2", "--tp", "2"], None)
    assert (options.world_size, options.shard_size) == (8, 2)
    options = parse(["--device", "cpu", "--tp", "2", "--batch-size", "7"], None)
    assert (options.world_size, options.shard_size) == (2, 1)
    # As many sequences as data-parallel slices are enough, however many ranks share one.
    options = parse(["--device", "cpu", "--nproc", "4", "--tp", "2", "--batch-size", "2"], None)
    assert options.rank_batch == 1


def test_one_rank_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert parse([], None).world_size == 8
    options = parse(["--replicate", "2", "--tp", "2"], None)
    assert (options.world_size, options.shard_size, options.backend) == (8, 2, "nccl")
    assert parse(["--replicate", "8"], None).shard_size == 1
    # Gradients on the CPU are reduced there too.
    assert parse(["--cpu-offload"], None).backend == "cpu:gloo,cuda:nccl"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    options = parse(["--tp", "2", "--cpu-offload"], None)
    assert (options.world_size, options.backend) == (4, "gloo")


# --- data ----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(40):
        sub = tmp_path / f"part{index % 3}"
        sub.mkdir(exist_ok=True)
        (sub / f"file{index}.txt").write_text(f"<{index}>" * (20 + index))
    (tmp_path / ".hidden").write_text("hidden" * 100)
    (tmp_path / "image").write_bytes(b"\0" * 1000)
    return tmp_path


def test_split_is_deterministic_disjoint_and_complete(folder: Path) -> None:
    files = {name: (folder / name).read_bytes() for name in data.list_files(folder)}
    files.pop("image")
    assert len(files) == 40
    train, held_out = data.split_files(files, min_bytes=10)
    assert data.split_files(dict(reversed(files.items())), min_bytes=10) == (train, held_out)
    assert len(train) + len(held_out) == sum(map(len, files.values()))
    assert 0.04 < len(held_out) / (len(train) + len(held_out)) <= 0.1
    for text in files.values():
        assert (text in train) != (text in held_out)


def test_load_corpus_reads_folders_files_and_python_itself(folder: Path) -> None:
    corpus = data.load_corpus(folder, min_bytes=10)
    assert corpus.num_files == 40
    assert corpus.train.dtype == torch.uint8
    assert corpus.fingerprint == data.load_corpus(folder, min_bytes=10).fingerprint
    (folder / "one_more.txt").write_text("something else")
    assert corpus.fingerprint != data.load_corpus(folder, min_bytes=10).fingerprint

    one = data.load_corpus(folder / "part0" / "file39.txt", min_bytes=10)
    text = (folder / "part0" / "file39.txt").read_bytes()
    assert bytes(one.train.tolist()) + bytes(one.held_out.tolist()) == text

    stdlib = data.load_corpus(None, min_bytes=10)
    assert stdlib.train.numel() > 1_000_000
    assert stdlib.held_out.numel() > 100_000


def test_the_least_text(tmp_path: Path) -> None:
    for size in (0, 1, 64, 129):
        (tmp_path / "text").write_bytes(b"x" * size)
        with pytest.raises(UsageError, match="too little text"):
            data.load_corpus(tmp_path / "text", min_bytes=65)
    (tmp_path / "text").write_bytes(b"x" * 130)
    corpus = data.load_corpus(tmp_path / "text", min_bytes=65)
    assert data.global_batch(corpus.train, 0, 0, 3, 64).shape == (3, 65)
    assert data.held_out_slices(corpus.held_out, 64, 100).shape == (1, 65)


def test_batch_is_a_function_of_seed_and_step() -> None:
    text = torch.randint(0, 256, (10_000,), dtype=torch.uint8)
    batch = data.global_batch(text, seed=1, step=5, batch_size=8, seq_len=16)
    assert batch.shape == (8, 17)
    torch.manual_seed(1234)
    assert batch.equal(data.global_batch(text, 1, 5, 8, 16))
    assert not batch.equal(data.global_batch(text, 1, 6, 8, 16))
    assert not batch.equal(data.global_batch(text, 2, 5, 8, 16))
    tokens, targets = data.tokens_and_targets(batch, torch.device("cpu"))
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens[:, 1:].equal(targets[:, :-1])


@pytest.mark.parametrize(("world_size", "grad_accum"), [(1, 1), (2, 2), (3, 4), (6, 4)])
def test_rank_slices_cover_the_global_batch_once(world_size: int, grad_accum: int) -> None:
    batch_size = 24
    seen: list[int] = []
    for micro in range(grad_accum):
        start = len(seen)
        for rank in range(world_size):
            mine = data.rank_slice(batch_size, grad_accum, micro, rank, world_size)
            seen += range(batch_size)[mine]
        # A micro-batch holds the same sequences on any number of ranks.
        assert seen[start:] == list(range(start, start + batch_size // grad_accum))
    assert seen == list(range(batch_size))


def test_held_out_slices_are_spread_and_do_not_overlap() -> None:
    text = (torch.arange(1000) % 256).to(torch.uint8)
    slices = data.held_out_slices(text, seq_len=9, max_sequences=20)
    assert slices.shape == (20, 10)
    starts = [int(slices[0, 0]), int(slices[1, 0])]
    assert starts[1] - starts[0] == 52
    assert slices[-1, -1] > text[-20]
    assert data.held_out_slices(text, 9, 1000).shape == (100, 10)
    assert data.held_out_slices(text, 9, 1000).flatten().equal(text)


# --- model ---------------------------------------------------------------------------------------


def _model(shape: Shape, seed: int = 0) -> Model:
    model = Model(shape)
    reset_parameters(model, shape, seed)
    return model


def test_model_shapes_and_first_loss() -> None:
    model = _model(TINY)
    tokens = torch.randint(0, 256, (3, 12))
    logits = model(tokens)
    assert logits.shape == (3, 12, 256)
    losses = token_losses(logits, tokens)
    assert losses.shape == (36,)
    assert losses.dtype == torch.float32
    assert losses.mean().item() == pytest.approx(math.log(256), abs=0.2)
    assert model.head.weight is not model.embed.weight


def test_presets_are_llama_sized() -> None:
    for name, billions in (("llama-1b", 1.0), ("llama-8b", 7.0)):
        with torch.device("meta"):
            model = Model(PRESETS[name])
        params = sum(p.numel() for p in model.parameters())
        assert params / 1e9 == pytest.approx(billions, abs=0.05)


def test_rotary_turns_pairs_as_complex_numbers_turn() -> None:
    cos, sin = rotary_tables(7, 8, 100.0, torch.empty(0))
    x = torch.randn(2, 3, 7, 8)
    got = rotated(x, cos, sin)
    for position in range(7):
        for pair in range(4):
            angle = position * 100.0 ** (-2 * pair / 8)
            before = torch.complex(x[..., position, pair], x[..., position, pair + 4])
            after = before * torch.polar(torch.tensor(1.0), torch.tensor(angle))
            torch.testing.assert_close(got[..., position, pair], after.real)
            torch.testing.assert_close(got[..., position, pair + 4], after.imag)


def test_grouped_attention_equals_a_naive_one() -> None:
    shape = replace(TINY, dim=48, heads=6, kv_heads=2)
    attention = Attention(shape)
    x = torch.randn(2, 5, 48)
    cos, sin = rotary_tables(5, 8, shape.theta, x)
    expected = torch.zeros(2, 5, 48)
    for sequence in range(2):
        for head in range(6):
            shared = head // 3  # heads 0..2 read key/value head 0, heads 3..5 head 1
            q = (x[sequence] @ attention.wq.weight.T)[:, head * 8 : head * 8 + 8]
            k = (x[sequence] @ attention.wk.weight.T)[:, shared * 8 : shared * 8 + 8]
            v = (x[sequence] @ attention.wv.weight.T)[:, shared * 8 : shared * 8 + 8]
            q, k = (rotated(y[None, None], cos, sin)[0, 0] for y in (q, k))
            for position in range(5):
                weights = torch.softmax(q[position] @ k[: position + 1].T / 8**0.5, dim=-1)
                out = weights @ v[: position + 1]
                expected[sequence, position] += (
                    attention.wo.weight[:, head * 8 : head * 8 + 8] @ out
                )
    torch.testing.assert_close(attention(x, cos, sin), expected, atol=1e-5, rtol=1e-4)


def test_activation_checkpointing_changes_no_gradient() -> None:
    grads = []
    for flags in ((), ("--activation-checkpointing",)):
        model = unsharded_model(parse(["--device", "cpu", "--preset", "tiny", *flags], None))
        reset_parameters(model, TINY, seed=0)
        token_losses(model(torch.arange(20)[None]), torch.arange(20)[None]).mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(plain, recomputed, atol=0, rtol=0)


def test_weights_depend_on_seed_and_name_alone() -> None:
    whole = _model(TINY, seed=3)
    torch.manual_seed(99)
    with torch.device("meta"):
        by_parts = Model(TINY)
    for name, part in reversed(list(parts(by_parts))):
        part.to_empty(device="cpu")
        reset_parameters(part, TINY, 3, prefix=name)
    assert dict(whole.named_parameters()).keys() == dict(by_parts.named_parameters()).keys()
    for name, param in by_parts.named_parameters():
        assert param.equal(whole.get_parameter(name)), name
    other = _model(TINY, seed=4)
    assert not other.head.weight.equal(whole.head.weight)
    assert not whole.head.weight.equal(whole.embed.weight)


# --- adapters and tensor parallelism -------------------------------------------------------------


def _adapted(rank: int = 4) -> Model:
    model = _model(TINY)
    for name, part in parts(model):
        lora.adapt(part, rank, 0, name)
    return model


def test_adapters_start_as_nothing_and_leave_the_base_frozen() -> None:
    plain, model = _model(TINY), _adapted()
    tokens = torch.arange(20)[None]
    assert model(tokens).equal(plain(tokens))
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    kinds = {name.rpartition(".")[0].rpartition(".")[2] for name in trained}
    assert kinds == {"lora_a", "lora_b", "attention_norm", "mlp_norm", "norm", "head"}
    assert sum("lora_a" in name for name in trained) == 7 * TINY.layers
    assert model.get_parameter("blocks.1.mlp.down.lora_a.weight").shape == (4, TINY.ffn)

    frozen = {name: p.clone() for name, p in model.named_parameters() if name not in trained}
    assert {"embed.weight", "blocks.0.attention.wq.base.weight"} <= frozen.keys()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(20):
        loss = token_losses(model(tokens), tokens).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1.0
    for name, before in frozen.items():
        assert model.get_parameter(name).equal(before), name
    assert model.get_parameter("blocks.0.attention.wq.lora_b.weight").any()


def test_every_layer_has_its_tensor_parallel_style() -> None:
    colwise, rowwise = ["wq", "wk", "wv", "gate", "up"], ["wo", "down"]
    for model, suffix in ((_model(TINY), ""), (_adapted(), ".base")):
        block = model.blocks[0]
        assert isinstance(block, Block)
        found = parallel.plan(block)
        assert isinstance(found, dict)
        holders = {name.rpartition(".")[0] for name, _ in block.named_parameters()}
        assert found.keys() == holders
        for path, style in found.items():
            name = path.removesuffix(suffix).rpartition(".")[2]
            if name in colwise:
                assert isinstance(style, ColwiseParallel), path
            elif name in rowwise:
                assert isinstance(style, RowwiseParallel), path
            elif name.endswith("norm"):
                assert isinstance(style, parallel.ReplicateParallel), path
            else:
                # The adapter's wide side is cut as the base is, its narrow side is whole.
                wide = path.endswith("lora_a") == (path.split(".")[-2] in rowwise)
                assert isinstance(style, parallel.ReplicateParallel) != wide, path
    styles = {
        name: parallel.plan(part)
        for name, part in parts(_model(TINY))
        if not isinstance(part, Block)
    }
    assert isinstance(styles["embed"], RowwiseParallel)
    assert isinstance(styles["norm"], parallel.ReplicateParallel)
    assert isinstance(styles["head"], ColwiseParallel)


# --- schedule and report -------------------------------------------------------------------------


def test_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    steps = 1000
    rates = [learning_rate(step, steps, 1.0) for step in range(steps)]
    assert rates[0] == pytest.approx(1 / WARMUP_STEPS)
    assert rates[WARMUP_STEPS - 1] == pytest.approx(1.0)
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert rates[:WARMUP_STEPS] == sorted(rates[:WARMUP_STEPS])
    assert rates[WARMUP_STEPS:] == sorted(rates[WARMUP_STEPS:], reverse=True)
    # Short runs see the start of the same warmup, whatever their length.
    assert [learning_rate(s, 20, 1.0) for s in range(20)] == rates[:20]
    assert learning_rate(0, 1, 1.0) > 0


def test_what_is_reported() -> None:
    """A line of progress; frozen parameters count in the state."""
    line = reporting.step_line(7, 120, 2.34567, 12345.6, 3_000_000)
    assert line == "step   7/120  loss 2.3457  12,346 tokens/s  peak 3.00 MB"
    frozen, trained = nn.Parameter(torch.zeros(5), requires_grad=False), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([trained], lr=1.0, momentum=0.9)
    trained.grad = torch.ones(3)
    optimizer.step()
    mine, unsharded = reporting.state_bytes([frozen, trained], optimizer)
    assert mine == unsharded == 4 * (5 + 3 * 3)


# --- which checkpoints may be resumed ------------------------------------------------------------


ALIKE = {"seed": 0, "text": "text"}


def _save(folder: Path, step: int, extra: object = {"alike": ALIKE}) -> None:
    checkpoint.save(folder, nn.Linear(2, 2), step=step, extra=extra)


def test_resume_finds_the_latest(tmp_path: Path) -> None:
    _save(tmp_path, 3)
    _save(tmp_path, 6)
    (tmp_path / ".saving-step-00000009").mkdir()
    assert checkpointing.find(tmp_path, True, ALIKE) == 6


def test_resume_without_a_complete_checkpoint_starts_afresh(tmp_path: Path) -> None:
    """As the first attempt of a command that a launcher repeats; what is half written is swept."""
    folder = tmp_path / "a" / "run"
    assert checkpointing.find(folder, True, ALIKE) is None
    assert folder.is_dir()
    (folder / ".saving-step-00000003").mkdir()
    _save(folder, 3)
    (folder / "step-00000003" / "manifest.json").unlink()
    assert checkpointing.find(folder, True, ALIKE) is None
    argv = ["--device", "cpu", "--preset", "tiny", "--checkpoint", str(folder), "--resume"]
    with checkpointing.Saves(parse(argv, None)):
        assert list(folder.iterdir()) == []


def test_a_run_that_is_not_this_one_is_not_resumed() -> None:
    was = checkpointing.facts_of(parse(["--device", "cpu", "--preset", "tiny"], None), "text")
    for name, value in {
        **{"preset": "small", "seed": 1, "batch_size": 4, "seq_len": 32, "lora": 8},
        **{"optimizer": "muon", "text": "other"},
    }.items():
        assert name in was
        with pytest.raises(UsageError, match=f"a run with another {name} "):
            checkpointing._check_alike("step 3", was, was | {name: value})
    argv = ["--device", "cpu", "--preset", "tiny", "--nproc", "8", "--replicate", "2", "--tp", "2"]
    assert checkpointing.facts_of(parse(argv, None), "text") == was  # shares the work otherwise


def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    _save(tmp_path / "run", 3)
    (tmp_path / "file").write_text("")
    _save(tmp_path / "other", 3, {"epoch": 1})
    for name, resume, says in (
        ("run", False, "add --resume"),
        ("file", False, "File exists"),
        ("other", True, "cannot be read"),
    ):
        with pytest.raises(UsageError, match=says):
            checkpointing.find(tmp_path / name, resume, ALIKE)
    for file, content in ((".metadata", ""), ("manifest.json", "{")):
        (tmp_path / "run" / "step-00000003" / file).write_text(content)
        with pytest.raises(UsageError, match="cannot be read"):
            checkpointing.find(tmp_path / "run", True, ALIKE)


def test_checkpoint_without_numpy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for flag in ("--checkpoint", "--export"):
        with pytest.raises(UsageError, match=f"{flag} needs NumPy"):
            parse([flag, "somewhere"], None)
