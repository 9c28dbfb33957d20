"""Records by column equal an array of records and store repeated columns once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.core.results.record import ROW
from loadgen.sim.record_columns import RecordColumns


@settings(deadline=None, max_examples=30)
@given(values=st.lists(st.integers(-1, 100), max_size=20), chosen=st.data())
def test_record_columns_equal_those_of_an_array_of_records(
    values: list[int], chosen: st.DataObject
) -> None:
    given_values = np.array(values, np.int64)
    rows = np.zeros(len(values), ROW)
    for name in ("slot", "request", "output_tokens", "replica"):
        rows[name] = given_values
    rows["virtual_user"] = -1
    columns = RecordColumns(
        len(values),
        dict.fromkeys(("slot", "request", "output_tokens", "replica"), given_values)
        | {"virtual_user": -1},
    )

    assert (
        len(columns) == len(values) and (columns[:] == rows).all() and list(columns) == list(rows)
    )
    assert all(
        (columns[name] == rows[name]).all() and columns[name].dtype == ROW[name]
        for name in ROW.names or ()
    )
    start, end = sorted(chosen.draw(st.tuples(st.integers(0, 20), st.integers(0, 20))))
    assert (columns.slice_records(slice(start, end))[:] == rows[start:end]).all()
    assert (columns[given_values > 3] == rows[given_values > 3]).all()


def test_constant_and_repeated_columns_are_stored_once() -> None:
    due = np.arange(1000)
    columns = RecordColumns(
        1000,
        {"due_ns": due, "sent_ns": due, "status": np.zeros(1000, np.int64), "virtual_user": -1},
    )

    assert columns["due_ns"] is columns["sent_ns"]
    assert [columns[name].strides for name in ("status", "virtual_user", "slot")] == [(0,)] * 3
    with pytest.raises(ValueError, match="read-only"):
        columns["virtual_user"][0] = 1
