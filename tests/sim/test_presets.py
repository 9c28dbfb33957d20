"""Presets: the packaged ones are consistent and sourced, and errors in files are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from expected_errors import refused

from loadgen.core.errors import CombinedError, UserError
from loadgen.cost import published
from loadgen.sim.presets import preset

ALL = ["b200x8", "gb200-vm", "gb300-rack", "gb300-vm", "gb300-vm-128k", "h100x8", "h200x8"]


def test_every_packaged_preset_is_listed() -> None:
    assert preset.names() == ALL


@pytest.mark.parametrize("name", ALL)
def test_every_constant_of_a_packaged_preset_has_a_source(name: str) -> None:
    loaded_preset = preset.load_preset(name)
    constants = [
        getattr(loaded_preset.hardware, field)
        for field in type(loaded_preset.hardware).model_fields
    ]
    constants += [loaded_preset.assumed_input_tokens, loaded_preset.valid_from_sequences]

    assert all(constant.source and constant.value > 0 for constant in constants)
    assert loaded_preset.name == name and loaded_preset.fitted_on and loaded_preset.server.source
    assert (
        loaded_preset.replicas * loaded_preset.gpus_per_replica == loaded_preset.gpus
        and len(loaded_preset.speeds) == loaded_preset.replicas
    )


def test_presets_of_a_gpu_generation_share_one_overhead() -> None:
    overheads: dict[str, set[float]] = {}
    for name in ALL:
        loaded_preset = preset.load_preset(name)
        overheads.setdefault(loaded_preset.generation, set()).add(
            loaded_preset.hardware.overhead_ms.value
        )
    assert all(len(values) == 1 for values in overheads.values())


def test_llama_2_70b_has_its_published_size() -> None:
    model = preset.load_preset("gb300-vm").model
    parameters = model.block_parameters + 2 * model.hidden * model.vocab
    assert parameters == pytest.approx(68.98e9, rel=1e-3)  # norms left out
    assert model.kv_token_bytes == 2 * 80 * 8 * 128  # FP8
    assert model.token_flops == pytest.approx(2 * 68.7e9, rel=1e-3)


def test_costs_of_a_preset_equal_the_roofline_of_its_constants() -> None:
    loaded_preset = preset.load_preset("h100x8")  # two GPUs to a replica
    hardware, model = loaded_preset.hardware, loaded_preset.model
    bytes_per_s = 2 * hardware.bandwidth_tb_s.value * 1e12 * hardware.bandwidth_share.value
    flops_per_s = 2 * hardware.peak_tflops.value * 1e12 * hardware.compute_share.value

    assert loaded_preset.costs.weights_ns == pytest.approx(model.weight_bytes / bytes_per_s * 1e9)
    assert loaded_preset.costs.kv_token_ns == pytest.approx(
        model.kv_token_bytes / bytes_per_s * 1e9
    )
    assert loaded_preset.costs.token_ns == pytest.approx(model.token_flops / flops_per_s * 1e9)

    used_bytes = (
        loaded_preset.limits.kv_blocks
        * loaded_preset.limits.tokens_per_block
        * model.kv_token_bytes
        + model.memory_bytes
    )

    assert 0.85 * 2 * 85.5e9 < used_bytes < 2 * 85.5e9


def test_speeds_of_the_rack_preset_equal_those_of_published_logs() -> None:
    rates = [node.tokens_per_s for node in published.load_nodes().rows]
    mean = sum(rates) / len(rates)
    rack = preset.load_preset("gb300-rack")
    assert rack.vm_speeds == pytest.approx([rate / mean for rate in rates], abs=5e-5)
    assert rack.replicas == 72 and rack.costs == preset.load_preset("gb300-vm").costs


def test_a_preset_of_another_model_is_computed_from_its_dimensions(tmp_path: Path) -> None:
    preset_file = tmp_path / "mine.yaml"
    preset_file.write_text(
        """
extends: gb300-vm
model: {name: llama-3.1-8b, layers: 32, hidden: 4096, heads: 32, kv_heads: 8,
        intermediate: 14336, vocab: 128256, weights: fp8, kv_cache: fp8}
