"""Copies finished runs to object stores: `--out s3://bucket/run`, az://, gs://, file://, memory://. IO.

A run is always written to a local folder first and copied at its end. The storage library is fsspec with the package
for the scheme (s3fs, adlfs, gcsfs), or else pyarrow, which has s3:// and gs:// built in. These libraries find the
credentials in the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loadgen.core.errors import TargetError, UserError

MARK, _SCHEMES = "run.json", "s3://, az://, gs://, file://"


class Depot:
    """One target folder in an object store; `open` has checked that it holds no run."""

    def __init__(self, url: str, system: Any, path: str) -> None:
        self._url, self._system, self._path = url, system, path.rstrip("/")

    def put(self, folder: Path) -> None:
        """Copy a finished run. Raises TargetError when that fails; the local folder is then the only copy."""
        files = (path for path in folder.rglob("*") if path.is_file())
        try:
            for file in sorted(
                files, key=lambda file: (file == folder / MARK, file)
            ):  # it shows that all is there
                target = f"{self._path}/{file.relative_to(folder).as_posix()}"
                self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._system.put_file(str(file), target)
        except Exception as error:  # of whichever storage library
            hint = f"the results are in {folder}: copy them"
            raise TargetError(
                "unwritable_file", f"not stored: {_message(error)}", f"--out {self._url}", hint
            ) from None


def open(url: str) -> Depot:
    """Open the target folder at `url` and test a write.

    Raises UserError if it cannot be written, if its scheme is unknown, or if it holds a run already.
    """
    where = f"--out {url}"
    system, path = _system(url, where)
    try:
        if system.exists(f"{path.rstrip('/')}/{MARK}"):
            raise UserError("file_exists", "there is a run already", where, "name a new folder")
        system.makedirs(path, exist_ok=True)
        probe = f"{path.rstrip('/')}/.loadgen"
        system.pipe_file(probe, b"")
        system.rm_file(probe)
    except UserError:
        raise
    except Exception as error:  # of whichever storage library
        hint = "credentials, bucket and path?"
        raise UserError(
            "unwritable_file", f"cannot be written: {_message(error)}", where, hint
        ) from None
    return Depot(url, system, path)


def _system(url: str, where: str) -> tuple[Any, str]:
    scheme = url.partition("://")[0]
    try:
        import fsspec

        system, path = fsspec.core.url_to_fs(url)
        return system, path
    except ImportError as error:
        missing = str(error)
    except (ValueError, OSError) as error:
        what = f"not a place to store a run: {_message(error)}"
        raise UserError("invalid_url", what, where, _SCHEMES) from None
    try:
        from fsspec.implementations.arrow import ArrowFSWrapper
        from pyarrow import fs

        filesystem, path = fs.FileSystem.from_uri(url)
        return ArrowFSWrapper(filesystem), path
    except Exception:  # pyarrow does not support the scheme either
        package = {
            "s3": "s3fs",
            "az": "adlfs",
            "abfs": "adlfs",
            "abfss": "adlfs",
            "gs": "gcsfs",
        }.get(scheme)
        hint = f"pip install {package}" if package else _SCHEMES
        what = f"nothing here can write {scheme}://: {missing}"
        raise UserError("not_installed", what, where, hint, key=package or "fsspec") from None


def _message(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
