"""A recomputed run equals the plain one, to the bit, in every case of the table."""

import pytest

from parity_tests.tests_torch.cases import CASES, differences, logged

ROWS = [(case, kind) for case in CASES for kind in case.kinds]


@pytest.mark.bitwise
@pytest.mark.filterwarnings("ignore:a backward ended while the autocast:UserWarning")
@pytest.mark.parametrize(("case", "kind"), ROWS, ids=[f"{c.name}-{k}" for c, k in ROWS])
def test_equals_plain(case, kind):
    plain = logged(case.name, "plain")
    ours = logged(case.name, kind)
    assert plain.moved()
    assert differences(ours, plain) == []
