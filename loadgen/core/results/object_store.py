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
    """A folder in an object store that holds no run and can be written, as `open_folder` checks."""

    def __init__(self, url: str, filesystem: Any, path: str) -> None:
        """Use the folder at a path of a file system of fsspec. `url` names it in errors."""
        self._url = url
        self._filesystem = filesystem
        self._path = path

    def put(self, folder: Path) -> None:
        """Copy all files of a finished run from a local folder to this one.

        The manifest is copied last, because a folder with a manifest counts as complete. If the
        copying fails, an incomplete run is not mistaken for a complete one.

        Args:
            folder: The local folder of the run. It stays as it is.

        Raises:
            TargetError: The copying failed. The local folder is then the only copy.
        """
        manifest = folder / MANIFEST
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path != manifest)
        if manifest.is_file():
            files.append(manifest)

        try:
            for file in files:
                target_path = f"{self._path}/{file.relative_to(folder).as_posix()}"
                self._filesystem.makedirs(target_path.rpartition("/")[0], exist_ok=True)
                self._filesystem.put_file(str(file), target_path)
        except Exception as error:  # Each storage library has exceptions of its own.
            message = f"not stored: {_describe(error)}"
            hint = f"the results are in {folder}. Copy them from there"
            raise TargetError("unwritable_file", message, f"--out {self._url}", hint) from None


def open_folder(url: str) -> ObjectStoreFolder:
    """Return the folder at a URL of an object store, after checking that a run can be stored there.

    To check the credentials before the run, a test file is written to the folder and removed again.

    Raises:
        UserError: The folder holds a run already or cannot be written, or the scheme of the URL is
            unknown.
    """
    option = f"--out {url}"
    location = _locate(url, option)
    filesystem = location.filesystem

    path = location.path.rstrip("/")
    try:
        has_run = filesystem.exists(f"{path}/{MANIFEST}")
        if not has_run:
            filesystem.makedirs(location.path, exist_ok=True)
            test_file = f"{path}/.loadgen"
            filesystem.pipe_file(test_file, b"")
            filesystem.rm_file(test_file)
    except Exception as error:  # Each storage library has exceptions of its own.
        message = f"cannot be written: {_describe(error)}"
        hint = "check the credentials, the bucket and the path"
        raise UserError("unwritable_file", message, option, hint) from None

    if has_run:
        raise UserError("file_exists", "this URL already holds a run", option, "use another folder")

    return ObjectStoreFolder(url, filesystem, path)


class _Location(NamedTuple):
    """A file system of fsspec and a path in it."""

    filesystem: Any
    path: str


def _locate(url: str, option: str) -> _Location:
    """Return the file system and the path of a URL, with fsspec or else with pyarrow.

    Args:
        url: The URL, such as `s3://bucket/run`.
        option: The option with the URL, for errors.

    Raises:
        UserError: The URL is not valid, or no installed library supports its scheme.
    """
    try:
        return _locate_with_fsspec(url, option)
    except ImportError as error:  # fsspec, or its package for the scheme
        missing_package = str(error)

    location = _locate_with_pyarrow(url)
    if location is None:
        raise _missing_package_error(url, option, missing_package)

    return location


def _locate_with_fsspec(url: str, option: str) -> _Location:
    """Return the location of a URL according to fsspec.

    Raises:
        ImportError: fsspec, or its package for the scheme of the URL, is not installed.
        UserError: The URL is not valid.
    """
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ValueError, OSError) as error:
        message = f"must be the URL of an object store: {_describe(error)}"
        raise UserError("invalid_url", message, option, _SCHEMES) from None

    return _Location(filesystem, path)


def _locate_with_pyarrow(url: str) -> _Location | None:
    """Return the location of a URL according to pyarrow, or None if it does not support it.

    `ArrowFSWrapper` is a part of fsspec, so this also returns None without fsspec.
    """
    try:
        from fsspec.implementations.arrow import ArrowFSWrapper
        from pyarrow import fs

        filesystem, path = fs.FileSystem.from_uri(url)
        return _Location(ArrowFSWrapper(filesystem), path)
    except Exception:  # The file systems of pyarrow have exceptions of their own.
        return None


def _missing_package_error(url: str, option: str, missing_package: str) -> UserError:
    """Return the error for a URL whose scheme no installed library supports.

    Args:
        url: The URL.
        option: The option with the URL.
        missing_package: The message of the ImportError of fsspec.
    """
    scheme = url.partition("://")[0]
    package = _PACKAGES.get(scheme)
    message = f"no installed library can write to {scheme}://: {missing_package}"
    hint = f"pip install {package}" if package else _SCHEMES
    return UserError("not_installed", message, option, hint, key=package or "fsspec")


def _describe(error: Exception) -> str:
    """Return the message of an error in one line, or the name of its type if it has none."""
    return " ".join(str(error).split())[:_MESSAGE_CHARS] or type(error).__name__
