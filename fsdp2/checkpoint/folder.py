"""A folder of steps: which are complete, what they hold, whether their bytes are still the same.

FOLDER/step-00000100/manifest.json   what the step consists of; a step is one that has it
FOLDER/step-00000100/.metadata       DCP's index
FOLDER/step-00000100/__0_0.distcp    what rank 0 wrote
FOLDER/.saving-step-00000200-TOKEN/  half-written: never read, removed on request
FOLDER/.removing-step-00000050/      half-removed: the same
FOLDER/.owner                        who saves into FOLDER just now
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fsdp2.checkpoint import files
from fsdp2.checkpoint.files import HASH
from fsdp2.core.config import CheckpointError

MANIFEST = "manifest.json"
OWNER = ".owner"
INDEX = ".metadata"
FORMAT = 1
_STEP, _SAVING, _REMOVING = "step-", ".saving-", ".removing-"

PathLike = str | os.PathLike[str]
Progress = Callable[[int, int], object]
"""Takes bytes that are done, and bytes in all."""

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


@dataclass(frozen=True)
class Manifest:
    """What a step consists of.

    Attributes:
        step: its number.
        ranks: how many ranks have written it.
        files: by name, [bytes, checksum] of every file but this one.
        extra: what the user added; a tensor in it is {"tensor": place}.
        has_optimizer: whether an optimizer was saved.
        torch: the version that has written it.
        hash: what the checksums are; see `files.Checksum`.
        digest: SHA-256 of all of this without it.
        format: of the folder; another one is refused.
    """

    step: int
    ranks: int
    files: Mapping[str, tuple[int, str]]
    extra: Json
    has_optimizer: bool
    torch: str
    hash: str = HASH
    digest: str = ""
    format: int = FORMAT

    def encoded(self) -> bytes:
        """The bytes of the manifest's file, the digest set."""
        whole = replace(self, digest=self._digest())
        return (json.dumps(asdict(whole), indent=1) + "\n").encode()

    def _digest(self) -> str:
        text = json.dumps(asdict(replace(self, digest="")), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def is_whole(self) -> bool:
        """Whether it is what was written."""
        return self.digest == self._digest()


def local_path(path: PathLike) -> Path:
    """A path of this machine's file system.

    Raises:
        CheckpointError: it is one of a store, as "s3://bucket/run".
    """
    found = Path(path)
    scheme = found.parts[0] if found.parts else ""
    if len(scheme) > 2 and scheme.endswith(":") and not found.exists():
        raise CheckpointError(
            f"'{path}' is not on a file system, whose renames and syncs a step is made whole by; "
            f"mount the store, or save on a disk and copy complete steps to it"
        )
    return found


def step_folder(folder: Path, step: int) -> Path:
    """Where a complete step is."""
    return folder / f"{_STEP}{step:08d}"


def saving_folder(folder: Path, step: int, token: str = "") -> Path:
    """Where a step is written; ``token`` tells it from what another run has left there."""
    return folder / f"{_SAVING}{_STEP}{step:08d}{token and '-'}{token}"


def left_of(folder: Path, step: int) -> list[Path]:
    """What runs that have ended had begun to write of a step."""
    name, headless = saving_folder(folder, step).name, step_folder(folder, step)
    found = [p for p in folder.iterdir() if p.name == name or p.name.startswith(f"{name}-")]
    return [*found, headless] if headless.exists() else found


def steps(folder: PathLike) -> list[int]:
    """The complete steps of a folder, oldest first; none where there is no folder.

    Example::

        >>> fsdp2.checkpoint.steps("run")
        [100, 200]
    """
    root = local_path(folder)
    found = []
    for path in root.glob(f"{_STEP}*") if root.is_dir() else ():
        number = path.name.removeprefix(_STEP)
        if number.isdecimal() and (path / MANIFEST).is_file():
            found.append(int(number))
    return sorted(found)


def unfinished(folder: PathLike) -> list[str]:
    """Names of what a save or a removal has left half-done; `remove` removes them.

    Do not call `remove` for them while a save into the folder runs.
    """
    root = local_path(folder)
    found = [path.name for kind in (_SAVING, _REMOVING) for path in root.glob(f"{kind}*")]
    headless = (p for p in root.glob(f"{_STEP}*") if p.is_dir() and not (p / MANIFEST).is_file())
    return sorted([*found, *(path.name for path in headless)])


def read_manifest(folder: Path, step: int | None) -> Manifest:
    """The manifest of a complete step; without ``step`` of the newest.

    Raises:
        CheckpointError: there is no such step, or it is not one that this version reads.
    """
    known = steps(folder)
    if not known:
        raise CheckpointError(
            f"'{folder}' has no complete step; pass the folder that save() was given"
        )
    if step is not None and step not in known:
        raise CheckpointError(f"'{folder}' has no complete step {step}; load one of {known}")
    path = step_folder(folder, known[-1] if step is None else step) / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version, kind = content["format"], content.get("hash", HASH)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"'{path}' is no manifest of a step; load another step, or the folder's copy"
        ) from error
    if version != FORMAT or kind != HASH:
        about = version if kind == HASH else f"{version} with {kind}"
        raise CheckpointError(
            f"'{path}' is of format {about}, and this version reads format {FORMAT}; load it "
            f"with the version of fsdp2 that has written it"
        )
    try:
        manifest = Manifest(**content)
        whole = manifest.is_whole and f"{_STEP}{manifest.step:08d}" == path.parent.name
    except (TypeError, ValueError):
        whole = False
    if not whole:
        raise CheckpointError(
            f"'{path}' is not what save() wrote there; load another step, or the folder's copy"
        )
    return manifest


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raise unless every file of a step is there and of its length.

    Raises:
        CheckpointError: a file is missing or of another length, named.
    """
    place = step_folder(folder, manifest.step)
    for name, (length, _) in manifest.files.items():
        path = place / name
        if not path.is_file():
            raise CheckpointError(
                f"'{path}' is missing; load another step, or copy all files of this one"
            )
        if path.stat().st_size != length:
            raise CheckpointError(
                f"'{path}' has {path.stat().st_size} bytes of {length}; load another step, or "
                f"copy the file again"
            )


def check_hashes(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read every byte of some files of a step, and raise unless it is what was saved.

    Raises:
        CheckpointError: a file has other bytes, named.
    """
    for name in names:
        path = step_folder(folder, manifest.step) / name
        if files.hash_of(path) != manifest.files[name][1]:
            raise CheckpointError(
                f"'{path}' has other bytes than were saved; load another step, or copy the file "
                f"again"
            )


