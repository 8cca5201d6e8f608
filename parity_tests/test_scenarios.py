"""The list of rows: at most 40, pairwise covering, with every recording in use."""

from parity_tests import scenarios
from parity_tests.controls import FAULTS
from parity_tests.inputs import GOLDEN
from parity_tests.scenarios import AXES, axis_pairs, curated, is_valid, product


def default_rows():
    return [s for s in curated() if not s.gpu_only]


def test_at_most_40_rows():
    assert len(default_rows()) <= 40
    names = [s.name for s in curated()]
    assert len(names) == len(set(names))


def test_every_valid_pair_of_axis_values_is_covered():
    wanted = {pair for s in product() if not s.label for pair in axis_pairs(s)}
    # The rows of labels without a program or numbers of their own count too.
    trained = [s for s in default_rows() if s.program == "two_layer" and not s.fault]
    covered = {pair for s in trained for pair in axis_pairs(s)}
    assert wanted <= covered
    values = {(i, v) for i, a in enumerate(AXES.values()) for v in a}
    assert values == {pair[:2] for pair in wanted} | {pair[2:] for pair in wanted}


def test_without_one_row_a_pair_is_missing():
    wanted = {pair for s in product() if not s.label for pair in axis_pairs(s)}
    trained = [s for s in default_rows() if s.program == "two_layer" and not s.fault]
    needed = [
        row.name
        for row in trained
        if not wanted <= {p for s in trained if s is not row for p in axis_pairs(s)}
    ]
    assert len(needed) >= 15


def test_curated_rows_are_valid():
    assert all(is_valid(s) for s in scenarios._PAIRWISE)
    assert len(product()) > 500


def test_every_recording_is_used():
    used = {s.golden for s in default_rows()} - {""}
    assert used == {path.stem for path in GOLDEN.glob("*.npz")}


def test_every_fault_has_a_row():
    assert {s.fault for s in default_rows()} - {""} == set(FAULTS)
