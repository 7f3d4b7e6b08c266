"""A storage that shows the files of another one."""

from __future__ import annotations

from remesh.storage.protocol import Buffer, FileSystemSpace, Storage, Writer


class StorageView:
    """A storage as it is; subclasses show some of its files in another form."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @property
    def url(self) -> str:
        return self._storage.url

    def list(self, prefix: str = "") -> list[str]:
        """See `Storage.list`; of stored files."""
        return self._storage.list(prefix)

    def size(self, path: str) -> int:
        return self._storage.size(path)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._storage.read(path, start, stop)

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        return self._storage.read_into(path, start, buffer)

    def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
        self._storage.put(path, data, overwrite=overwrite)

    def create(self, path: str, num_bytes: int, *, overwrite: bool = False) -> Writer:
        return self._storage.create(path, num_bytes, overwrite=overwrite)

    def delete(self, path: str) -> None:
        self._storage.delete(path)

    def sync(self) -> None:
        self._storage.sync()

    def space(self) -> FileSystemSpace | None:
        return self._storage.space()


def without_views(storage: Storage) -> Storage:
    """The storage itself, whatever it is seen through."""
    while isinstance(storage, StorageView):
        storage = storage._storage  # noqa: SLF001 - of this module
    return storage