def verify(
    folder: PathLike, step: int | None = None, *, progress: Progress | None = None
) -> list[str]:
    """Read every byte of a step, and name the files that are not what was saved.

    Local: call it on one rank, or in no job at all.

    Args:
        folder: as of `save`.
        step: the step. Default ``None``: all complete ones.
        progress: called with bytes read and bytes in all. Default ``None``.

    Returns:
        A line for each file that is missing, cut short or changed, which begins with its path;
        empty if everything is as it was saved.

    Raises:
        CheckpointError: there is no such step.

    Example::

        >>> fsdp2.checkpoint.verify("run")
        ['run/step-00000100/__1_0.distcp: its bytes have changed']
    """
    root = local_path(folder)
    wrong, manifests = [], []
    for each in steps(root) if step is None else [step]:
        try:
            manifests.append(read_manifest(root, each))
        except CheckpointError as error:
            if each not in steps(root):
                raise
            wrong.append(f"{step_folder(root, each) / MANIFEST}: {error}")
    total, done = sum(length for m in manifests for length, _ in m.files.values()), 0
    for manifest in manifests:
        for name, fact in manifest.files.items():
            path = step_folder(root, manifest.step) / name

            def read(count: int, before: int = done) -> None:
                if progress is not None:
                    progress(min(before + count, total), total)

            about = _changed(path, fact, read)
            if about is not None:
                wrong.append(f"{path}: {about}")
            done += fact[0]
    return wrong


def _changed(path: Path, fact: files.Fact, read: Callable[[int], None]) -> str | None:
    """How a file differs from what was saved."""
    length, checksum = fact
    if not path.is_file():
        return "it is missing"
    if path.stat().st_size != length:
        return f"it has {path.stat().st_size} bytes of {length}"
    return None if files.hash_of(path, read) == checksum else "its bytes have changed"


def remove(folder: PathLike, step: int | None = None) -> list[str]:
    """Remove a complete step, or all that is half-done.

    Local: call it on one rank, while nobody saves into the folder.

    Args:
        folder: as of `save`.
        step: the step to remove. Default ``None``: whatever `unfinished` names, and no step.

    Returns:
        Names of the folders that are gone.

    Raises:
        CheckpointError: there is no such step.
    """
    root = local_path(folder)
    if step is None:
        names = unfinished(root)
        for name in names:
            files.remove_tree(root / name)
        return names
    if step not in steps(root):
        raise CheckpointError(f"'{root}' has no complete step {step}; pass one of {steps(root)}")
    remove_steps(root, [step])
    return [step_folder(root, step).name]


def remove_steps(folder: Path, doomed: list[int]) -> None:
    """Remove complete steps: each is gone at once, and then its files."""
    moved = []
    for step in doomed:
        path = step_folder(folder, step)
        other = folder / f"{_REMOVING}{path.name}"
        if other.exists():
            files.remove_tree(other)
        files.DISK.rename(path, other)
        moved.append(other)
    if moved:
        # Before a file goes: a step whose old name comes back after a crash must have all of them.
        files.DISK.sync_folder(folder)
    for other in moved:
        files.remove_tree(other)
