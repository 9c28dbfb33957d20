"""Copies finished runs to object stores, for `--out s3://bucket/run` and similar URLs.

IO. A run is always written to a local folder and copied when it has ended. The storage library is
fsspec with the package for the scheme (s3fs, adlfs, gcsfs), or else pyarrow, which supports s3://
and gs:// itself. These libraries find the credentials in the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from loadgen.core.errors import TargetError, UserError

MANIFEST = "run.json"
"""The file that is copied last, so that a folder with this file is complete."""

_SCHEMES = "s3://, az://, gs://, file://"
_PACKAGES = {"s3": "s3fs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs", "gs": "gcsfs"}
"""The package with which fsspec supports a scheme."""

_MESSAGE_CHARS = 200
"""How much of a message of a storage library is shown."""


class ObjectStoreFolder:
    """A folder in an object store that holds no run and can be written, as `open` has checked."""

    def __init__(self, url: str, filesystem: Any, path: str) -> None:
        self._url = url
        self._filesystem = filesystem
        self._path = path

    def put(self, folder: Path) -> None:
        """Copy a finished run.

        Raises TargetError if that fails. The local folder is then the only copy.
        """
        manifest = folder / MANIFEST
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path != manifest)
        if manifest.is_file():
            files.append(manifest)
        try:
            for file in files:
                target = f"{self._path}/{file.relative_to(folder).as_posix()}"
                self._filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._filesystem.put_file(str(file), target)
        except Exception as error:  # Each storage library has exceptions of its own.
            message = f"not stored: {_describe(error)}"
            hint = f"the results are in {folder}. Copy them from there"
            raise TargetError("unwritable_file", message, f"--out {self._url}", hint) from None


def open(url: str) -> ObjectStoreFolder:
    """Return the folder at a URL, after a test file was written to it and removed again.

    Raises UserError if the folder cannot be written, if the scheme of the URL is unknown, or if a
    run is there already.
    """
    where = f"--out {url}"
    location = _locate(url, where)
    filesystem = location.filesystem
    path = location.path.rstrip("/")
    try:
        if filesystem.exists(f"{path}/{MANIFEST}"):
            raise UserError(
                "file_exists", "this URL already holds a run", where, "use another folder"
            )
        filesystem.makedirs(location.path, exist_ok=True)
        test_file = f"{path}/.loadgen"
        filesystem.pipe_file(test_file, b"")
        filesystem.rm_file(test_file)
    except UserError:
        raise
    except Exception as error:  # Each storage library has exceptions of its own.
        message = f"cannot be written: {_describe(error)}"
        hint = "check the credentials, the bucket and the path"
        raise UserError("unwritable_file", message, where, hint) from None
    return ObjectStoreFolder(url, filesystem, path)


class _Location(NamedTuple):
    """A file system of fsspec and a path in it."""

    filesystem: Any
    path: str


def _locate(url: str, where: str) -> _Location:
    """Return the location of a URL. Raises UserError at `where` if nothing supports its scheme."""
    try:
        import fsspec

        return _Location(*fsspec.core.url_to_fs(url))
    except ImportError as error:  # fsspec, or its package for the scheme
        missing = str(error)
    except (ValueError, OSError) as error:
        message = f"must be the URL of an object store: {_describe(error)}"
        raise UserError("invalid_url", message, where, _SCHEMES) from None
    try:
        from fsspec.implementations.arrow import ArrowFSWrapper
        from pyarrow import fs

        filesystem, path = fs.FileSystem.from_uri(url)
        return _Location(ArrowFSWrapper(filesystem), path)
    except Exception:  # pyarrow does not support the scheme either.
        raise _missing_package(url, where, missing) from None


def _missing_package(url: str, where: str, missing: str) -> UserError:
    """Return the error for a scheme that no installed library supports."""
    scheme = url.partition("://")[0]
    package = _PACKAGES.get(scheme)
    message = f"no installed library can write to {scheme}://: {missing}"
    hint = f"pip install {package}" if package else _SCHEMES
    return UserError("not_installed", message, where, hint, key=package or "fsspec")


def _describe(error: Exception) -> str:
    """Return the message of an error in one line, or the name of its type if it has none."""
    return " ".join(str(error).split())[:_MESSAGE_CHARS] or type(error).__name__
