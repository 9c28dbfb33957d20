"""Renders the result of `loadgen verify`. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from loadgen.bundle.verification import Verification
from loadgen.core import format
from loadgen.render.section import Kind, Paragraph, Report, Table, section

SHOWN_DIFFERENCES = 20
"""Differences in the report. All are in the JSON."""

_KINDS: dict[str, Kind] = {"all": "good", "part": "warn", "no": "bad"}
_ANSWERS = {
    "all": "VERIFIED: what was kept gives all that is said",
    "part": (
        "VERIFIED IN PART: what could be made again is as it was said; what was not is named above"
    ),
    "no": "NOT VERIFIED: see above",
}
_SIGNATURES = {
    "none": (
        "none: this check guards against accident, not against forgery. Whoever changes a record "
        "can make all that follows from it anew, hashes included"
    ),
    "broken": "BROKEN: it does not fit the files",
    "other key": "of another key than the one given: {key}",
    "some key": "sound, by {key}; whose key that is was not asked (--signed-by KEY.pub)",
    "given key": "sound, by the key given: {key}",
}


def report(verification: Verification) -> Report:
    """Return the report of a verification."""
    manifest = verification.manifest
    verified = verification.verified
    return Report(
        title=(
            f"{verification.bundle}: {manifest.kind} {manifest.name}, by loadgen "
            f"{manifest.version}, {manifest.made}"
        ),
        generated_by="loadgen verify",
        headline=[Paragraph(_ANSWERS[verified], _KINDS[verified])],
        headline_last=True,
        sections=[section("", Table(("checked", ""), list(_rows(verification)), "prose"))],
    )


def _rows(verification: Verification) -> Iterator[tuple[str, str]]:
    yield "hashes", f"of {format.counted(verification.files, 'file')}"
    checked = verification.made
    same = sum(file.same for file in checked)
    counts = Counter(file.basis for file in checked)
    sources = ", ".join(f"{count} from {basis}" for basis, count in counts.items()) or "none"
    yield "made again", f"{same:,} values and lines of {len(checked)} files: {sources}"
    given = sum(file.given for file in checked)
    if given:
        yield (
            "as stored",
            f"{given:,} values that nothing kept gives, like what a trial was asked",
        )
    for name, reason in verification.not_made.items():
        yield "not made", f"{name}: {reason}"
    for name, reason in verification.manifest.left_out.items():
        yield "left out", f"{name}: {reason}"
    for difference in verification.differences[:SHOWN_DIFFERENCES]:
        yield "DIFFERS", difference.text
    hidden = len(verification.differences) - SHOWN_DIFFERENCES
    if hidden > 0:
        yield "", f"and {hidden:,} more: --json has all"
    yield "signature", _SIGNATURES[verification.signature].format(key=verification.signed_by)
