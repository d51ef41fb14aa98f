"""Trains tiny public architectures unsharded, by fsdp2 and by torch's FSDP2, and compares.

    python -m benchmarks.zoo                                   # all; about twenty minutes
    python -m benchmarks.zoo --only Llama,T5                   # names that contain one of these
    python -m benchmarks.zoo --libraries timm --json zoo.json
    python -m benchmarks.zoo --only T5 --json zoo.json --onto zoo.json    # these rows anew
    python -m benchmarks.zoo --page benchmarks/results/FILE-zoo.json     # docs/zoo.md from a file

Needs the extra `zoo`: transformers, timm, diffusers. Nothing is downloaded. Two gloo ranks of one
thread stay alive from one architecture to the next; a rank that fails or hangs ends both, and the
next architecture gets new ones. See `benchmarks.zoo.trial` for what is compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks import options as common
from benchmarks import stats, workers
from benchmarks.zoo import architectures, trial

VARIANTS = ("fsdp2", "torch")
PATIENCE = 100.0  # seconds for one training: longer than a collective waits for its peer
PAGE = Path(__file__).resolve().parents[2] / "docs" / "zoo.md"

Answer = dict[str, Any]


class Ranks:
    """Both ranks of the trial; started at the first request, and again after a failure."""

    def __init__(self, log: IO[str]) -> None:
        self._log = log
        self._workers: list[workers.Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def train(self, library: str, name: str, variant: str) -> Answer:
        """The worse answer of the two. A sharded training comes behind the unsharded one."""
        if not self._workers:
            self._start()
            if variant != "plain":
                self.train(library, name, "plain")
        try:
            for worker in self._workers:
                worker.send(library=library, name=name, variant=variant)
            answers = [worker.receive(PATIENCE) for worker in self._workers]
        except (workers.Lost, BrokenPipeError) as error:
            self.end()
            return {"verdict": "fails", "why": str(error)}
        answer = next((a for a in answers if a["verdict"] == "fails"), answers[0])
        if answer["verdict"] == "fails":
            self.end()  # the ranks may be out of step
        return answer

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fsdp2-zoo-")
        store = os.path.join(self._folder.name, "store")
        self._workers = [
            workers.Worker("zoo.trial", f"rank {rank}", {"rank": rank, "store": store}, self._log)
            for rank in range(trial.RANKS)
        ]
        for worker in self._workers:
            worker.wait_until_ready()

    def end(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()


def measure(options: argparse.Namespace) -> Iterator[Answer]:
    """A row an architecture, printed as it comes."""
    with open(options.log, "w") as log:
        ranks = Ranks(log)
        try:
            for library in options.libraries:
                for name in architectures.names(library):
                    if any(part in f"{library}/{name}" for part in options.only):
                        print(f"\n==== {library}/{name}", file=log, flush=True)
                        yield try_one(ranks, library, name)
        finally:
            ranks.end()


def try_one(ranks: Ranks, library: str, name: str) -> Answer:
    row: Answer = {"library": library, "name": name, **ranks.train(library, name, "plain")}
    if row["verdict"] == "built":
        for variant in VARIANTS:
            row[variant] = ranks.train(library, name, variant)
    said = [f"{v} {row[v]['verdict']} {row[v].get('why', '')}" for v in VARIANTS if v in row]
    print(f"{library}/{name}: {'; '.join(said) or 'not built, ' + row['why'][:100]}", flush=True)
    return row


def updated(before: Sequence[Answer], rows: Sequence[Answer]) -> list[Answer]:
    """``before``, with ``rows`` in place of those of the same architecture, or behind."""
    found = {(row["library"], row["name"]): row for row in (*before, *rows)}
    return list(found.values())


# -- the table ------------------------------------------------------------------------------------


def summary(rows: Sequence[Answer]) -> list[tuple[object, ...]]:
    """By library: how many were built, and each variant's verdicts."""
    lines: list[tuple[object, ...]] = []
    for library in (*architectures.LIBRARIES, "all"):
        mine = [r for r in rows if library in ("all", r["library"])]
        built = [r for r in mine if r["verdict"] == "built"]
        counts = {v: Counter(r[v]["verdict"] for r in built) for v in VARIANTS}
        verdicts = [counts[v][verdict] for v in VARIANTS for verdict in trial.VERDICTS]
        lines.append((library, len(built), len(mine) - len(built), *verdicts))
    return lines


