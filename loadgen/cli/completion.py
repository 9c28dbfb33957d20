"""Values that the shell offers for an incomplete argument or option.

Each `complete_...` function takes the incomplete value and returns the values that begin with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

PACKAGE_DIR = Path(__file__).parent.parent
YAML_SUFFIXES = (".yaml", ".yml")


def complete_workload(incomplete: str) -> list[str]:
    """Return packaged workloads and YAML files."""
    packaged = _filter_by_prefix(packaged_names("workloads"), incomplete)
    return [*packaged, *_list_matching_paths(incomplete, YAML_SUFFIXES)]


def complete_contract(incomplete: str) -> list[str]:
    """Return packaged contracts and YAML files."""
    packaged = _filter_by_prefix(packaged_names("contracts"), incomplete)
    return [*packaged, *_list_matching_paths(incomplete, YAML_SUFFIXES)]


def complete_target(incomplete: str) -> list[str]:
    """Return the simulated endpoints and the schemes of URLs."""
    simulated = [f"sim:{preset}" for preset in list_presets()]
    return _filter_by_prefix([*simulated, "http://", "https://"], incomplete)


def complete_server(incomplete: str) -> list[str]:
    """Return the kinds of servers."""
    from loadgen_sdk.wire_formats.server_profiles import server_names

    return _filter_by_prefix(server_names(), incomplete)


def complete_slo_term(incomplete: str) -> list[str]:
    """Return the metrics that an SLO may limit."""
    from loadgen.core.slo import ANSWERS, ATTAINMENT, FLUIDITY, metrics

    names = (*metrics(), FLUIDITY, ANSWERS, ATTAINMENT)
    return _filter_by_prefix([f"{name}:" for name in names], incomplete)


def complete_accepted_length(incomplete: str) -> list[str]:
    """Return the names of published accepted lengths, before the number of draft tokens."""
    from loadgen.core.accepted_lengths import published_lengths

    return _filter_by_prefix([f"{row.name}:" for row in published_lengths()], incomplete)


def complete_result(incomplete: str) -> list[str]:
    """Return folders; those in results/ come first if nothing has been typed."""
    folders = [] if incomplete else [str(path) for path in sorted(Path("results").glob("*/"))]
    return [*folders, *_list_matching_paths(incomplete)]


def complete_capacity_source(incomplete: str) -> list[str]:
    """Return simulated endpoints and folders of results, which show what a machine sustains."""
    simulated = [name for name in complete_target(incomplete) if name.startswith("sim:")]
    return [*simulated, *complete_result(incomplete)]


def complete_baseline(incomplete: str) -> list[str]:
    """Return the results that `compare --save` has saved in the default folder."""
    baseline_names = sorted(path.name for path in Path("baselines").glob("*/"))
    return _filter_by_prefix(baseline_names, incomplete)


def complete_choice(list_choices: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a function that completes the choices, which are listed when they are needed."""

    def complete(incomplete: str) -> list[str]:
        return _filter_by_prefix(list_choices(), incomplete)

    return complete


def list_presets() -> list[str]:
    """Return the names of the simulated machines."""
    return sorted(path.stem for path in (PACKAGE_DIR / "sim" / "presets").glob("*.yaml"))


def packaged_names(kind: str) -> list[str]:
    """Return the names of the packaged files of a kind, without their suffix.

    An installed package has them in its `data` folder. A checkout has them beside the package.
    """
    directory = PACKAGE_DIR / "data" / kind
    if not directory.is_dir():
        directory = PACKAGE_DIR.parent / kind
    return sorted(path.stem for path in directory.glob("*.yaml"))


def _list_matching_paths(incomplete: str, suffixes: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the paths that begin with what has been typed.

    They are folders, with a slash at the end, and files with one of the suffixes. Hidden files and
    folders are left out until their dot has been typed.
    """
    parent, slash, prefix = incomplete.rpartition("/")
    directory = Path(parent or slash or ".")
    if not directory.is_dir():
        return

    for path in sorted(directory.iterdir()):
        is_hidden = path.name.startswith(".") and not prefix
        if is_hidden or not path.name.startswith(prefix):
            continue
        if path.is_dir():
            yield f"{parent}{slash}{path.name}/"
        elif path.suffix in suffixes:
            yield f"{parent}{slash}{path.name}"


def _filter_by_prefix(candidates: Iterable[str], incomplete: str) -> list[str]:
    """Return the candidates that begin with what has been typed."""
    return [candidate for candidate in candidates if candidate.startswith(incomplete)]
