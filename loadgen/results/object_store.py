"""Places for finished runs that are not folders of this machine: `--out s3://bucket/run`, az://, gs://, file://,
memory://. A run is written here, as always, and copied there at its end; nothing else is done with it. IO.

What knows a scheme is fsspec, with the package that it names for it (s3fs, adlfs, gcsfs), else pyarrow, which has
s3:// and gs:// built in. Credentials are theirs to find, in the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loadgen.errors import TargetError, UserError

MARK = "run.json"


def is_url(out: str) -> bool:
    """Whether an `--out` is a place like this."""
    return "://" in out


class Depot:
    """One place, where nothing was before."""

    def __init__(self, url: str, system: Any, path: str) -> None:
        self._url, self._system, self._path = url, system, path.rstrip("/")

    def put(self, folder: Path) -> None:
        """Copy a finished run. Raises TargetError when that fails: the folder here is then all there is."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        try:
            for file in [*(one for one in files if one.name != MARK), folder / MARK]:  # the mark last: then it is whole
                there = f"{self._path}/{file.relative_to(folder).as_posix()}"
                self._system.makedirs(there.rpartition("/")[0], exist_ok=True)
                self._system.put_file(str(file), there)
        except Exception as error:  # of whichever storage library
            hint = f"the results are in {folder}: copy them"
            raise TargetError(f"not stored: {_said(error)}", f"--out {self._url}", hint) from None


def open(url: str) -> Depot:
    """Raises UserError for a place that cannot be written, is unknown, or holds a run already."""
    where = f"--out {url}"
    system, path = _system(url, where)
    try:
        if system.exists(f"{path.rstrip('/')}/{MARK}"):
            raise UserError("there is a run already", where, "name a new folder")
        system.makedirs(path, exist_ok=True)
        probe = f"{path.rstrip('/')}/.loadgen"
        system.pipe_file(probe, b"")
        system.rm_file(probe)
    except UserError:
        raise
    except Exception as error:  # of whichever storage library
        raise UserError(f"cannot be written: {_said(error)}", where, "credentials, bucket and path?") from None
    return Depot(url, system, path)


def _system(url: str, where: str) -> tuple[Any, str]:
    scheme = url.partition("://")[0]
    try:
        import fsspec

        system, path = fsspec.core.url_to_fs(url)
        return system, path
    except ImportError as error:
        lacking = str(error)
    except (ValueError, OSError) as error:
        raise UserError(f"not a place to store a run: {_said(error)}", where, "s3://, az://, gs://, file://") from None
    try:
        from fsspec.implementations.arrow import ArrowFSWrapper
        from pyarrow import fs

        found, path = fs.FileSystem.from_uri(url)
        return ArrowFSWrapper(found), path
    except Exception:  # pyarrow knows it as little
        package = {"s3": "s3fs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs", "gs": "gcsfs"}.get(scheme)
        hint = f"pip install {package}" if package else "s3://, az://, gs://, file://"
        raise UserError(f"nothing here can write {scheme}://: {lacking}", where, hint) from None


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