HEADER = (
    *("library", "trained", "not built"),
    *(f"{variant} {verdict}" for variant in VARIANTS for verdict in trial.VERDICTS),
)


def odd(rows: Sequence[Answer]) -> list[Answer]:
    """Where either implementation does not give what the unsharded model gives."""
    good = ("exact", "close")
    return [
        r
        for r in rows
        if r["verdict"] == "built" and any(r[v]["verdict"] not in good for v in VARIANTS)
    ]


_PAGE = """# Public architectures, tested

`python -m benchmarks.zoo`, {when}: torch {torch}, {versions}.

Each architecture is a tiny model with random weights. The benchmark trains it for three steps of
AdamW on two gloo ranks; each block is a unit, and so is the model. The unsharded model trains on
both ranks' batches.

- *exact*: losses, first gradients, last parameters and the state dict's names equal the unsharded
  model's to the bit.
- *close*: the same within {close:.0e} by norm, as sums in a different order are.
- *not built*: offered by the library, but no small instance could be built or run unsharded.

{summary}

## Where one of the two differs or fails

If a parameter is used outside its unit's forward, or the blocks contain a list of lists, the model
needs units other than those chosen here; fsdp2's message names them.

{odd}

## Where both agree with the unsharded model

{fine}

## Not built

{unbuilt}
"""


def page(content: Answer) -> str:
    """docs/zoo.md."""
    rows, environment = content["results"]["rows"], content["environment"]
    return _PAGE.format(
        when=environment["date"][:10],
        torch=environment["torch"],
        versions=", ".join(f"{k} {v}" for k, v in content["results"]["versions"].items()),
        close=trial.CLOSE,
        summary=_markdown(HEADER, summary(rows)),
        odd=_markdown(
            ("architecture", "fsdp2", "torch FSDP2"),
            [(_name(r), _said(r["fsdp2"]), _said(r["torch"])) for r in odd(rows)],
        ),
        fine=_names(r for r in rows if r["verdict"] == "built" and r not in odd(rows)),
        unbuilt=_names(r for r in rows if r["verdict"] != "built"),
    )


def _names(rows: Iterable[Answer]) -> str:
    return textwrap.fill(", ".join(_name(row) for row in rows), 110)


def _name(row: Answer) -> str:
    return str(row["name"]).rpartition("/")[2]


def _said(answer: Answer) -> str:
    why = answer.get("why", "").replace("|", "/")[:160]
    return answer["verdict"] + (f": {why}" if why else "")


def _markdown(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def versions(libraries: Sequence[str]) -> dict[str, str]:
    from importlib.metadata import version

    return {each: version(each) for each in libraries}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    known = [each for each in architectures.LIBRARIES if importlib.util.find_spec(each)]
    parser = argparse.ArgumentParser(description="Tiny public architectures, sharded and not.")
    parser.add_argument(
        "--libraries", type=common.among(architectures.LIBRARIES), default=",".join(known)
    )
    parser.add_argument("--only", type=lambda text: text.split(","), default=[""])
    parser.add_argument("--log", default=os.devnull, help="what the ranks write")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--onto", metavar="FILE", help="keep this file's other rows")
    parser.add_argument("--page", metavar="FILE", help="only write docs/zoo.md from this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    warnings.simplefilter("ignore")
    options = parse(arguments)
    if options.page:
        PAGE.write_text(page(json.loads(Path(options.page).read_text())))
        return
    if not options.libraries:
        raise SystemExit(
            "none of transformers, timm, diffusers is installed; pip install -e '.[zoo]'"
        )
    before = json.loads(Path(options.onto).read_text())["results"]["rows"] if options.onto else []
    rows = updated(before, list(measure(options)))
    print("\n" + stats.table(HEADER, summary(rows)))
    content = {"versions": versions(options.libraries), "rows": rows}
    stats.write_json(options.json, "cpu", content)
    bad = [r for r in odd(rows) if r["torch"]["verdict"] in ("exact", "close")]
    if bad:
        raise SystemExit(
            f"{len(bad)} differ or fail where torch's does not: {[_name(r) for r in bad]}"
        )


if __name__ == "__main__":
    main()
