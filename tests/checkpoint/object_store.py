"""A store as S3 is: objects, whole or not there; no folders, no renames, nothing to sync.

    url_of(tmp_path) + "/run"     objects://…/run, the same for all processes

An object is a file of a folder, with its whole name as the file's. It is there when its writer is
closed. Inside `refusing`, some puts and deletes fail.
"""

from __future__ import annotations

import errno
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock
from urllib.parse import quote, unquote

import fsspec
from fsspec.spec import AbstractFileSystem


def url_of(folder: Path) -> str:
    """The URL of all objects whose files are in a folder."""
    return f"objects://{quote(str(folder), safe='')}"


class _Written(io.BytesIO):
    def __init__(self, store: ObjectStore, path: str) -> None:
        super().__init__()
        self._store, self._path = store, path

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._store.pipe_file(self._path, data)


class ObjectStore(AbstractFileSystem):
    """See above; ``ops`` are (put or delete, name, bytes), of this process."""

    protocol = "objects"
    cachable = False
    ops: ClassVar[list[tuple[str, str, bytes]]] = []
    before: ClassVar[Callable[[str, str], None]] = staticmethod(lambda kind, path: None)

    def _file(self, path: str) -> Path:
        base, _, name = self._strip_protocol(path).partition("/")
        return Path(unquote(base)) / quote(name, safe="")

    def _all(self, path: str) -> dict[str, int]:
        base = self._strip_protocol(path).partition("/")[0]
        files = sorted(Path(unquote(base)).iterdir())
        named = {f"{base}/{unquote(each.name)}": each for each in files if each.name[0] != "."}
        return {name: each.stat().st_size for name, each in named.items()}

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode == "wb":
            return _Written(self, path)
        return io.BytesIO(self._file(path).read_bytes())

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        self.before("put", path)
        with tempfile.NamedTemporaryFile(
            dir=self._file(path).parent, prefix=".", delete=False
        ) as file:
            file.write(value)
        os.replace(file.name, self._file(path))
        self.ops.append(("put", path, bytes(value)))

    def rm_file(self, path: str) -> None:
        self.before("delete", path)
        self._file(path).unlink()
        self.ops.append(("delete", path, b""))

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        names = self.find(path)
        if not names:
            raise FileNotFoundError(path)
        for name in names:
            self.rm_file(name)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path).rstrip("/")
        found: dict[str, dict[str, Any]] = {}
        for name, size in self._all(path).items():
            if name == path:
                return [self._about(name, size)] if detail else [name]
            if name.startswith(f"{path}/"):
                child, inside, _ = name[len(path) + 1 :].partition("/")
                whole = f"{path}/{child}"
                found[whole] = self._about(whole, None if inside else size)
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)

    def _about(self, name: str, size: int | None) -> dict[str, Any]:
        kind = "directory" if size is None else "file"
        return {"name": name, "size": size or 0, "type": kind}


@contextmanager
def refusing(refuses: Callable[[str, str], bool]) -> Iterator[None]:
    """Let those puts and deletes fail of which a function of kind and name says so."""

    def before(kind: str, path: str) -> None:
        if refuses(kind, path):
            raise PermissionError(errno.EACCES, "Access Denied")

    with mock.patch.object(ObjectStore, "before", staticmethod(before)):
        yield


fsspec.register_implementation("objects", ObjectStore, clobber=True)
