"""Makes the templates of the Helm chart of the manifests of `loadgen kube`: python tests/make_chart.py

A manifest is made with marks in the place of values, written as YAML, and each mark becomes what Helm puts there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from loadgen.kube import manifests
from loadgen.kube.manifests import JobAsked

TEMPLATES = Path(__file__).parent.parent / "deploy" / "chart" / "templates"
HEAD = "{{- /* Made by tests/make_chart.py of loadgen/kube/manifests.py. */}}\n"
PODS = 4711

NAME = "{{ .Release.Name }}"
AGENTS = (
    "agents:{{ range $i := until (int $.Values.pods) }}{{ if $i }},{{ end }}{{ $.Release.Name }}-{{ $i }}."
    "{{ $.Release.Name }}:" + f"{manifests.PORT}*" + "{{ $.Values.cpus }}{{ end }}"
)
ARGUMENTS = """{{- range .Values.arguments }}
        - {{ . | quote }}
        {{- end }}
        {{- if not (regexMatch "(^| )--workers" (join " " .Values.arguments)) }}
        - --workers
        - {{ .Values.pods | quote }}
        {{- end }}"""
MARKS = {
    "release-name": NAME,
    "'{agents}'": f'"{AGENTS}"',
    "'{image}'": "{{ .Values.image | quote }}",
    "'{memory}'": "{{ .Values.memory | quote }}",
    "'4712'": "{{ .Values.cpus | quote }}",
    "'4713'": "{{ .Values.hold | quote }}",
    f"{PODS}": "{{ .Values.pods }}",
    "'{secret}'": '{{ .Values.secret | default (printf "%s-none" .Release.Name) }}',
    "- '{arguments}'": ARGUMENTS,
    "'{files}'": "{{ .Values.files | toJson }}",
    "'{token}'": "{{ randAlphaNum 32 | b64enc | quote }}",
}


def templates() -> dict[str, str]:
    """Name -> text."""
    asked = JobAsked(
        name="release-name",
        image="{image}",
        pods=1,
        arguments=["{arguments}"],
        secret="{secret}",
        cpus=4712,
        memory="{memory}",
        hold_s=4713,
        stop=False,
    )
    job = manifests.job(asked)
    job["spec"] |= {"completions": PODS, "parallelism": PODS}
    arguments: list[Any] = job["spec"]["template"]["spec"]["containers"][0]["args"]
    arguments[2] = "{agents}"
    config, secret, service = manifests.beside("release-name", {}, {})
    del config["binaryData"]
    config["data"] = "{files}"
    secret["data"] = {manifests.TOKEN_KEY: "{token}"}
    return {"job.yaml": _text([job]), "beside.yaml": _text([config, secret, service])}


def _text(made: list[Any]) -> str:
    text = yaml.dump_all(made, Dumper=_Plain, sort_keys=False, width=1000)
    for mark, put in MARKS.items():
        text = text.replace(mark, put)
    return HEAD + text


class _Plain(yaml.SafeDumper):
    """Without references between what is the same twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


if __name__ == "__main__":
    for name, text in templates().items():
        (TEMPLATES / name).write_text(text, "utf-8")
