"""Where tests find what does not lie beside them."""

import tarfile
from pathlib import Path

TESTS = Path(__file__).parent
DATA = TESTS / "data"
ROOT = TESTS.parent


def unpack(name: str, directory: Path) -> None:
    """Unpack a stored directory of the oracle into `where`."""
    with tarfile.open(DATA / "oracle" / "folders" / f"{name}.tar.xz") as packed:
        packed.extractall(
            directory, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )  # from 3.11.4 on
