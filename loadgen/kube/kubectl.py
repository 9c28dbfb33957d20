"""Kubernetes, as the user's own kubectl reaches it: JSON in and out, and streams. IO."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from loadgen.core.errors import TargetError, UserError
from loadgen.kube.manifests import CONTAINER, JOB_NAME, LABELS, Manifest, index

WAIT_S = 60.0  # longest wait for an answer
_LOGGED = re.compile(r"[EFIW]\d{4} ")  # of a log of its libraries: what it says itself is below


@dataclass(frozen=True)
class Kubectl:
    """The program with the flags that say which cluster and namespace. A failure is a TargetError."""

    flags: Sequence[str] = ()

    def ask(self, *words: str, given: Sequence[Manifest] = ()) -> bytes:
        """What kubectl prints. `given` goes to its standard input, and so onto no command line."""
        data = "\n".join(map(json.dumps, given)).encode() or None
        try:
            done = subprocess.run(
                self._command(words),
                input=data,
                capture_output=True,
                timeout=WAIT_S,
                check=False,
                stdin=subprocess.DEVNULL if data is None else None,
            )
        except FileNotFoundError:
            raise _missing() from None
        except subprocess.TimeoutExpired:
            raise TargetError(
                "timeout",
                f"no answer within {WAIT_S:g} s",
                self.where(words),
                "is the cluster there: kubectl version",
            ) from None
        if done.returncode:
            raise self.failed(words, done.stderr)
        return done.stdout

    def failed(self, words: Sequence[str], said: bytes) -> TargetError:
        """What kubectl said of its failure."""
        lines = said.decode(errors="replace").splitlines()
        own = [line for line in lines if not _LOGGED.match(line)] or lines
        what = " ".join(" ".join(own).split())[-600:] or "kubectl failed"
        return TargetError("process_failed", what, self.where(words), "the same by hand says more")

    def where(self, words: Sequence[str]) -> str:
        """A command as text, short: it does not end with a flag that lacks its value."""
        return self.typed("kubectl", *words[: 2 if words[2:3] in (("-l",), ("-c",)) else 3])

    def typed(self, *words: object) -> str:
        """A command line for the same cluster and namespace, as one may type it."""
        return " ".join(map(str, (*words, *self.flags)))

    def json(self, *words: str, given: Sequence[Manifest] = ()) -> Any:
        """The object that kubectl prints."""
        return json.loads(self.ask(*words, "-o", "json", given=given))

    @contextmanager
    def stream(self, *words: str, to: IO[bytes] | None = None) -> Iterator[IO[bytes]]:
        """What a running kubectl prints; it ends with the block. `to`: where its errors go."""
        try:
            process = subprocess.Popen(
                self._command(words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=to,
            )
        except FileNotFoundError:
            raise _missing() from None
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.terminate()
            process.stdout.close()
            process.wait()

    def _command(self, words: Sequence[str]) -> list[str]:
        verb, *rest = words
        return [
            "kubectl",
            verb,
            *self.flags,
            *rest,
        ]  # flags first: behind `--` they would be another's

    # -- what we ask of a run ----------------------------------------------------------------------------------------

    def jobs(self) -> list[Manifest]:
        """All Jobs of loadgen in this namespace."""
        wanted = ",".join(f"{key}={value}" for key, value in LABELS.items())
        found: list[Manifest] = self.json("get", "jobs", "-l", wanted)["items"]
        return found

    def job(self, name: str) -> Manifest:
        """One Job. Raises TargetError where there is none."""
        found: Manifest = self.json("get", "job", name)
        return found

    def pods(self, name: str) -> list[Manifest]:
        """The pods of a Job, the youngest of an index last."""
        found = self.json("get", "pods", "-l", f"{JOB_NAME}={name}")["items"]
        return sorted(
            found, key=lambda pod: (index(pod), pod["metadata"].get("creationTimestamp", ""))
        )

    def warning(self, name: str) -> str:
        """The latest that Kubernetes warns of a Job, as of a quota; "" where there is none, or none may be seen."""
        about = f"involvedObject.kind=Job,involvedObject.name={name},type=Warning"
        try:
            found = self.json("get", "events", "--field-selector", about)["items"]
        except TargetError:
            return ""
        latest = max(
            found, key=lambda event: event.get("lastTimestamp") or "", default={"message": ""}
        )
        return str(latest["message"])

    def inside(self, pod: str, *command: str) -> tuple[str, ...]:
        """The words that carry out a command in a pod."""
        return ("exec", pod, "-c", CONTAINER, "--", *command)


def _missing() -> UserError:
    hint = "install it; it finds the cluster by your kubeconfig"
    return UserError(
        "not_installed", "there is no kubectl on the path", "loadgen kube", hint, key="kubectl"
    )
