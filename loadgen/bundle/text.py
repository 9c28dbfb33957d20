"""What `loadgen verify` says. Pure: a verification in, the report of text, Markdown and page out."""

from __future__ import annotations

from collections import Counter

from loadgen.bundle.verify import Verification
from loadgen.core import format
from loadgen.render.section import Kind, Paragraph, Report, Table, section

SHOWN = 20  # differences; all are in the JSON
_KINDS: dict[str, Kind] = {"all": "good", "part": "warn", "no": "bad"}


def report(found: Verification) -> Report:
    """What was checked and what came out."""
    manifest, made = found.manifest, found.made
    by_basis = Counter(one.basis for one in made)
    sources = ", ".join(f"{count} from {basis}" for basis, count in by_basis.items()) or "none"
    given = sum(one.given for one in made)
    more = len(found.differences) - SHOWN
    rows = [
        ("hashes", f"of {format.counted(found.files, 'file')}"),
        (
            "made again",
            f"{sum(one.same for one in made):,} values and lines of {len(made)} files: {sources}",
        ),
        *(
            [
                (
                    "as stored",
                    f"{given:,} values that nothing kept gives, like what a trial was asked",
                )
            ]
            if given
            else []
        ),
        *(("not made", f"{name}: {why}") for name, why in found.not_made.items()),
        *(("left out", f"{name}: {why}") for name, why in manifest.left_out.items()),
        *(("DIFFERS", difference.text) for difference in found.differences[:SHOWN]),
        *([("", f"and {more:,} more: --json has all")] if more > 0 else []),
        ("signature", _SIGNATURES[found.signature].format(key=found.signed_by)),
    ]
    return Report(
        title=f"{found.bundle}: {manifest.kind} {manifest.name}, by loadgen {manifest.version}, {manifest.made}",
        made_by="loadgen verify",
        answer=[Paragraph(_ENDS[found.verified], _KINDS[found.verified])],
        answer_last=True,
        sections=[section("", Table(("checked", ""), rows, "words"))],
    )


_ENDS = {
    "all": "VERIFIED: what was kept gives all that is said",
    "part": "VERIFIED IN PART: what could be made again is as it was said; what was not is named above",
    "no": "NOT VERIFIED: see above",
}


_SIGNATURES = {
    "none": "none: this check guards against accident, not against forgery. Whoever changes a record can make all that "
    "follows from it anew, hashes included",
    "broken": "BROKEN: it does not fit the files",
    "other key": "of another key than the one given: {key}",
    "some key": "sound, by {key}; whose key that is was not asked (--signed-by KEY.pub)",
    "given key": "sound, by the key given: {key}",
}