hardware: {overhead_ms: 5}
server: {max_seq_len: 8192}
"""
    )
    loaded_preset = preset.load_preset(str(preset_file))

    assert (loaded_preset.name, loaded_preset.model.name, loaded_preset.gpu) == (
        "mine",
        "llama-3.1-8b",
        "GB300",
    )
    assert loaded_preset.hardware.overhead_ms == preset.SourcedNumber(
        value=5, source="set by the user"
    )
    assert (
        loaded_preset.model.block_parameters
        + 2 * loaded_preset.model.hidden * loaded_preset.model.vocab
        == pytest.approx(8.03e9, rel=1e-2)
    )
    assert loaded_preset.costs.token_ns < preset.load_preset("gb300-vm").costs.token_ns / 8
    assert loaded_preset.fitted_on.startswith("nothing")
    assert (
        "model.name" in loaded_preset.fitted_on
        and "hardware.overhead_ms" in loaded_preset.fitted_on
    )


@pytest.mark.parametrize(
    ("text", "code", "hint"),
    [
        ("extends: gb300-vm\nserver: {max_batch: 3}", "unknown_key", "max_batch_size"),
        ("extends: gb300-vm\nhardware: {bandwith: 3}", "unknown_key", "bandwidth_tb_s"),
        ("extends: gb300-vm\nvms: many", "wrong_type", ""),
        ("extends: gb300\n", "unknown_name", "gb300-vm"),
        ("extends: [a]", "wrong_type", "gb300-vm"),
        ("name: x", "missing_key", "hardware"),
        ("- a", "wrong_type", ""),
        ("a: [", "invalid_syntax", ""),
        ("extends: gb300-vm\nvms: 0", "out_of_range", ""),
        ("extends: gb300-vm\nhardware: {memory_gib: .nan}", "out_of_range", ""),
        ("extends: gb300-vm\nhardware: {memory_gib: 40}", "conflict", ""),
        ("extends: gb300-vm\nmodel: {heads: 63}", "conflict", ""),
        ("extends: gb300-vm\ngpus_per_replica: 3", "conflict", ""),
        ("extends: gb300-vm\nvm_speeds: [1, 1]", "conflict", ""),
        ("extends: gb300-vm\nserver: {max_num_tokens: 100}", "conflict", ""),
        (
            "extends: gb300-vm\nserver: {scheduler: fair}",
            "unknown_name",
            "known: max_utilization, guaranteed_no_evict",
        ),
        ("extends: gb300-vm\nmodel: {weights: fp5}", "unknown_name", "nvfp4"),
        ("extends: " + "[" * 3000, "too_large", ""),
    ],
)
def test_errors_of_a_preset_file_are_reported(
    tmp_path: Path, text: str, code: str, hint: str
) -> None:
    preset_file = tmp_path / "own.yaml"
    preset_file.write_text(text)
    with refused((CombinedError, UserError), code) as exc_info:
        preset.load_preset(str(preset_file))
    assert hint in str(exc_info.value)


def test_all_errors_of_a_preset_file_are_reported_with_their_positions(tmp_path: Path) -> None:
    preset_file = tmp_path / "own.yaml"
    preset_file.write_text(
        "extends: h100x8\nvms: many\nhardware: {bandwith: 3, memory_gib: -1}\n"
        "replicas_at: {soon: 2}\n"
    )

    with pytest.raises(CombinedError) as exc_info:
        preset.load_preset(str(preset_file))
    assert [(fault.code, fault.where) for fault in exc_info.value.errors] == [
        ("wrong_type", f"{preset_file}:2:6 (vms)"),
        ("unknown_key", f"{preset_file}:3:12 (hardware.bandwith)"),
        ("out_of_range", f"{preset_file}:3:37 (hardware.memory_gib)"),
        ("invalid_value", f"{preset_file}:4:15 (replicas_at.soon)"),
    ]


def test_an_error_in_an_extended_preset_is_reported_in_its_file(tmp_path: Path) -> None:
    base, preset_file = tmp_path / "base.yaml", tmp_path / "own.yaml"
    base.write_text("extends: gb300-vm\nvms: 0\n")
    preset_file.write_text(f"extends: {base}\nvms: 2\n")
    with pytest.raises(CombinedError) as exc_info:
        preset.load_preset(str(preset_file))
    assert [fault.where for fault in exc_info.value.errors] == [f"{base}:2:6 (vms)"]


def test_a_preset_that_extends_itself_or_is_missing_is_refused(tmp_path: Path) -> None:
    preset_file = tmp_path / "own.yaml"
    preset_file.write_text(f"extends: {preset_file}")
    with pytest.raises(UserError, match=r"own\.yaml \(extends\)"):
        preset.load_preset(str(preset_file))
    with pytest.raises(UserError, match=r"none\.yaml"):
        preset.load_preset(str(tmp_path / "none.yaml"))


def test_the_hint_for_an_unknown_preset_lists_the_known_ones() -> None:
    with refused(UserError, "unknown_name", "--target") as exc_info:
        preset.load_preset("gb300-vmm", "--target sim:")
    hint = exc_info.value.hint
    assert '"gb300-vm"' in hint
    assert all(name in hint for name in ALL)
